"""Folders that a sync leaves behind if its process is killed are named after the run and the process. The next sync
removes them."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_core import held_folders
from rl_core.held_folders import make_folder, remove_folder
from rl_core.interfaces import Rendezvous
from rl_rollout.transports import files as files_module
from rl_rollout.transports.files import FilesTransport, files
from rl_rollout.transports.shared_memory import shared_memory


def folders_of(rendezvous: Rendezvous) -> list[Path]:
    found = rendezvous.data.get("directories") or [rendezvous.data["directory"]]
    return [Path(folder) for folder in found]


def in_killed_process(act: Callable[[], object]) -> int:
    """Runs `act` in a process that then kills itself with SIGKILL. Returns the process id."""

    def run() -> None:
        act()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert process.pid is not None
    return process.pid


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in /dev/shm that replaces /dev/shm itself, because syncs of other processes clean up there."""
    assert files_module._SHARED_MEMORY == held_folders._MEMORY == Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="rl-test-", dir="/dev/shm") as folder:
        monkeypatch.setattr(files_module, "_SHARED_MEMORY", Path(folder))
        monkeypatch.setattr(held_folders, "_MEMORY", Path(folder))
        yield Path(folder)


@pytest.mark.parametrize("transport", [files, shared_memory], ids=lambda transport: transport.name)
def test_folders_of_a_killed_run_have_its_name_and_the_next_sync_removes_them(transport, temporary: Path, memory: Path):
    pid = in_killed_process(lambda: transport.of_run("my run/1").open(num_ranks=1, num_engines=1))
    left = [*temporary.glob("rl-weights-*"), *memory.glob("rl-weights-*")]
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    assert len(left) == len(folders_of(rendezvous))
    assert all(path.name.startswith(f"rl-weights-my_run_1-{pid}-") for path in left)
    transport.close(rendezvous)
    assert not [path for path in left if path.exists()]
    assert not [*temporary.iterdir(), *memory.iterdir()]


def test_files_that_a_killed_run_left_in_memory_are_removed_by_another_transports_sync(temporary: Path, memory: Path):
    pid = in_killed_process(lambda: files.of_run("run").open(num_ranks=1, num_engines=1))
    assert list(memory.glob(f"rl-weights-run-{pid}-*"))
    shared_memory.close(shared_memory.open(num_ranks=1, num_engines=1))
    assert not list(memory.iterdir())


def test_the_files_of_a_living_run_stay(temporary: Path):
    context = multiprocessing.get_context("fork")
    theirs, ends = context.Queue(), context.Event()

    def hold() -> None:
        theirs.put(make_folder(temporary, "other"))
        ends.wait(60)

    process = context.Process(target=hold)
    process.start()
    folder = Path(theirs.get(timeout=60))
    own = FilesTransport(directory=str(temporary)).of_run("mine").open(num_ranks=1, num_engines=1)
    assert folder.is_dir()
    ends.set()
    process.join(60)
    other = make_folder(temporary, "mine")
    assert not folder.exists(), "the folder of a process that has ended must be removed"
    assert all(path.is_dir() for path in folders_of(own)), "this process's own folders must stay"
    files.close(own)
    remove_folder(other)


def test_a_young_unlocked_folder_stays_while_any_process_makes_a_folder(temporary: Path):
    """A young folder without a lock stays while any process is making a folder, because its maker may not have locked
    it yet. An old folder without a lock is removed all the same."""
    (temporary / "rl-weights-x-1-young").mkdir()
    (temporary / "rl-weights-x-1-old").mkdir()
    (temporary / "rl-weights-x-1-empty").mkdir()
    (temporary / "rl-weights-x-1-empty" / ".held").touch()
    os.utime(temporary / "rl-weights-x-1-old", (time.time() - 3600,) * 2)
    maker = os.open(temporary, os.O_RDONLY)
    fcntl.flock(maker, fcntl.LOCK_SH)
    remove_folder(make_folder(temporary, "x"))
    assert sorted(path.name for path in temporary.iterdir()) == ["rl-weights-x-1-empty", "rl-weights-x-1-young"]
    os.close(maker)
    remove_folder(make_folder(temporary, "x"))
    assert not list(temporary.iterdir())


def test_folders_of_processes_killed_at_any_moment_are_removed_by_the_next_process(temporary: Path):
    def make_and_remove() -> None:
        while True:
            remove_folder(make_folder(temporary, "x"))

    dice = random.Random(0)
    for _ in range(40):
        processes = [multiprocessing.get_context("fork").Process(target=make_and_remove) for _ in range(2)]
        for process in processes:
            process.start()
        time.sleep(0.02 + 0.005 * dice.random())
        for process in processes:
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "the process failed before it was killed"
    remove_folder(make_folder(temporary, "x"))
    assert not list(temporary.iterdir())
