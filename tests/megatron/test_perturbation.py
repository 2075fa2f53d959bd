"""Noise on a Megatron model covers every trained parameter, is the same on every mesh, and is removed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.interfaces import LoraConfig, Worker
from rl_core.testing.tensors import require_equal
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import Case, Variant, open_case
from rl_transformers.testing.ranks import RankGroup

PRELOADED["rl_megatron.rank.worker"] = None
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
DENSE = {"num_hidden_layers": 4, "vocab_size": 51}  # odd, so that a tensor rank has a row of padding
MOE = DENSE | {"family": "qwen3_moe", "tie_word_embeddings": False}
MESHES: dict[str, tuple[dict[str, Any], tuple[tuple[int, dict[str, int]], ...]]] = {
    "dense": (DENSE, ((2, {}), (4, {TP: 2, PP: 2}), (2, {PP: 2, VPP: 2}))),
    "experts": (MOE, ((2, {EP: 2}), (2, {TP: 2}), (4, {TP: 2, PP: 2, EP: 2, ETP: 1}))),
}


@pytest.fixture(scope="module", params=list(MESHES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    checkpoint, _ = MESHES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    with open_case(megatron, MegatronOptions(), Variant(checkpoint=checkpoint), directory, timeout_s=120) as case:
        yield case


def start(case: Case, num_ranks: int, options: dict[str, int], **fields: Any) -> RankGroup:
    spec = attrs.evolve(case.spec, options=MegatronOptions(**options), **fields)
    group = RankGroup(megatron, spec, num_ranks, directory=case.directory, timeout_s=120)
    case.started.append(group)
    return group


def noise_of(group: RankGroup, seed: int) -> dict[str, Tensor]:
    before = group.weights()
    group.call(Worker.perturb, seed, 0.5)
    noisy = group.weights()
    group.call(Worker.restore)
    require_equal(group.weights(), before, "weights after removing the noise")
    return {name: noisy[name] - before[name] for name in before}


def test_every_mesh_makes_the_same_noise_of_the_stated_size(case: Case, request: pytest.FixtureRequest):
    group = start(case, 1, {})
    weights, expected, other = group.weights(), noise_of(group, 1), noise_of(group, 2)
    group.close()
    for name, noise in expected.items():
        # Megatron fuses query, key and value into one parameter, and gate and up into another. In these models the
        # fused weights have the same scale.
        rms = float(weights[name].square().mean().sqrt())
        deviation = 0.5 * max(rms, weights[name].shape[-1] ** -0.5)
        four_sigma = 4 * (2 * noise.numel()) ** -0.5
        assert float(noise.std()) == pytest.approx(deviation, rel=0.05 + four_sigma), name
        assert not torch.equal(noise, other[name]), "different seeds gave the same noise"
    seen = [noise.flatten()[:8].tolist() for noise in expected.values()]
    assert len({tuple(first) for first in seen}) == len(seen), "two parameters got the same noise"
    _, meshes = MESHES[request.node.callspec.params["case"]]
    for num_ranks, options in meshes:
        group = start(case, num_ranks, options)
        found = noise_of(group, 1)
        group.close()
        for name, noise in expected.items():
            # The noise is rounded to the precision of the weight to which it is added.
            torch.testing.assert_close(found[name], noise, rtol=0, atol=1e-6, msg=f"{options}: {name}")


@pytest.mark.parametrize("mesh", [{}, {TP: 2}], ids=["1", "tp2"])
def test_in_a_model_with_adapters_only_the_adapted_weights_get_noise(mesh: dict[str, int], tmp_path_factory: Any):
    variant = Variant(checkpoint=DENSE)
    with open_case(megatron, MegatronOptions(), variant, tmp_path_factory.mktemp("lora"), timeout_s=120) as case:
        lora = LoraConfig(rank=4, alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"])
        group = start(case, 2 if mesh else 1, mesh, model=attrs.evolve(case.spec.model, lora=lora))
        moved = {name for name, noise in noise_of(group, 1).items() if noise.any()}
        assert moved == {name for name in group.weights() if ".mlp." in name}
