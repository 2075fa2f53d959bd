"""A load-balancing loss adds the gradient of its mean over all tokens to the policy loss's gradient. This also holds if
tensor or context parallelism splits the tokens, if a rank has no sequences, and if a pipeline stage has no experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.testing.backend import LIMITS, PRELOADED, TEMPERATURE
from rl_core.testing.cases import LOSS, Case, Variant, open_case
from rl_core.testing.forced_routes import routers
from rl_core.testing.ranks import ONE_MICRO_BATCH, RankGroup
from rl_megatron import MegatronOptions, megatron

PRELOADED["rl_megatron.rank.worker"] = None
ONE_SEQUENCE = [1]
CHECKPOINT = {"family": "qwen3_moe", "tie_word_embeddings": False}
BALANCED: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


def start(case: Case, world_size: int = 1, **options: Any) -> RankGroup:
    spec = attrs.evolve(case.spec, options=MegatronOptions(**options))
    group = RankGroup(megatron, spec, world_size, directory=case.directory, timeout_s=120)
    case.started.append(group)
    return group


def gradients(group: RankGroup, batch: Any) -> dict[str, Tensor]:
    group.forward_backward(batch, ONE_MICRO_BATCH, LOSS, temperature=TEMPERATURE)
    return group.gradients()


def balancing_loss(case: Case, tokens_T: Tensor) -> Tensor:
    """0.1 · E · Σ_e f_e P_e, summed over layers (Fedus et al. 2021, arXiv 2101.03961, eq. 4). f_e is the share of
    expert e among the K choices of all tokens, P_e its mean probability."""
    seen: list[Tensor] = []
    modules = list(routers(case.reference.model).values())
    handles = [module.register_forward_hook(lambda _m, _a, out: seen.append(out[0])) for module in modules]
    case.reference.model(input_ids=tokens_T[None], use_cache=False)
    for handle in handles:
        handle.remove()
    total = torch.zeros(())
    for logits_TE in seen:
        probs_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter(1, probs_TE.topk(2).indices, 1.0)
        total = total + 0.1 * 8 * (chosen_TE.mean(0) / 2 * probs_TE.mean(0)).sum()
    return total


@pytest.fixture
def case(tmp_path: Path):
    with open_case(megatron, MegatronOptions(), Variant(checkpoint=CHECKPOINT), tmp_path, timeout_s=120) as case:
        yield case


def test_the_balancing_gradient_is_that_of_the_formula(case: Case):
    batch = case.batch.select(ONE_SEQUENCE)
    plain, balanced = gradients(start(case), batch), gradients(start(case, **BALANCED), batch)
    balancing_loss(case, batch["tokens"]).backward()
    expected = case.reference.gradients()
    name = "model.layers.0.mlp.gate.weight"
    assert expected[name].norm() > 1e-4
    for name, gradient in expected.items():
        found = balanced[name] - plain[name]
        # The tolerance covers the rounding of a difference of two float32 gradients with values up to 10.
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=2e-5, msg=name)


def test_the_balancing_gradient_is_the_same_on_two_tensor_or_context_ranks_as_on_one(case: Case):
    batch = case.batch.select(ONE_SEQUENCE)
    expected = gradients(start(case, **BALANCED), batch)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for sizes in ({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}):
        found = gradients(start(case, 2, **sizes, **BALANCED), batch)
        errors = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
        assert errors.norm() <= 1e-5 * norm, sizes


def test_a_rank_without_sequences_adds_nothing_to_the_balancing_gradient(case: Case):
    batch = case.batch.select(ONE_SEQUENCE)
    expected, found = gradients(start(case, **BALANCED), batch), gradients(start(case, 2, **BALANCED), batch)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    errors = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    assert errors.norm() <= 1e-5 * norm


def test_a_stage_without_experts_reports_the_losses_of_the_other_stages(tmp_path: Path):
    checkpoint = {"family": "deepseek_v3", "tie_word_embeddings": False}
    losses = {**BALANCED, "transformer_config_kwargs": {"moe_z_loss_coeff": 0.01}}
    with open_case(megatron, MegatronOptions(), Variant(checkpoint=checkpoint), tmp_path, timeout_s=120) as case:
        one, two = start(case, **losses), start(case, 2, pipeline_model_parallel_size=2, **losses)
        for _ in range(2):
            found, expected = (
                group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE) for group in (two, one)
            )
            for name in ("moe_load_balancing_loss", "moe_z_loss"):
                assert found[name] == pytest.approx(expected[name], rel=1e-4)
        assert two.optim_step().grad_norm == pytest.approx(one.optim_step().grad_norm, rel=1e-5)


def test_the_balancing_loss_is_reported_in_total_and_per_layer(case: Case):
    group = start(case, moe_per_layer_logging=True, **BALANCED)
    metrics = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    layers = [metrics[f"moe_load_balancing_loss_layer_{layer}"] for layer in (0, 1)]
    total, weight = metrics["moe_load_balancing_loss"]
    assert total / weight == pytest.approx(sum(value / count for value, count in layers) / 2)
    assert total / weight >= 1.0 - 1e-3, "the reported loss must not be scaled; it is 1 at perfect balance"
