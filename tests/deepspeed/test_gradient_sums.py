"""In bfloat16, DeepSpeed sums gradients over the ranks in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_deepspeed import DeepSpeedOptions, deepspeed
from rl_transformers.testing.backend import PRELOADED, TEMPERATURE
from rl_transformers.testing.cases import LOSS, Variant, open_case
from rl_transformers.testing.ranks import ONE_MICRO_BATCH
from tests.deepspeed.test_conformance import zero

PRELOADED.update(dict.fromkeys(["rl_deepspeed.backend", "rl_deepspeed.worker"]))


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.parity) for stage in (1, 2))])
def test_the_sum_over_two_ranks_is_not_rounded_to_bfloat16(stage: int, tmp_path: Path):
    variant = Variant(world_size=2, options=zero(stage), spec={"bf16": True})
    with open_case(deepspeed, DeepSpeedOptions(), variant, tmp_path, timeout_s=120) as case:
        group = case.start()
        group.forward_backward(case.batch, ONE_MICRO_BATCH, LOSS, temperature=TEMPERATURE)
        gradients = torch.cat([gradient.flatten() for gradient in group.gradients().values()])
    gradients = gradients[gradients != 0]
    are_bfloat16 = gradients.bfloat16().float() == gradients
    assert are_bfloat16.float().mean() < 0.9, "most sums of two bfloat16 numbers must not be bfloat16 numbers"
