"""What a run hides from Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rl_core.trainer.run import _data_outside_garbage_collection


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Releases the objects that the tests' configuration froze, until the test ends."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_are_frozen_during_the_run_and_collected_again_after_it():
    with _data_outside_garbage_collection():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_the_caller_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with _data_outside_garbage_collection():
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
    assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)
