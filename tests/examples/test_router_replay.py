"""Router replay in a whole run: the trainer replays the expert choices of an engine that gets the trained weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_core.config import Config
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from rl_transformers.expert_choices import ExpertChoices
from rl_transformers.testing.models import make_checkpoint


def test_a_mixture_of_experts_is_trained_along_the_routes_of_its_engine(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known: list[float] = []
    original = ExpertChoices.follow

    def follow(self: ExpertChoices, routes_CLK: torch.Tensor | None, routed_C: torch.Tensor | None) -> None:
        if routed_C is not None and routed_C.numel() > 20:
            known.append(routed_C.float().mean().item())
        original(self, routes_CLK, routed_C)

    monkeypatch.setattr(ExpertChoices, "follow", follow)
    model = make_checkpoint(tmp_path / "model", family="qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0])
    config = small_run(
        tmp_path / "run",
        trainer__policy__model__path=str(model),
        trainer__policy__fsdp_config__moe_enable_routing_replay=True,
        trainer__gradient_checkpointing=True,
        trainer__max_training_steps=3,
        trainer__algorithm__use_kl_loss=True,
        generator__inference_engine__enable_return_routed_experts=True,
    )
    assert run_training(config).steps == 3
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    # Both sides compute in float32 with the same experts, so only rounding differs. Step 3 samples with
    # weights that were synced after two steps.
    assert [row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:]] == [True] * 3
    # Each sequence has routes for all of its tokens except the last, which was never an input.
    assert len(known) >= 3 * 2
    assert min(known) > 0.7
