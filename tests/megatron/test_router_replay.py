"""Forced routes on every kind of mesh give the numbers of plain transformers with these routes, and ranks return the
same routes. Each comparison is repeated with wrong routes, and must then fail."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from rl_core.config import from_mapping
from rl_core.config.checks import check_plugins
from rl_core.errors import ConfigError, ShapeError, WorkerError
from rl_core.interfaces import LoraConfig, ModelConfig, Worker
from rl_core.rank_kit.route_layers import with_routes_of
from rl_megatron import LoraOptions, MegatronOptions
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE, backward, expected_scores, other_routes
from rl_transformers.testing.cases import LOSS, Variant, open_case
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.rank_process import SuiteHost
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.forced_numbers import (
    ATTENTION_ADAPTERS,
    LOGPROB_TOLERANCE,
    LOSS_TOLERANCE,
    ForcedNumbers,
    require_adapters_trained_along_routes,
    require_breaks_found,
    require_replayed,
    step_of_ranks,
)
from tests.megatron.changed import ChangedBackend
from tests.megatron.probes import probed

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker", "tests.megatron.probes"]))
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST = "num_layers_in_first_pipeline_stage"
QWEN = {"family": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK = {"family": "deepseek_v3", "num_hidden_layers": 4}
RECOMPUTED = {"gradient_checkpointing": True}
UNPACKED = {"use_sample_packing": False}
PASSED = {"moe_enable_routing_replay": False, "transformer_config_kwargs": {"moe_enable_routing_replay": True}}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "1": (1, {}, {}, QWEN),
    "1, switched on in transformer_config_kwargs": (1, PASSED, {}, QWEN),
    "1 unpacked recomputed": (1, {}, {**UNPACKED, **RECOMPUTED}, QWEN),
    "dp2 ep2": (2, {EP: 2}, {}, QWEN),
    "tp2": (2, {TP: 2}, {}, QWEN),
    "cp2 unpacked": (2, {CP: 2}, UNPACKED, QWEN),
    "pp2 first 1 recomputed": (2, {PP: 2, FIRST: 1}, RECOMPUTED, QWEN),
    "pp2 vpp2 recomputed": (2, {PP: 2, VPP: 2}, RECOMPUTED, QWEN),
    "pp2 vpp2, first chunk dense, recomputed": (2, {PP: 2, VPP: 2}, RECOMPUTED, DEEPSEEK),
    "pp2 first 1, which is dense": (2, {PP: 2, FIRST: 1}, {}, DEEPSEEK),
    "pp2 first 3, dense and experts, recomputed": (2, {PP: 2, FIRST: 3}, RECOMPUTED, DEEPSEEK),
    "pp4, first stage dense": (4, {PP: 4}, {}, DEEPSEEK),
    "tp2 cp2 ep4 etp1 unpacked": (4, {TP: 2, CP: 2, EP: 4, ETP: 1}, UNPACKED, QWEN),
    "tp2 pp2 cp2 ep2": (8, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1}, RECOMPUTED, QWEN),
    "tp2 pp2 cp2 ep2 etp2": (16, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 2}, {}, DEEPSEEK),
}
PARITY_ONLY = "tp2 pp2 cp2 ep2"
"""Only `make parity` measures this mesh. `make test` has the mesh of 16 ranks, which also splits experts' tensors."""


def options_of(sizes, **others):
    return MegatronOptions(**{"moe_enable_routing_replay": True, **sizes, **others})


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    made = {}

    def make(checkpoint):
        key = tuple(checkpoint.items())
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("model"), **checkpoint)
        return made[key]

    return make


@pytest.fixture
def open_forced(tmp_path, checkpoint_of):
    def open_(world_size, options, spec, checkpoint, **others):
        variant = Variant(
            **{"world_size": world_size, "options": options, "spec": spec, "checkpoint": checkpoint, **others}
        )
        path = checkpoint_of(checkpoint)
        return open_case(probed, MegatronOptions(), variant, tmp_path, checkpoint=path, timeout_s=240.0)

    return open_


LAYERS_OF_RANKS = {
    "pp2 vpp2 recomputed": [[0, 2], [1, 3]],
    "pp2 vpp2, first chunk dense, recomputed": [[2], [1, 3]],
    "pp2 first 3, dense and experts, recomputed": [[1, 2], [3]],
    "pp4, first stage dense": [[], [1], [2], [3]],
}
"""The layers of which each rank gets the routes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.parity) if mesh == PARITY_ONLY else mesh for mesh in MESHES]
)
def test_ranks_follow_the_routes_of_their_layers_and_return_them(mesh, open_forced, monkeypatch):
    world_size, sizes, spec, checkpoint = MESHES[mesh]
    with open_forced(world_size, options_of(sizes), spec, checkpoint, forced_routes=True) as case:
        group, batch = case.start(), case.batch
        expected = ForcedNumbers.of(case.reference, batch)
        scores = require_replayed(group, batch, expected)
        layers, routed_T = sorted(routers(case.reference.model)), batch["routed"]
        taken_RMK = scores["routed_experts"][routed_T][:, layers].long()
        assert torch.equal(taken_RMK, batch["routed_experts"][routed_T][:, layers].long())
        assert bool(scores["routed"].all())
        assert group.call(SuiteHost.ask, "kept_choices") == [0] * world_size
        require_breaks_found(group, case, expected)
        if mesh not in LAYERS_OF_RANKS:
            return
        layers_of_ranks = [list(of_rank) for of_rank in group.call(Worker.route_layers)]
        assert layers_of_ranks == LAYERS_OF_RANKS[mesh]

        # Negative control: each rank gets the routes of the next layers with experts instead of its own.
        def with_routes_of_next_layers(batch, layers_of_rank):
            routes_TLK = batch["routed_experts"].clone()
            routes_TLK[:, layers] = routes_TLK[:, layers].roll(-1, 1)
            return with_routes_of(batch.with_columns(routed_experts=routes_TLK), layers_of_rank)

        monkeypatch.setattr("rl_transformers.testing.ranks.with_routes_of", with_routes_of_next_layers)
        with pytest.raises(AssertionError, match="log-probs differ"):
            require_replayed(group, batch, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "mesh", "complaint"),
    [
        ("recompute_by_own_choice", "1 unpacked recomputed", "gradients differ"),
        ("recompute_by_own_choice", "pp2 vpp2 recomputed", "gradients differ"),
        ("count_layers_within_chunks", "pp2 vpp2 recomputed", "log-probs differ"),
        ("count_layers_within_chunks", "pp2 first 1 recomputed", "log-probs differ"),
        ("count_layers_with_experts", "pp2 first 1, which is dense", r"layer 0: \[255, 255\]; expected ids"),
        ("declare_layers_within_chunks", "pp2 vpp2 recomputed", "no routes of layer 2, which this rank replays"),
        ("declare_layers_within_chunks", "pp2 first 1, which is dense", "no routes of layer 3, which this rank repl"),
    ],
)
def test_ranks_that_follow_other_routes_are_found(change, mesh, complaint, tmp_path, checkpoint_of):
    world_size, sizes, spec, checkpoint = MESHES[mesh]
    variant = Variant(
        world_size=world_size, options=options_of(sizes), spec=spec, checkpoint=checkpoint, forced_routes=True
    )
    path = checkpoint_of(checkpoint)
    backend = ChangedBackend(change=change)
    with open_case(backend, MegatronOptions(), variant, tmp_path, checkpoint=path, timeout_s=240.0) as case:
        expected = ForcedNumbers.of(case.reference, case.batch)
        with pytest.raises((AssertionError, ShapeError, WorkerError), match=complaint):
            require_replayed(case.start(), case.batch, expected)


def test_a_second_model_of_the_process_chooses_its_own_experts(open_forced):
    with open_forced(1, options_of({}), {}, QWEN, forced_routes=True) as case:
        assert case.start().call(SuiteHost.ask, "untouched_second_model") == [True]


@pytest.mark.slow
def test_routes_of_the_scoring_pass_are_those_that_training_takes(open_forced):
    options = options_of({TP: 2, PP: 2}, moe_routing_replay_source="scoring")
    with open_forced(4, options, {}, QWEN) as case:
        group = case.start()
        scores = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        routes = {name: scores[name] for name in ("routed_experts", "routed")}
        assert bool(routes["routed"].all())

        # Also with other experts in one layer: training must follow the given routes, not the routers' choices.
        other_TLK = routes["routed_experts"].clone()
        other_TLK[:, 1] = (other_TLK[:, 1] + 1) % 8
        for routes_TLK in (routes["routed_experts"], other_TLK):
            batch = case.batch.with_columns(routed_experts=routes_TLK, routed=routes["routed"])
            loss = group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
            expected = backward(case.new_reference(), batch, LOSS)
            assert abs(loss - expected) <= LOSS_TOLERANCE * max(1.0, abs(expected))
        own = backward(case.new_reference(), case.batch, LOSS)
        assert abs(expected - own) > 1e-4 * abs(own), "negative control: other routes must give another loss"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1 unpacked recomputed", "tp2 cp2 ep4 etp1 unpacked"])
def test_padding_is_kept_out_of_the_experts_statistics(mesh, open_forced):
    world_size, sizes, spec, _ = MESHES[mesh]
    with open_forced(world_size, options_of(sizes), spec, DEEPSEEK, forced_routes=True) as case:
        group = case.start()
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        total: dict[int, torch.Tensor] = {}
        for counts in group.call(SuiteHost.ask, "tokens_per_expert"):
            for layer, counts_E in counts.items():
                total[layer] = total.get(layer, 0) + counts_E
        assert sorted(total) == [2, 3, 4]
        for layer, counts_E in total.items():
            assert int(counts_E.sum()) == 2 * case.batch.num_tokens
            routed_RK = case.batch["routed_experts"][case.batch["routed"], layer - 1].long()
            known_E = torch.bincount(routed_RK.flatten(), minlength=8)
            unknown = case.batch.num_tokens - int(case.batch["routed"].sum())
            assert bool((counts_E >= known_E).all())
            assert int((counts_E - known_E).sum()) == 2 * unknown


# --- adapters -------------------------------------------------------------------------------------------------------

ADAPTED_MESHES = {
    "1 recomputed": (1, {}, RECOMPUTED, QWEN),
    "pp2 vpp2 recomputed": (2, {PP: 2, VPP: 2}, RECOMPUTED, QWEN),
    "tp2 ep2": (2, {TP: 2, EP: 2, ETP: 1}, {}, QWEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ADAPTED_MESHES)
def test_adapters_are_trained_along_the_routes(mesh, open_forced):
    world_size, sizes, spec, checkpoint = ADAPTED_MESHES[mesh]
    # Plain "lora" has one adapter per fused matrix, so query, key and value would share A; in peft each has its own.
    options = options_of(sizes, lora_config=LoraOptions(lora_type="canonical_lora"))
    with open_forced(world_size, options, spec, checkpoint, forced_routes=True) as case:
        model = attrs.evolve(case.spec.model, lora=ATTENTION_ADAPTERS)
        require_adapters_trained_along_routes(case.start(attrs.evolve(case.spec, model=model)), case)


@pytest.mark.slow
def test_adapters_of_experts_are_trained_along_the_routes(open_forced):
    """The saved model with merged adapters, run by transformers with the experts forced, gives the ranks' log-probs."""
    options = options_of({PP: 2, FIRST: 1}, moe_grouped_gemm=False)
    with open_forced(2, options, RECOMPUTED, QWEN, forced_routes=True) as case:
        model = attrs.evolve(case.spec.model, lora=LoraConfig(rank=4, alpha=8))
        group = case.start(attrs.evolve(case.spec, model=model))
        before_T = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        for _ in range(3):
            step_of_ranks(group, case.batch)
        group.call(Worker.save_model, case.directory / "merged")
        merged = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(case.directory / "merged"))))
        found_T = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        assert (found_T - before_T).abs().max() > 1e-2
        assert (found_T - expected_scores(merged, case.batch)["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
        for broken in other_routes(case):
            assert (found_T - expected_scores(merged, broken)["logprobs"]).abs().max() > 1e-2


# --- the setting ----------------------------------------------------------------------------------------------------

KEY = "trainer.policy.megatron_config.moe_enable_routing_replay"
KWARGS_KEY = "trainer.policy.megatron_config.transformer_config_kwargs.moe_enable_routing_replay"
ENGINE_KEY = "generator.inference_engine.enable_return_routed_experts"


@pytest.mark.parametrize("key", [KEY, KWARGS_KEY])
def test_every_replay_switch_requires_routes_from_the_engine(key: str):
    plain = {"trainer.strategy": "megatron", "trainer.policy.model.path": "model"}
    check_plugins(from_mapping({**plain, key: True, ENGINE_KEY: True}))
    with pytest.raises(ConfigError, match="returns no routes to follow; set both"):
        check_plugins(from_mapping({**plain, key: True}))
    with pytest.raises(ConfigError, match="returns routes that the policy does not follow"):
        check_plugins(from_mapping({**plain, key: False, ENGINE_KEY: True}))
    with pytest.raises(ConfigError, match=r"trainer\.ref.*only the policy can follow"):
        check_plugins(from_mapping({**plain, key.replace("policy", "ref"): True}))


@pytest.mark.parametrize(("switch", "key"), [({}, KEY), (PASSED, KWARGS_KEY)])
def test_errors_name_the_key_that_switches_replay_on(switch, key, open_forced):
    with open_forced(1, options_of(switch), {}, QWEN, forced_routes=True) as case:
        without = case.batch.without_columns("routed_experts", "routed")
        with pytest.raises(ConfigError, match=f"^{key}: router replay is on, but the batch has no routes.*{key}=f"):
            case.start().forward(without, LIMITS, temperature=TEMPERATURE)
        with pytest.raises(
            ConfigError, match=r"^trainer\.policy\.megatron_config\.moe_enable_routing_replay: .* is off"
        ):
            case.start(attrs.evolve(case.spec, options=MegatronOptions())).forward(
                case.batch, LIMITS, temperature=TEMPERATURE
            )
