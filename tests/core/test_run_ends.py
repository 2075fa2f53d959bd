"""What a run closes if it ends early, and which error it then ends with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.config import from_mapping
from rl_core.errors import PluginError, WorkerError
from rl_core.interfaces import Callback, Generator, Tracker
from rl_core.reports.run_reporter import RunReporter
from rl_core.trainer import run as trainer_run
from rl_core.trainer.loop.interrupts import Interrupts
from rl_core.trainer.update.models import Models


class OpenTracker(Tracker):
    """Records whether it was closed."""

    are_open: ClassVar[list[OpenTracker]] = []

    def __init__(self, config: object, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        self.are_open.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        self.are_open.remove(self)


class FailingTracker(OpenTracker):
    def __init__(self, config: object, run_dir: Path, *, total_steps: int, first_step: int) -> None:
        raise PluginError("no login", key="trainer.logger")


class FailingCallback(Callback):
    def __init__(self) -> None:
        raise ValueError("the callback has no settings")


class Measuring(Generator):
    """A generator that measures prompts."""

    def prompt_length(self, row: object) -> int:
        return 1

    async def generate(self, request: object) -> Any:
        raise AssertionError


def test_trackers_are_closed_if_a_later_one_cannot_start(tmp_path: Path):
    names = [f"{__name__}:OpenTracker", f"{__name__}:FailingTracker"]
    with pytest.raises(PluginError, match="no login"):
        RunReporter(from_mapping({"trainer.logger": names}), tmp_path, total_steps=1, steps_done=None)
    assert OpenTracker.are_open == []


async def test_trackers_are_closed_if_a_callback_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def playing(config: object) -> AsyncIterator[Any]:
        yield None, Measuring()

    @asynccontextmanager
    async def models(config: object, rows: object) -> AsyncIterator[Any]:
        yield Models(policy=None)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(trainer_run, "_playing", playing)
    monkeypatch.setattr(trainer_run, "_models", models)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "?"}) + "\n")
    config = from_mapping(
        {
            "trainer.run_dir": str(tmp_path / "run"),
            "trainer.train_batch_size": 1,
            "trainer.policy.model.path": str(tmp_path),
            "trainer.logger": [f"{__name__}:OpenTracker"],
            "trainer.callbacks": [f"{__name__}:FailingCallback"],
            "data.train_data": [str(rows)],
        }
    )
    with pytest.raises(ValueError, match="no settings"):
        await trainer_run._train(config, 0.0, Interrupts())
    assert OpenTracker.are_open == []


async def refuse_to_close() -> None:
    raise WorkerError("policy rank 0 failed in close")


async def test_a_part_that_cannot_be_closed_does_not_replace_the_error_of_the_run(caplog: pytest.LogCaptureFixture):
    async def failing_run() -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(trainer_run._closed, refuse_to_close, "the policy model")
            raise ValueError("the run's own")

    with pytest.raises(ValueError, match="the run's own"):
        await failing_run()
    assert "the policy model did not close: policy rank 0 failed in close" in caplog.text
    with pytest.raises(WorkerError, match="failed in close"):
        await trainer_run._closed(refuse_to_close, "the policy model")
