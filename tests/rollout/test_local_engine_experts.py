"""The local engine with Mixture-of-Experts models: their weights, and the routes that it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import SamplingParams
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.scheduler import Scheduler
from rl_transformers.expert_choices import ExpertChoices
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.models import MOE_FAMILIES, make_checkpoint
from tests.rollout.test_local_engine import finish, largest_difference, load_checkpoint, random_samples, staged

DENSE_FIRST = {"num_hidden_layers": 3, "mlp_only_layers": [0]}


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's parameters by name. A router's correction bias is left out: it is a buffer, not a parameter."""
    return {n: t for n, t in load_file(checkpoint / "model.safetensors").items() if "correction_bias" not in n}


@torch.no_grad()
def router_choices(model: Any, tokens: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Layer index → ids [T, K] of the experts that the model's own router chooses; their order has no meaning."""
    seen: dict[int, np.ndarray] = {}
    handles = [
        router.register_forward_hook(lambda _, args, output, layer=layer: seen.update({layer: output[2].numpy()}))
        for layer, router in routers(model).items()
    ]
    model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def require_own_routes(model: Any, ended: Any) -> None:
    for sample, completion in ended:
        inputs = sample.prompt_tokens + completion.tokens[:-1]
        routes_TLK = completion.routed_experts
        assert routes_TLK.dtype == np.uint8
        assert routes_TLK.shape == (len(inputs), model.config.num_hidden_layers, 2)
        for layer, expected_TK in router_choices(model, inputs).items():
            assert np.array_equal(np.sort(routes_TLK[:, layer]), np.sort(expected_TK)), f"layer {layer}"


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", DENSE_FIRST), *((family, {}) for family in MOE_FAMILIES)])
def test_routes_are_the_routers_choices_for_every_input_token(family: str, fields: dict[str, Any], tmp_path: Path):
    model = load_checkpoint(make_checkpoint(tmp_path, family=family, **fields))
    plain = load_checkpoint(tmp_path)
    scheduler = Scheduler(model, max_num_seqs=4, choices=ExpertChoices.of(model, where="test"))
    scheduler.submit(random_samples(9))
    ended = finish(scheduler)
    assert len(ended) == 9
    require_own_routes(plain, ended)
    assert largest_difference(plain, ended) < 1e-5


def test_after_an_update_all_routes_are_those_of_the_new_weights(tmp_path: Path):
    """An update recomputes the KV cache, and with it the routes of the tokens before the update."""
    model = load_checkpoint(make_checkpoint(tmp_path / "a", family="qwen3_moe"))
    other = make_checkpoint(tmp_path / "b", family="qwen3_moe", seed=1)
    scheduler = Scheduler(model, max_num_seqs=4, choices=ExpertChoices.of(model, where="test"))
    scheduler.submit(random_samples(4, SamplingParams(max_tokens=8, ignore_eos=True)))
    ended = scheduler.step()
    scheduler.update_weights(staged(weights_of(other)))
    ended += finish(scheduler)
    assert len(ended) == 4
    require_own_routes(load_checkpoint(other), ended)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_sent_as_separate_tensors_are_loaded_and_served(family: str, tmp_path: Path):
    model = load_checkpoint(make_checkpoint(tmp_path / "a", family=family))
    other = make_checkpoint(tmp_path / "b", family=family, seed=1)
    plain = load_checkpoint(other)
    for name, buffer in model.named_buffers():
        buffer.copy_(plain.get_buffer(name))
    scheduler = Scheduler(model, max_num_seqs=4)
    scheduler.update_weights(staged(weights_of(other)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    scheduler.submit(random_samples(4))
    assert largest_difference(plain, finish(scheduler)) < 1e-5


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


def test_a_version_with_a_fault_in_one_expert_is_refused_and_nothing_of_it_is_served(tmp_path: Path):
    model = load_checkpoint(make_checkpoint(tmp_path / "a", family="qwen3_moe"))
    tensors = weights_of(make_checkpoint(tmp_path / "b", family="qwen3_moe", seed=1))
    before = [parameter.clone() for parameter in model.parameters()]
    scheduler = Scheduler(model, max_num_seqs=4)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    for faulty, message in (
        (without(tensors, name), f"{name} did not arrive"),
        (tensors | {name: tensors[name][:-1]}, rf"{name} has shape \(31, 16\)"),
        (tensors | {name.replace(".3.", ".8."): tensors[name]}, "experts.8.down_proj.weight is not a parameter"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            scheduler.update_weights(staged(faulty))
    assert scheduler.version == -1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


async def test_a_dense_model_has_no_routes_to_return(tmp_path: Path):
    path = make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts: Qwen3ForCausalLM has no routes"):
        await LocalEngine.start(
            lambda: (load_checkpoint(path), None), max_num_seqs=1, timeout_s=250, return_routed_experts=True
        )
