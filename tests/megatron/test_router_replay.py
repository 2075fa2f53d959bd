"""Forced routes under every kind of mesh: the numbers of plain transformers with the same routes, and the same routes
read back."""

from __future__ import annotations

import pytest
import torch

from rl_core.testing.backend import LIMITS, PRELOADED, TEMPERATURE, backward, expected_scores
from rl_core.testing.cases import LOSS, Variant, open_case
from rl_core.testing.forced_routes import routers
from rl_core.testing.models import make_checkpoint
from rl_core.testing.rank_process import SuiteHost
from rl_megatron import MegatronOptions
from tests.megatron.probes import probed

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker", "tests.megatron.probes"]))
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST = "num_layers_in_first_pipeline_stage"
QWEN = {"family": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK = {"family": "deepseek_v3", "num_hidden_layers": 4}
RECOMPUTED = {"gradient_checkpointing": True}
UNPACKED = {"use_sample_packing": False}
MESHES = {
    "1": (1, {}, {}, QWEN),
    "1 unpacked recomputed": (1, {}, {**UNPACKED, **RECOMPUTED}, QWEN),
    "dp2 ep2": (2, {EP: 2}, {}, QWEN),
    "tp2": (2, {TP: 2}, {}, QWEN),
    "cp2 unpacked": (2, {CP: 2}, UNPACKED, QWEN),
    "pp2 first 1 recomputed": (2, {PP: 2, FIRST: 1}, RECOMPUTED, QWEN),
    "pp2 vpp2 recomputed": (2, {PP: 2, VPP: 2}, RECOMPUTED, QWEN),
    "pp4, first stage dense": (4, {PP: 4}, {}, DEEPSEEK),
    "tp2 cp2 ep4 etp1 unpacked": (4, {TP: 2, CP: 2, EP: 4, ETP: 1}, UNPACKED, QWEN),
    "tp2 pp2 cp2 ep2": (8, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1}, RECOMPUTED, QWEN),
    "tp2 pp2 cp2 ep2 etp2": (16, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 2}, {}, DEEPSEEK),
}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative, in float32: sums of other order. A loss near 0 is a difference of large parts and is measured against 1."""


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


def relative_gradient_error(found, expected):
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    return float(errors.norm() / whole)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_forced_routes_give_the_forced_numbers_and_are_read_back(mesh, open_forced):
    world_size, sizes, spec, checkpoint = MESHES[mesh]
    with open_forced(world_size, options_of(sizes), spec, checkpoint, forced_routes=True) as case:
        group, batch = case.start(), case.batch
        scores = group.forward(batch, LIMITS, temperature=TEMPERATURE)
        expected = expected_scores(case.reference, batch)
        assert (scores["logprobs"] - expected["logprobs"]).abs().max() < 1e-5

        layers, routed_T = sorted(routers(case.reference.model)), batch["routed"]
        taken_RMK = scores["routed_experts"][routed_T][:, layers].long()
        assert torch.equal(taken_RMK, batch["routed_experts"][routed_T][:, layers].long())
        assert bool(scores["routed"].all())

        loss = group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
        reference = case.new_reference()
        expected_loss = backward(reference, batch, LOSS)
        assert abs(loss - expected_loss) <= LOSS_TOLERANCE * max(1.0, abs(expected_loss))
        assert relative_gradient_error(group.gradients(), reference.gradients()) <= GRADIENT_TOLERANCE
        assert group.call(SuiteHost.ask, "kept_choices") == [0] * world_size


def test_a_second_model_of_the_process_chooses_by_itself(open_forced):
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

        # One layer's experts exchanged in all routes: training follows what it is given, not what it would choose.
        other_TLK = routes["routed_experts"].clone()
        other_TLK[:, 1] = (other_TLK[:, 1] + 1) % 8
        for routes_TLK in (routes["routed_experts"], other_TLK):
            batch = case.batch.with_columns(routed_experts=routes_TLK, routed=routes["routed"])
            loss = group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
            expected = backward(case.new_reference(), batch, LOSS)
            assert abs(loss - expected) <= LOSS_TOLERANCE * max(1.0, abs(expected))
        own = backward(case.new_reference(), case.batch, LOSS)
        assert abs(expected - own) > 1e-4 * abs(own), "the control: other routes give another loss"


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
