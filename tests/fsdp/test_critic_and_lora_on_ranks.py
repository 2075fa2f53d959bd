"""A critic and adapters, sharded: two ranks against one, whatever else the suite proves of a whole policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.interfaces import LoraConfig, LossSpec, Worker, WorkerSpec
from rl_core.testing.backend import Variant, open_case
from rl_core.testing.cases import LIMITS, TEMPERATURE, Case
from rl_core.testing.ranks import RankGroup
from rl_fsdp import FsdpOptions, fsdp

LORA = LoraConfig(rank=4, alpha=8)
VALUES = LossSpec(name="value_clip", params={"value_clip": 1.0})
TOKENS = LossSpec(name="cross_entropy")
KINDS = {
    "critic": ({"role": "critic"}, LoraConfig(), VALUES, "values"),
    "adapters": ({}, LORA, TOKENS, "logprobs"),
    "adapters of a critic": ({"role": "critic"}, LORA, VALUES, "values"),
}


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with open_case(fsdp, FsdpOptions(), Variant(checkpoint={"tie_word_embeddings": False}), tmp_path) as case:
        yield case


def spec_of_kind(case: Case, kind: str, **fields: Any) -> WorkerSpec:
    changes, lora, _, _ = KINDS[kind]
    return attrs.evolve(case.spec, model=attrs.evolve(case.spec.model, lora=lora), **changes, **fields)


def start(case: Case, spec: WorkerSpec, world_size: int) -> RankGroup:
    group = RankGroup(fsdp, spec, world_size, directory=case.directory, timeout_s=60)
    case.started.append(group)
    return group


def batch_of(case: Case) -> Batch:
    """The suite's batch, its far-out columns replaced by what a critic reads."""
    mask_T = case.batch["loss_mask"]
    noise_T = torch.randn(mask_T.numel(), generator=torch.Generator().manual_seed(2))
    weights_T = mask_T.float() / int(mask_T.sum())
    return case.batch.with_columns(values=0.1 * noise_T, returns=1.0 + 0.3 * noise_T, loss_weights=weights_T)


def steps(group: RankGroup, case: Case, kind: str, count: int = 3) -> None:
    for _ in range(count):
        group.forward_backward(batch_of(case), LIMITS, KINDS[kind][2], temperature=TEMPERATURE)
        group.optim_step()


@pytest.mark.parametrize("options", [FsdpOptions(), FsdpOptions(sequence_parallel_size=2)], ids=["shards", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_score_train_and_export_as_one(kind: str, options: FsdpOptions, case: Case):
    one = start(case, spec_of_kind(case, kind), 1)
    two = start(case, spec_of_kind(case, kind, options=options), 2)
    before = one.weights()
    for group in (one, two):
        group.forward_backward(batch_of(case), LIMITS, KINDS[kind][2], temperature=TEMPERATURE)
    expected, found = one.gradients(), two.gradients()
    assert set(found) == set(expected)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert all((found[name] - gradient).norm() <= 5e-6 * norm for name, gradient in expected.items())
    for group in (one, two):
        group.optim_step()
        steps(group, case, kind, 2)
    scores = [group.forward(batch_of(case), LIMITS, temperature=TEMPERATURE)[KINDS[kind][3]] for group in (one, two)]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)
    expected, found = one.weights(), two.weights()
    assert set(found) == set(expected) == set(before)
    assert max((expected[name] - before[name]).abs().max() for name in before) >= 1e-3
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_save_one_continues(kind: str, case: Case):
    two, one = (start(case, spec_of_kind(case, kind), size) for size in (2, 1))
    steps(two, case, kind)
    two.call(Worker.save_state, case.directory / "state")
    one.call(Worker.load_state, case.directory / "state")
    for group in (two, one):
        steps(group, case, kind, 1)
    expected, found = two.weights(), one.weights()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5, msg=name)


def test_two_ranks_send_adapters_alone_as_one(case: Case):
    model = attrs.evolve(case.spec.model, lora=attrs.evolve(LORA, merge_lora=False))
    groups = [start(case, attrs.evolve(case.spec, model=model), size) for size in (1, 2)]
    for group in groups:
        steps(group, case, "adapters", 1)
    expected, found = (group.weights() for group in groups)
    assert set(found) == set(expected)
    assert all(name.startswith("base_model.model.model.layers.") for name in expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5, msg=name)


def test_two_ranks_save_merged_weights_adapters_and_head(case: Case):
    adapted = start(case, spec_of_kind(case, "adapters"), 2)
    steps(adapted, case, "adapters")
    adapted.call(Worker.save_model, case.directory / "adapted")
    merged = AutoModelForCausalLM.from_pretrained(case.directory / "adapted")
    expected = adapted.weights()
    assert all(weight.equal(expected[name]) for name, weight in merged.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(case.spec.model.path)
    loaded = peft.PeftModel.from_pretrained(base, case.directory / "adapted" / "adapter").merge_and_unload()
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)

    critic = start(case, spec_of_kind(case, "critic"), 2)
    steps(critic, case, "critic")
    critic.call(Worker.save_model, case.directory / "critic")
    head, expected = load_file(case.directory / "critic" / "value_head.safetensors"), critic.weights()
    assert all(weight.any() and weight.equal(expected[name]) for name, weight in head.items())
