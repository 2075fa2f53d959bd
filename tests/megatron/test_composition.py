"""A fault reported in Megatron-LM issue 7452 that could affect this backend: finding 9, losses divided by the number of
trained tokens of one context rank.

docs/megatron.md says which other findings of the issue do not affect this backend, and for which this is unknown.
"""

from __future__ import annotations

import pytest
import torch

from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import LIMITS, PRELOADED, backward
from rl_transformers.testing.cases import LOSS, TEMPERATURE, Variant, open_case

PRELOADED["rl_megatron.rank.worker"] = None


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_single_trained_token_on_either_context_rank_gives_the_gradient_of_one_process(tmp_path, is_packed):
    """Trains on one token at a time, so that the other context rank has no trained token."""
    variant = Variant(
        world_size=2, options=MegatronOptions(context_parallel_size=2), spec={"use_sample_packing": is_packed}
    )
    with open_case(megatron, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        group = case.start()
        trained = case.batch["loss_mask"].nonzero().squeeze(1)
        for token in (trained[0], trained[len(trained) // 2], trained[-1]):
            mask_T = torch.zeros_like(case.batch["loss_mask"])
            mask_T[token] = True
            batch = case.batch.with_columns(loss_mask=mask_T, loss_weights=mask_T.float())
            group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
            backward(case.reference, batch, LOSS)
            found, expected = group.gradients(), case.reference.gradients()
            error = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()]).norm()
            size = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
            assert error < 1e-5 * size, (
                "the ranks' gradients must add up to the gradient of one process, up to float32 rounding"
            )
