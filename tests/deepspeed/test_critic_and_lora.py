"""Compares two DeepSpeed ranks with a single FSDP rank, which shards nothing: a critic, adapters, and both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rl_core.interfaces import Worker
from rl_deepspeed import deepspeed
from rl_fsdp import FsdpOptions, fsdp
from rl_transformers.testing.backend import PRELOADED, open_case
from rl_transformers.testing.cases import Case
from rl_transformers.testing.ranks import RankGroup
from tests.deepspeed.test_conformance import zero
from tests.kept_extras import require_kept_extras
from tests.trained_kinds import KINDS, UNTIED

PRELOADED.update(dict.fromkeys(["rl_deepspeed.backend", "rl_deepspeed.worker", "rl_fsdp.worker"]))


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with open_case(fsdp, FsdpOptions(), UNTIED, tmp_path) as case:
        yield case


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        pytest.param("adapters of a critic", 3, marks=pytest.mark.slow),
        *(
            pytest.param(kind, stage, marks=pytest.mark.parity)
            for kind in KINDS
            for stage in (1, 2, 3)
            if (kind, stage) != ("adapters of a critic", 3)
        ),
    ],
)
def test_two_ranks_score_train_save_and_export_like_one_rank(kind: str, stage: int, case: Case):
    model = KINDS[kind]
    one = RankGroup(fsdp, model.spec(case), 1, directory=case.directory, timeout_s=120)
    case.started.append(one)
    two = RankGroup(deepspeed, model.spec(case, options=zero(stage)), 2, directory=case.directory, timeout_s=120)
    case.started.append(two)
    model.compare_training(one, two, case)
    expected = two.weights()
    two.call(Worker.save_state, case.directory / "state")
    model.train(two, case, 1)
    two.call(Worker.load_state, case.directory / "state")
    assert all(weight.equal(expected[name]) for name, weight in two.weights().items())
    two.call(Worker.save_model, case.directory / "model")
    model.require_saved(case.directory / "model", case, expected)


def test_two_ranks_save_tensors_that_are_not_trained_unchanged(case: Case):
    spec = attrs.evolve(case.spec, options=zero(3))
    require_kept_extras(attrs.evolve(case, spec=spec), deepspeed, 2)
