"""`trainer.gradient_checkpointing=selective`: computes matrix products and attention only once, gives the same
gradient, and needs more memory than full recomputation but less than no recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_core import config as configuration
from rl_core.interfaces import LossSpec
from rl_core.trainer.before.planned_run import arranged_models, longest_sequence, planned_model
from rl_core.trainer.before.rehearsed_run import planned_phase, rehearsed_model
from rl_fsdp import FsdpOptions
from rl_transformers.rank import recomputation
from tests.fsdp.conftest import StartWorker, random_batch

LOSS = LossSpec(name="ppo_clip", params={"eps_clip_low": 0.2, "eps_clip_high": 0.2})
PLAN = [[0, 1, 2], [3, 4, 5]]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "dense, shared prompts": ({}, {"share_prefixes": True}),
    "dense, padded": ({}, {"use_sample_packing": False}),
    "dense, bfloat16": ({}, {"bf16": True}),
    "experts": ({"family": "qwen3_moe"}, {}),
    "latent attention": ({"family": "deepseek_v3"}, {}),
}


def gradient_and_flops(start_worker: StartWorker, model: str, which: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients and floating-point operations of two micro-batches. The batch's first two sequences share a prefix."""
    checkpoint, spec = MODELS[model]
    worker = start_worker(checkpoint, gradient_checkpointing=which, options=FsdpOptions(), **spec)
    batch = random_batch([19, 23, 14, 9, 31, 12])
    tokens_T = batch["tokens"].clone()
    tokens_T[19:29] = tokens_T[:10]
    batch = batch.with_columns(tokens=tokens_T, loss_weights=batch["loss_mask"] / 50)
    with FlopCounterMode(display=False) as counter:
        worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
    gradients = [p.grad for p in worker.scorer.parameters() if p.grad is not None]
    return gradients, counter.get_total_flops()


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_the_same_to_the_bit_and_no_product_is_computed_twice(start_worker: StartWorker, model: str):
    kept, flops_of_kept = gradient_and_flops(start_worker, model, False)
    selective, flops_of_selective = gradient_and_flops(start_worker, model, "selective")
    _, flops_of_whole = gradient_and_flops(start_worker, model, True)
    assert any(g.abs().max() > 1e-3 for g in kept)
    assert all(torch.equal(a, b) for a, b in zip(kept, selective, strict=True))
    assert flops_of_selective == flops_of_kept
    # In these models, two thirds of the operations are in the layers, and a third of these are in the forward pass.
    assert flops_of_whole > 1.1 * flops_of_kept


def test_a_product_that_is_not_listed_is_computed_twice(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recomputation, "KEPT", recomputation.KEPT - {torch.ops.aten.mm.default})
    kept, flops_of_kept = gradient_and_flops(start_worker, "dense", False)
    selective, flops_of_selective = gradient_and_flops(start_worker, "dense", "selective")
    assert all(torch.equal(a, b) for a, b in zip(kept, selective, strict=True))
    assert flops_of_selective > flops_of_kept


def test_a_full_size_step_takes_the_memory_that_is_planned():
    config = configuration.load("qwen2_5_1_5b", ["trainer.gradient_checkpointing=selective"]).config
    model = arranged_models(config)["policy"]
    phase = rehearsed_model(config, "policy", model).phases[0]
    planned = planned_phase(planned_model(config, "policy", model, longest_sequence(config)), "train")
    assert sum(planned.values()) == pytest.approx(sum(phase.parts.values()), rel=0.05)
    stored = configuration.load("qwen2_5_1_5b", ["trainer.gradient_checkpointing=false"]).config
    plan = planned_model(stored, "policy", arranged_models(stored)["policy"], longest_sequence(stored))
    assert phase.parts["activations"] < 0.9 * planned_phase(plan, "train")["activations"]
    layer_inputs = 28 * 1536 * longest_sequence(config)
    assert phase.parts["activations"] > 5 * layer_inputs * 2, (
        "selective must keep far more than the layer inputs, which are all that full recomputation keeps"
    )
