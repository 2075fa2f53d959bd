"""Engine and models share devices: each leaves the devices while the other works, and the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from tests.examples import shared_devices
from tests.examples.test_resume import BuildConfig, require_same_run

SHARED = {
    "generator__inference_engine__backend": f"{shared_devices.__name__}:engine",
    "trainer__strategy": f"{shared_devices.__name__}:backend",
    "trainer__max_training_steps": 4,
    "trainer__eval_interval": 2,
}
WITH_REFERENCE = {"trainer__algorithm__use_kl_loss": True}


def events_of(small_run: BuildConfig, run_dir: Path, **overrides: object) -> list[str]:
    shared_devices.EVENTS.clear()
    shared_devices.ON_DEVICES.clear()
    run_training(small_run(run_dir, **{**SHARED, **overrides}))
    return list(shared_devices.EVENTS)


def test_engine_and_models_take_turns_without_changing_the_training(small_run: BuildConfig, tmp_path: Path):
    events = events_of(small_run, tmp_path / "shared", **WITH_REFERENCE)
    apart = events_of(small_run, tmp_path / "apart", **WITH_REFERENCE, trainer__placement__colocate_all=False)
    assert not [event for event in apart if event.startswith(("engine sleeps", "engine wakes"))]
    require_same_run(tmp_path / "shared", tmp_path / "apart")
    assert events[:2] == ["engine starts", "engine sleeps"], "the engine must sleep before a model is loaded"
    rest = [event for event in events if not event.startswith("reference")]
    joined = " · ".join(_without_repeats(rest))
    handover = (
        "policy leaves · engine wakes: ('weights',) · policy comes back · weights {} · policy leaves · "
        "engine wakes: ('kv_cache',) · generate"
    )
    assert "generate · engine sleeps · policy comes back · " in joined
    assert handover.format(1) in joined, joined
    assert f"checkpoint · {handover.format(2)}" in joined, joined
    assert events.count("weights 2") == 2, "after the checkpoint of step 2 the engine must get its weights again"
    assert events.count("weights 4") == 1, "after the last checkpoint the engine must not get its weights again"


@pytest.mark.parametrize("overrides", [{"trainer__max_staleness": 1}, {"trainer__placement__colocate_all": False}])
def test_overlapping_or_separate_phases_offload_nothing(
    overrides: dict[str, object], small_run: BuildConfig, tmp_path: Path
):
    events = events_of(small_run, tmp_path / "run", **overrides)
    assert not {"engine sleeps", "policy leaves"} & set(events)
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert len(rows) == 5


def _without_repeats(events: list[str]) -> list[str]:
    return [event for before, event in zip([None, *events], events, strict=False) if event != before]
