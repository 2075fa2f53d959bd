"""The losses of routers add the gradients of their formulas to the policy loss's gradient, on every mesh, with padding,
several micro-batches, recomputation, ranks without sequences and stages without experts. The losses that are
refused are measured too: they do not. The bias of experts is updated by its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.layout.packing import plan_micro_batches
from rl_core.workers import MicroBatchLimits
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.ranks import RankGroup
from tests.megatron.changed import UncheckedBackend

PRELOADED["rl_megatron.rank.worker"] = None
TP, CP, PP, EP = (f"{kind}_parallel_size" for kind in ("tensor_model", "context", "pipeline_model", "expert_model"))
BALANCED: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
Z_LOSS: dict[str, Any] = {"transformer_config_kwargs": {"moe_z_loss_coeff": 0.02}}
NO_POLICY_LOSS = attrs.evolve(LOSS, kl_coef=0.0, entropy_coef=0.0)
"""Without KL and entropy, and with advantages of 0 (`batch_of`), the policy loss has no gradient."""
GATE = "model.layers.0.mlp.gate.weight"


def start(case: Case, world_size: int = 1, *, unchecked: bool = False, **options: Any) -> RankGroup:
    fields = {
        name: options.pop(name) for name in list(options) if name in ("use_sample_packing", "gradient_checkpointing")
    }
    spec = attrs.evolve(case.spec, options=MegatronOptions(**options), **fields)
    backend = UncheckedBackend() if unchecked else megatron
    group = RankGroup(backend, spec, world_size, directory=case.directory, timeout_s=120)
    case.started.append(group)
    return group


def batch_of(case: Case) -> Batch:
    return case.batch.with_columns(advantages=torch.zeros_like(case.batch["advantages"]))


def gradients(group: RankGroup, batch: Batch, limits: MicroBatchLimits = LIMITS) -> dict[str, Tensor]:
    group.forward_backward(batch, limits, NO_POLICY_LOSS, temperature=TEMPERATURE)
    return group.gradients()


def balancing_loss(logits_TE: Tensor) -> Tensor:
    """E · Σ_e f_e P_e (Fedus et al. 2021, arXiv 2101.03961, eq. 4). f_e is the share of expert e among the K choices of
    all tokens, P_e its mean probability."""
    probs_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(probs_TE).scatter(1, probs_TE.topk(2).indices, 1.0)
    return 8 * (chosen_TE.mean(0) / 2 * probs_TE.mean(0)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """The mean of log²(Σ exp logits) over the tokens (Zoph et al. 2022, arXiv 2202.08906, eq. 5)."""
    return logits_TE.logsumexp(-1).square().mean()


def expected_gradients(
    case: Case, batch: Batch, micro_batches: Sequence[Sequence[int]], loss: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Gradient of Σ (tokens · loss) / all tokens over micro-batches of these sequences, summed over layers, with plain
    transformers, one sequence at a time."""
    seen: list[Tensor] = []
    case.reference.model.zero_grad()
    modules = list(routers(case.reference.model).values())
    handles = [module.register_forward_hook(lambda _m, _a, out: seen.append(out[0].float())) for module in modules]
    total = torch.zeros(())
    for sequences in micro_batches:
        logits_of_layer: list[list[Tensor]] = [[] for _ in modules]
        for sequence in sequences:
            seen.clear()
            case.reference.model(input_ids=batch.select([sequence])["tokens"][None], use_cache=False)
            for of_layer, logits_TE in zip(logits_of_layer, seen, strict=True):
                of_layer.append(logits_TE)
        for of_layer in logits_of_layer:
            logits_TE = torch.cat(of_layer)
            total = total + loss(logits_TE) * len(logits_TE) / batch.num_tokens
    for handle in handles:
        handle.remove()
    total.backward()
    return case.reference.gradients()


def micro_batches_of(group: RankGroup, batch: Batch) -> list[list[int]]:
    mesh = group.mesh
    plans = plan_micro_batches(
        batch.lengths.numpy(),
        num_data_ranks=mesh.data,
        max_tokens=LIMITS.max_tokens,
        max_sequences=None,
        multiple=mesh.micro_batch_multiple,
        sequence_multiple=mesh.sequence_multiple,
    )
    return [sequences.tolist() for plan in plans for sequences in plan if len(sequences)]


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    errors = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    return float(errors.norm() / torch.stack([gradient.norm() for gradient in expected.values()]).norm())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory):
    variant = Variant(checkpoint={"family": "qwen3_moe", "tie_word_embeddings": False})
    directory = tmp_path_factory.mktemp("router_losses")
    with open_case(megatron, MegatronOptions(), variant, directory, timeout_s=120) as case:
        yield case


@pytest.mark.parametrize(
    ("world_size", "options", "has_z_loss"),
    [
        (1, {"use_sample_packing": False}, True),
        (2, {TP: 2}, False),
        (2, {CP: 2, "gradient_checkpointing": True}, False),
        (2, {PP: 2, "gradient_checkpointing": True}, True),
        (2, {EP: 2, "use_sample_packing": False}, True),
    ],
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_the_losses_of_routers_have_the_gradients_of_their_formulas(
    case: Case, world_size: int, options: dict[str, Any], has_z_loss: bool
):
    batch = batch_of(case)
    group = start(case, world_size, **options, **BALANCED, **(Z_LOSS if has_z_loss else {}))
    micro_batches = micro_batches_of(group, batch)
    assert len(micro_batches) >= 3

    def loss(logits_TE: Tensor) -> Tensor:
        return 0.1 * balancing_loss(logits_TE) + 0.02 * has_z_loss * z_loss(logits_TE)

    expected = expected_gradients(case, batch, micro_batches, loss)
    assert expected[GATE].norm() > 1e-4
    assert relative_error(gradients(group, batch), expected) <= 2e-6


def test_a_rank_without_sequences_adds_nothing_to_the_balancing_gradient(case: Case):
    batch = batch_of(case).select([1])
    found = gradients(start(case, 2, **BALANCED), batch)
    expected = expected_gradients(case, batch, [[0]], lambda logits_TE: 0.1 * balancing_loss(logits_TE))
    assert relative_error(found, expected) <= 2e-6


@pytest.mark.parametrize("sizes", [{TP: 2}, {CP: 2}], ids=str)
def test_the_refused_z_loss_has_half_its_gradient_on_two_tensor_or_context_ranks(case: Case, sizes: dict[str, int]):
    batch = batch_of(case)
    found = gradients(start(case, 2, unchecked=True, **sizes, **Z_LOSS), batch)[GATE]
    expected = expected_gradients(case, batch, [range(8)], lambda logits_TE: 0.02 * z_loss(logits_TE))[GATE]
    assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(("kind", "wrong"), [("seq_aux_loss", "together"), ("global_aux_loss", "apart")])
def test_the_refused_balancing_losses_depend_on_the_split_into_micro_batches(case: Case, kind: str, wrong: str):
    """Two sequences of 40 tokens are two micro-batches, or one."""
    pair = batch_of(case).select([3, 7])
    options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
    group = start(case, unchecked=True, use_sample_packing=False, **options)
    apart = gradients(group, pair, MicroBatchLimits(max_sequences=1))
    both = gradients(group, pair, MicroBatchLimits())  # the sum: gradients accumulate
    found = {"apart": apart, "together": {name: both[name] - apart[name] for name in apart}}
    right = "together" if wrong == "apart" else "apart"
    micro_batches = [[0], [1]] if kind == "seq_aux_loss" else [[0, 1]]
    expected = expected_gradients(case, pair, micro_batches, lambda logits_TE: 0.1 * balancing_loss(logits_TE))
    assert relative_error(found[right], expected) <= 1e-5
    assert relative_error(found[wrong], expected) > 0.3
    if kind == "seq_aux_loss":
        half = {name: gradient / 2 for name, gradient in expected.items()}
        assert relative_error(found[wrong], half) <= 1e-5


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


SLOW_BIAS = 1e-3


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {TP: 2}),
        (2, {CP: 2, "gradient_checkpointing": True}),
        (2, {EP: 2, "use_sample_packing": False}),
        (2, {PP: 2}),
    ],
    ids=str,
)
def test_the_bias_of_experts_is_updated_by_its_rule(deepseek: Case, world_size: int, options: dict[str, Any]):
    """b_e += rate · sign(mean load − load_e), with the loads of all tokens of the step (Wang et al. 2024, arXiv
    2408.15664, algorithm 1). Two calls of `forward_backward` are one step. A skipped step changes nothing."""
    chosen: list[Tensor] = []
    model = deepseek.reference.model
    ((layer, router),) = routers(model).items()
    handle = router.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    for sequence in range(8):
        model(input_ids=deepseek.batch.select([sequence])["tokens"][None], use_cache=False)
    handle.remove()
    load_E = torch.cat(chosen).flatten().bincount(minlength=8).double()
    name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    group = start(deepseek, world_size, **options, transformer_config_kwargs={"moe_router_bias_update_rate": SLOW_BIAS})
    nan_T = torch.full((deepseek.batch.num_tokens,), float("nan"))
    group.forward_backward(deepseek.batch.with_columns(advantages=nan_T), LIMITS, LOSS, temperature=TEMPERATURE)
    assert group.optim_step().skipped
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
        gradients(group, batch_of(deepseek).select(rows))
    group.optim_step()
    before_E = router.e_score_correction_bias.double()
    expected_E = before_E + SLOW_BIAS * torch.sign(load_E.mean() - load_E)
    torch.testing.assert_close(group.weights()[name].double(), expected_E, rtol=0, atol=1e-7)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory):
    variant = Variant(checkpoint={"family": "deepseek_v3", "tie_word_embeddings": False})
    directory = tmp_path_factory.mktemp("expert_bias")
    with open_case(megatron, MegatronOptions(), variant, directory, timeout_s=120) as case:
        yield case


def test_the_balancing_loss_is_reported_in_total_and_per_layer(case: Case):
    group = start(case, moe_per_layer_logging=True, **BALANCED)
    metrics = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    layers = [metrics[f"moe_load_balancing_loss_layer_{layer}"] for layer in (0, 1)]
    total, weight = metrics["moe_load_balancing_loss"]
    assert total / weight == pytest.approx(sum(value / count for value, count in layers) / 2)
    assert total / weight >= 1.0 - 1e-3, "the reported loss must not be scaled; it is 1 at perfect balance"
