"""SmolLM2-135M-Instruct in bfloat16: rows of the table `bfloat16` of docs/parity.md."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
import pytest

from rl_core.interfaces import OptimizerConfig
from rl_fsdp import FsdpOptions
from rl_transformers.testing.bfloat16 import Baseline, measure_results
from rl_transformers.testing.parity import Measurement, write_down
from rl_transformers.testing.ranks import RankGroup
from tests.real_model.real_text import policy_batches, real_model, real_sequences
from tests.real_model.test_backends import LIMITS, MESHES, spec_of

pytestmark = [pytest.mark.parity, pytest.mark.timeout(3600)]
OPTIMIZER = OptimizerConfig(lr=1e-5, adam_betas=(0.9, 0.95))
"""Typical settings for training such a model."""
LIMIT = 1.5


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    """The results of plain transformers in float32 and in bfloat16."""
    model = real_model()
    spec = attrs.evolve(spec_of(model, FsdpOptions(), bf16=False), optimizer=OPTIMIZER)
    return Baseline.of(spec, partial(policy_batches, real_sequences(model)))


@pytest.mark.parametrize("name", MESHES)
def test_bfloat16_errs_by_little_more_than_plain_transformers(name: str, baseline: Baseline, tmp_path: Path):
    backend, world_size, options = MESHES[name]
    spec = attrs.evolve(spec_of(real_model(), options, bf16=True), optimizer=OPTIMIZER)
    group = RankGroup(backend, spec, world_size, directory=tmp_path, timeout_s=1800)
    try:
        found = measure_results(group, baseline.batches, LIMITS, group.weights)
    finally:
        group.close()
    own, plain = map(attrs.asdict, baseline.errors(found))
    for quantity, unit in plain.items():
        measurement = Measurement(
            backend=backend.name,
            mesh=f"SmolLM2-135M-Instruct, {name.split(', ')[1]}",
            quantity=f"bf16 {quantity}",
            difference=own[quantity] / unit,
            limit=LIMIT,
            unit=unit,
        )
        write_down(measurement)
        print(f"\n{name}: {quantity} {measurement}")
        assert measurement.difference <= LIMIT, f"{quantity}: {measurement}"
