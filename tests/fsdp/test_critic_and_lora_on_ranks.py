"""Critics and LoRA adapters on two ranks, compared with one rank. FSDP's conformance tests (`BackendConformance`) train
only policies without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rl_core.interfaces import Worker, WorkerSpec
from rl_fsdp import FsdpOptions, fsdp
from rl_transformers.testing.backend import open_case
from rl_transformers.testing.cases import Case
from rl_transformers.testing.ranks import RankGroup
from tests.trained_kinds import KINDS, LORA, UNTIED, require_equal_weights


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with open_case(fsdp, FsdpOptions(), UNTIED, tmp_path) as case:
        yield case


def start(case: Case, spec: WorkerSpec, world_size: int) -> RankGroup:
    group = RankGroup(fsdp, spec, world_size, directory=case.directory, timeout_s=240)
    case.started.append(group)
    return group


@pytest.mark.parametrize("options", [FsdpOptions(), FsdpOptions(sequence_parallel_size=2)], ids=["shards", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_score_train_save_and_export_like_one_rank(kind: str, options: FsdpOptions, case: Case):
    model = KINDS[kind]
    one = start(case, model.spec(case), 1)
    two = start(case, model.spec(case, options=options), 2)
    model.compare_training(one, two, case)
    expected = two.weights()
    two.call(Worker.save_model, case.directory / "model")
    model.require_saved(case.directory / "model", case, expected)
    two.call(Worker.save_state, case.directory / "state")
    model.train(one, case, 1)
    one.call(Worker.load_state, case.directory / "state")
    assert all(weight.equal(expected[name]) for name, weight in one.weights().items())
    for group in (two, one):
        model.train(group, case, 1)
    require_equal_weights(one.weights(), two.weights())


def test_two_ranks_send_the_same_adapters_as_one(case: Case):
    model = attrs.evolve(case.spec.model, lora=attrs.evolve(LORA, merge_lora=False))
    one, two = (start(case, attrs.evolve(case.spec, model=model), size) for size in (1, 2))
    for group in (one, two):
        KINDS["adapters"].train(group, case, 1)
    expected = one.weights()
    assert all(name.startswith("base_model.model.model.layers.") for name in expected)
    require_equal_weights(two.weights(), expected)
