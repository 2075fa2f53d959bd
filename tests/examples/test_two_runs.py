"""Two runs of one directory at the same time: the second is refused with one message and changes nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rl_core.cli import main
from rl_core.config import Config, dump_yaml
from rl_core.errors import ConfigError
from rl_core.interfaces import Callback
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from rl_core.trainer.state import run_lock

BuildConfig = Callable[..., Config]
TINY = {"trainer__max_training_steps": 2, "trainer__eval_before_train": False, "trainer__eval_interval": -1}


class WaitsForWord(Callback):
    """In step 1, makes a file `waits` beside the run directory, then waits until there is a file `word`."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        self._folder = run_dir.parent

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 1:
            (self._folder / "waits").touch()
            wait_until((self._folder / "word").exists)


WAITS = {"trainer__callbacks": [f"{__name__}:WaitsForWord"]}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "waited 120 s for the other run"
        time.sleep(0.01)


def command(arguments: list[str], output: Path) -> None:
    """Runs the command line `rl` in this process, and appends everything that it prints to `output`."""
    # A busy machine may pause another run between taking the lock and writing its identity.
    run_lock._PATIENCE_S = 60.0
    sys.stdout = sys.stderr = output.open("a", buffering=1)
    main(arguments)


@contextmanager
def rl(*arguments: str, output: Path) -> Iterator[BaseProcess]:
    """Runs `rl` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=command, args=(list(arguments), output))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ended(*arguments: str, output: Path) -> tuple[int | None, str]:
    with rl(*arguments, output=output) as process:
        process.join(120)
        return process.exitcode, output.read_text()


def written(config: Config, path: Path) -> str:
    path.write_text(dump_yaml(config))
    return str(path)


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every path → its modification time and content. Lock files get no time, because a refused run touches them."""
    return {
        str(path.relative_to(root)): (
            0 if path.suffix == ".rl-lock" else path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


def test_a_second_run_of_a_directory_is_refused_until_the_first_is_killed(small_run: BuildConfig, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    run = written(small_run(folder / "run", **TINY, **WAITS), tmp_path / "run.yaml")
    with rl("train", run, output=tmp_path / "first") as first:
        wait_until((folder / "waits").exists)
        before = tree(folder)
        for number, more in enumerate([[], ["trainer.resume_mode=none"], ["--dry-run"]]):
            code, printed = ended("train", run, *more, output=tmp_path / f"second{number}")
            assert code == 2
            assert re.fullmatch(
                rf"error: trainer\.run_dir: {re.escape(str(folder))}/run is in use: process {first.pid} on "
                rf"{socket.gethostname()}, started \S+ \S+, writes .*\n",
                printed,
            ), printed
        with pytest.raises(ConfigError, match=f"export_path: .* is in use: process {first.pid} on "):
            run_training(small_run(tmp_path / "other", trainer__export_path=str(folder / "run" / "model"), **TINY))
        assert tree(folder) == before
        assert not (tmp_path / "other").exists()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        first.join()
    (folder / "word").touch()
    code, printed = ended("train", run, output=tmp_path / "third")
    assert code == 0, printed
    assert sorted(path.name for path in folder.iterdir()) == ["run", "run.1", "waits", "word"]


def test_only_one_of_several_simultaneous_runs_trains(small_run: BuildConfig, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    run_training(small_run(folder / "run", **TINY))
    run = written(small_run(folder / "run", **TINY, **WAITS, trainer__resume_mode="none"), tmp_path / "run.yaml")
    outputs = [tmp_path / f"output{number}" for number in range(6)]
    starters = [multiprocessing.get_context("fork").Process(target=command, args=(["train", run], o)) for o in outputs]
    try:
        for starter in starters:
            starter.start()
        wait_until(lambda: sum(starter.is_alive() for starter in starters) == 1)
        (winner,) = (starter for starter in starters if starter.is_alive())
        wait_until((folder / "waits").exists)
        before = sorted(path.name for path in folder.iterdir())
        (folder / "word").touch()
        winner.join(120)
        assert sorted(starter.exitcode or 0 for starter in starters) == [0, 2, 2, 2, 2, 2]
    finally:
        for starter in starters:
            starter.kill()
            starter.join()
    refused = [output.read_text() for output, starter in zip(outputs, starters, strict=True) if starter is not winner]
    for printed in refused:
        assert f"is in use: process {winner.pid} on {socket.gethostname()}, " in printed
    assert before == [".run.rl-lock", "run", "run.1", "waits"]
    for run_dir in (folder / "run", folder / "run.1"):
        rows = list(read_rows(run_dir / "metrics.jsonl"))
        assert [row["step"] for row in rows] == [1, 2]
