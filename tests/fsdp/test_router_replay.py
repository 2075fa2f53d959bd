"""Replay of a batch's routes by each kind of router, by ranks that split sequences, and with adapters. Each comparison
with forced experts has a negative control with other routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rl_core.batch import Batch
from rl_core.config import from_mapping
from rl_core.config.checks import check_plugins
from rl_core.errors import ConfigError, ShapeError
from rl_core.interfaces import LossSpec, RankInfo
from rl_core.rank_kit.route_checks import RouteShape, require_routes
from rl_fsdp import FsdpOptions, FsdpWorker
from rl_fsdp.backend import fsdp
from rl_transformers.rank.micro_batch import model_input, predicted_tokens
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import Variant, make_batch, open_case
from rl_transformers.testing.models import MOE_FAMILIES, Family, make_checkpoint
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.forced_numbers import (
    ATTENTION_ADAPTERS,
    ForcedNumbers,
    require_adapters_trained_along_routes,
    require_breaks_found,
    require_replayed,
)
from tests.fsdp.changed import ChangedFsdp
from tests.fsdp.conftest import StartWorker, spec_of

PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "rl_fsdp.sharding", "tests.fsdp.changed"]))

FOLLOWING = FsdpOptions(moe_enable_routing_replay=True)
LOSS = LossSpec(name="ppo_clip", kl_coef=0.1, entropy_coef=0.05)
PLAN = [[3, 0], [1, 2, 4], [5, 6, 7]]
SHAPE = RouteShape(num_layers=2, layers=(1,), num_experts=8, experts_per_token=2)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_kind_of_router_follows_the_routes_and_gets_their_gradient(family: Family, tmp_path: Path):
    spec = spec_of(make_checkpoint(tmp_path, family=family), options=FOLLOWING, gradient_checkpointing=True)
    reference, worker = ReferenceWorker(spec), FsdpWorker(spec, RankInfo())
    batch = make_batch(reference, forced_routes=True)
    everything = [range(batch.num_sequences)]
    expected = reference.forward(batch, everything, temperature=1.0)["logprobs"]
    # The suite's tolerances: choices are forced, so only rounding differs.
    assert (worker.forward(batch, PLAN, temperature=1.0)["logprobs"] - expected).abs().max() < 1e-5
    unforced = reference.forward(batch.without_columns("routed_experts", "routed"), everything, temperature=1.0)
    assert (unforced["logprobs"] - expected).abs().max() > 1e-2
    reference.forward_backward(batch, everything, LOSS, temperature=1.0)
    worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
    gradients, size = worker.gradients(), 0.0
    for name, gradient in reference.gradients().items():
        size = max(size, gradient.norm().item())
        assert (gradients[name] - gradient).norm() <= 1e-4 * max(gradient.norm().item(), 1e-2 * size), name


def test_recomputation_repeats_the_forward_routes_even_if_the_router_has_changed(tmp_path: Path):
    spec = spec_of(make_checkpoint(tmp_path, family="qwen3_moe"), options=FOLLOWING, gradient_checkpointing=True)
    worker = FsdpWorker(spec, RankInfo())
    batch = make_batch(ReferenceWorker(spec), forced_routes=True)
    routers = [module for name, module in worker.scorer.named_modules() if name.endswith("mlp.gate")]
    used: list[torch.Tensor] = []
    for name, module in worker.scorer.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: used.append(args[1].clone()))
    inputs = model_input(
        batch, predicted_tokens(batch), use_sample_packing=True, share_prefixes=False, device=torch.device("cpu")
    )
    logprobs_S, _ = worker.scorer(inputs, temperature=1.0)
    for router in routers:
        router.weight.data.neg_()
    logprobs_S.sum().backward()
    assert len(used) == 4, "each of the two layers must route in the forward pass and in recomputation"
    assert torch.equal(used[0], used[3])
    assert torch.equal(used[1], used[2])
    worker.scorer(inputs, temperature=1.0)
    is_given_T = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill_(0, batch.offsets[1:] - 1, False)
    routed_C, experts_CLK = batch["routed"][is_given_T], batch["routed_experts"][is_given_T]
    before_CK, now_CK = used[0], used[4]
    for chosen_CK in (before_CK, now_CK):
        assert torch.equal(chosen_CK[routed_C], experts_CLK[routed_C][:, 0].long())
    assert not torch.equal(before_CK[~routed_C], now_CK[~routed_C]), "the changed router must choose other experts"


def test_two_models_in_one_process_do_not_share_routes(tmp_path: Path):
    spec = spec_of(make_checkpoint(tmp_path, family="qwen3_moe"), options=FOLLOWING)
    following, free = FsdpWorker(spec, RankInfo()), FsdpWorker(attrs.evolve(spec, options=FsdpOptions()), RankInfo())
    batch = make_batch(ReferenceWorker(spec), forced_routes=True)
    without = batch.without_columns("routed_experts", "routed")
    before = free.forward(without, PLAN, temperature=1.0)["logprobs"]
    following.forward(batch, PLAN, temperature=1.0)
    assert torch.equal(free.forward(without, PLAN, temperature=1.0)["logprobs"], before)


# --- several ranks, adapters ----------------------------------------------------------------------------------------

RECOMPUTED, PADDED = {"gradient_checkpointing": True}, {"use_sample_packing": False}
DENSE_FIRST = {"family": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [0], "tie_word_embeddings": False}
ULYSSES = {"sequence_parallel_size": 2}


def ranks(world_size: int, spec: dict[str, Any], **options: Any) -> Variant:
    return Variant(
        world_size=world_size,
        options=attrs.evolve(FOLLOWING, **options),
        spec=spec,
        checkpoint=DENSE_FIRST,
        forced_routes=True,
    )


SPLIT = {
    "packed": ranks(2, {}, **ULYSSES),
    "padded, recomputed": ranks(2, PADDED | RECOMPUTED, **ULYSSES),
    "sharded, recomputed": ranks(4, RECOMPUTED, fsdp_size=2, **ULYSSES),
}
ADAPTED = {"one rank": ranks(1, {}), "ulysses, recomputed": ranks(2, RECOMPUTED, **ULYSSES)}


@pytest.mark.parametrize("variant", SPLIT.values(), ids=SPLIT)
def test_ranks_that_split_sequences_follow_the_routes_of_their_parts(variant: Variant, tmp_path: Path):
    with open_case(fsdp, FsdpOptions(), variant, tmp_path) as case:
        group, expected = case.start(), ForcedNumbers.of(case.reference, case.batch)
        require_replayed(group, case.batch, expected)
        require_breaks_found(group, case, expected)


@pytest.mark.parametrize(
    ("change", "variant", "complaint"),
    [
        ("take_the_first_ranks_routes", SPLIT["packed"], "log-probs differ"),
        ("recompute_by_own_choice", SPLIT["sharded, recomputed"], "gradients differ"),
    ],
)
def test_ranks_that_follow_other_routes_are_found(change: str, variant: Variant, complaint: str, tmp_path: Path):
    with open_case(ChangedFsdp(change=change), FsdpOptions(), variant, tmp_path) as case:
        expected = ForcedNumbers.of(case.reference, case.batch)
        with pytest.raises(AssertionError, match=complaint):
            require_replayed(case.start(), case.batch, expected)


@pytest.mark.parametrize("variant", ADAPTED.values(), ids=ADAPTED)
def test_adapters_are_trained_along_the_routes(variant: Variant, tmp_path: Path):
    with open_case(fsdp, FsdpOptions(), variant, tmp_path) as case:
        model = attrs.evolve(case.spec.model, lora=ATTENTION_ADAPTERS)
        require_adapters_trained_along_routes(case.start(attrs.evolve(case.spec, model=model)), case)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_dense_model_has_no_routes_to_follow(start_worker: StartWorker):
    with pytest.raises(ConfigError, match=r"trainer\.policy\.fsdp_config\.moe_enable_routing_replay: Qwen3ForCausalLM"):
        start_worker(options=FOLLOWING)


def test_a_router_that_gives_nothing_to_experts_outside_of_its_groups_is_refused(tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path, family="deepseek_v3")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "architectures": None}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="layer 1 of DeepseekV2ForCausalLM does not use the experts that the routes name"
    ):
        FsdpWorker(spec_of(checkpoint, options=FOLLOWING), RankInfo())


def test_a_model_that_calls_its_experts_twice_in_a_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def call_twice(self: torch.nn.Module, *args: Any) -> Any:
        torch.nn.Module.__call__(self, *args)
        return torch.nn.Module.__call__(self, *args)

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "__call__", call_twice)
    checkpoint = make_checkpoint(tmp_path, family="qwen3_moe")
    with pytest.raises(ConfigError, match=r"replay: Qwen3MoeForCausalLM called its experts 4 times for 2 layers"):
        FsdpWorker(spec_of(checkpoint, options=FOLLOWING), RankInfo())


def test_routes_without_replay_and_replay_without_routes_are_errors(tmp_path: Path):
    spec = spec_of(make_checkpoint(tmp_path, family="qwen3_moe"))
    batch = make_batch(ReferenceWorker(spec), forced_routes=True)
    with pytest.raises(ConfigError, match="the batch has routed_experts and routed, but router replay is off"):
        FsdpWorker(spec, RankInfo()).forward_backward(batch, PLAN, LOSS, temperature=1.0)
    following = FsdpWorker(attrs.evolve(spec, options=FOLLOWING), RankInfo())
    with pytest.raises(ConfigError, match="replay is on, but the batch has no routes"):
        following.forward(batch.without_columns("routed_experts", "routed"), PLAN, temperature=1.0)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[[0, 1]]], "1 layers with 2 experts per token; the model has 2 layers and chooses 2"),
        ([[[0, 1, 2], [0, 1, 2]]], "2 layers with 3 experts"),
        ([[[0, 1], [0, 8]]], r"token 0, layer 1: \[0, 8\]; expected ids from 0 to 7"),
        ([[[0, 1], [-1, 2]]], r"\[-1, 2\]; expected ids"),
        ([[[0, 1], [3, 3]]], r"\[3, 3\]; expected each expert once"),
    ],
)
def test_errors_of_routes_that_do_not_fit_give_place_and_numbers(experts: list, message: str):
    batch = Batch(
        torch.tensor([0, 1]),
        {
            "tokens": torch.tensor([5]),
            "routed_experts": torch.tensor(experts, dtype=torch.int16),
            "routed": torch.tensor([True]),
        },
    )
    with pytest.raises(ShapeError, match=message):
        require_routes(batch, SHAPE, key="replay")


def test_routes_of_unrouted_tokens_and_dense_layers_are_not_checked():
    batch = Batch(
        torch.tensor([0, 2]),
        {
            "tokens": torch.tensor([5, 6]),
            "routed_experts": torch.tensor([[[99, 99], [1, 7]], [[99, 99], [99, 99]]], dtype=torch.uint8),
            "routed": torch.tensor([True, False]),
        },
    )
    require_routes(batch, SHAPE, key="replay")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator.inference_engine.enable_return_routed_experts": True}, "returns routes that the policy does not"),
        ({"trainer.policy.fsdp_config.moe_enable_routing_replay": True}, "returns no routes to follow; set both"),
        ({"trainer.ref.fsdp_config.moe_enable_routing_replay": True}, r"trainer\.ref.*only the policy can follow"),
    ],
)
def test_only_the_policy_replays_and_only_if_routes_are_returned(changes: dict[str, bool], message: str):
    with pytest.raises(ConfigError, match=message):
        check_plugins(from_mapping({"trainer.policy.model.path": "model", **changes}))


def test_a_critic_follows_no_routes():
    with pytest.raises(ConfigError, match=r"trainer\.critic\.fsdp_config.*a critic cannot follow the policy's routes"):
        fsdp.validate(spec_of("model", role="critic", options=FOLLOWING), 1)
