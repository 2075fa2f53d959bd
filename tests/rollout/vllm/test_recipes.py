"""A recipe that needs servers, started as a user starts it, for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl_core.reports.jsonl import read_rows
from tests.rollout.vllm.runs import prepare, started

pytestmark = pytest.mark.slow

FEW = {
    "trainer.max_training_steps": 3,
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 8,
    "generator.n_samples_per_prompt": 8,
}


def test_an_adapter_is_trained_on_the_samples_of_two_servers(tmp_path: Path):
    prepare(tmp_path)
    with started(tmp_path, FEW, recipe="lora_two_servers") as run:
        try:
            assert run.wait(timeout=1000) == 0, (tmp_path / "printed").read_text()
        finally:
            run.kill()
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    # Trainer and servers compute in float32 with the same adapter, so only rounding differs.
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    for row in rows:
        idle = [row["time/engine_idle/0"], row["time/engine_idle/1"]]
        # Both servers share the samples of a step, and neither samples while the step is trained.
        assert all(0.9 * row["time/train"] < seconds < row["time/step"] for seconds in idle), row
        assert row["time/engine_idle"] == sum(idle) / 2
    adapter = load_file(tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors")
    assert all(weight.any() for name, weight in adapter.items() if ".lora_B." in name)
