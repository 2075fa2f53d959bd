"""Only one process at a time may hold a run's directories; a second one learns who holds them and changes nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rl_core.config import Config, from_mapping
from rl_core.errors import ConfigError
from rl_core.trainer.state import run_lock
from rl_core.trainer.state.run_lock import held_directories, require_unused

HOLDS = """
import json, os, subprocess, sys, time
from rl_core.config import from_mapping
from rl_core.errors import ConfigError
from rl_core.trainer.state import run_lock
from rl_core.trainer.state.run_lock import held_directories

run_lock._BEAT_S = 3600.0  # a touch would change the modification times that tests compare
run_lock._PATIENCE_S = 200.0  # on a busy machine, a holder may pause before it writes its name
settings, leaves_children = json.loads(sys.argv[1]), sys.argv[2] == "with children"
print("ready", flush=True)
sys.stdin.readline()
try:
    with held_directories(from_mapping(settings)):
        children = []
        if leaves_children:
            children.append(subprocess.Popen(["sleep", "600"], close_fds=False).pid)
            reading, writing = os.pipe()
            children.append(os.fork())
            if children[-1] == 0:
                os.write(writing, b".")  # the child has closed its copies of the locks before `fork` returns
                time.sleep(600)
                os._exit(0)
            os.read(reading, 1)
        print(json.dumps({"pid": os.getpid(), "children": children}), flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print(error, flush=True)
    sys.exit(2)
"""
"""Prints `ready`. At the first line of input, takes the directories and prints the ids of its process and children; at
the second line, releases the directories. If they are in use, prints the error."""


def settings_of(run_dir: Path | str, **trainer: Path | str) -> dict[str, str]:
    return {f"trainer.{name}": str(value) for name, value in {"run_dir": run_dir, **trainer}.items()}


def config_of(run_dir: Path | str, **trainer: Path | str) -> Config:
    return from_mapping(settings_of(run_dir, **trainer))


def ready(settings: dict[str, str], *, children: str = "") -> subprocess.Popen[str]:
    """A process that has imported everything and waits for a line of input before it takes the directories."""
    command = [sys.executable, "-c", HOLDS, json.dumps(settings), children]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert said(process) == "ready"
    return process


def let_start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@contextmanager
def holding(settings: dict[str, str], *, children: str = "") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yields another process that holds the directories, and the ids of its children."""
    process = ready(settings, children=children)
    pids: list[int] = []
    try:
        let_start(process)
        pids = json.loads(said(process))["children"]
        yield process, pids
    finally:
        end(process)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every path with its modification time and content."""
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
    }


def test_a_second_process_names_the_first_in_its_error_and_changes_nothing(tmp_path: Path):
    begun = datetime.now().astimezone().replace(microsecond=0)
    with holding(settings_of(tmp_path / "run")) as (first, _):
        before = tree(tmp_path)
        config = config_of(tmp_path / "run")
        for refuses in (held_directories(config).__enter__, lambda: require_unused(config)):
            with pytest.raises(ConfigError) as refused:
                refuses()
            message, run_dir = str(refused.value), re.escape(str(tmp_path / "run"))
            who = rf"process (\d+) on (\S+), started (.+), writes {run_dir}\. Wait for that run or stop it"
            found = re.match(
                rf"trainer\.run_dir: {run_dir} is in use: {who}, or choose another trainer\.run_name", message
            )
            assert found, message
            assert (int(found[1]), found[2]) == (first.pid, socket.gethostname())
            assert begun <= datetime.fromisoformat(found[3]) <= datetime.now().astimezone()
        assert tree(tmp_path) == before


def test_directories_are_free_again_and_nothing_is_left_when_a_run_ends(tmp_path: Path):
    config = config_of(tmp_path / "runs" / "run", ckpt_path=tmp_path / "disk" / "ckpts")
    for ends in (lambda: None, lambda: pytest.fail("the run failed")):
        try:
            with held_directories(config):
                assert sorted(path.name for path in tmp_path.rglob("*.rl-lock")) == [".ckpts.rl-lock", ".run.rl-lock"]
                ends()
        except pytest.fail.Exception:
            pass
        assert not list(tmp_path.rglob("*.rl-lock"))
    require_unused(config)


@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_killed_run_is_free_even_if_its_children_live(tmp_path: Path, ends_by: signal.Signals):
    with holding(settings_of(tmp_path / "run"), children="with children") as (first, children):
        first.send_signal(ends_by)
        first.wait()
        stale = json.loads((tmp_path / ".run.rl-lock").read_text())
        assert stale["pid"] == first.pid
        for child in children:
            os.kill(child, 0)  # still running
        require_unused(config_of(tmp_path / "run"))
        with held_directories(config_of(tmp_path / "run")):
            assert json.loads((tmp_path / ".run.rl-lock").read_text())["pid"] == os.getpid()


def test_a_forked_child_that_unwinds_leaves_the_lock_to_its_parent(tmp_path: Path):
    config = config_of(tmp_path / "run")

    def leave(context: object) -> None:
        context.__exit__(None, None, None)  # pyright: ignore[reportAttributeAccessIssue]

    context = held_directories(config)
    with context:
        child = multiprocessing.get_context("fork").Process(target=leave, args=(context,))
        child.start()
        child.join()
        assert child.exitcode == 0
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            require_unused(config)


@pytest.mark.slow
@pytest.mark.parametrize("is_stale", [False, True], ids=["fresh", "after a kill"])
def test_one_of_many_simultaneous_starts_wins_and_the_others_name_it(tmp_path: Path, is_stale: bool):
    settings = settings_of(tmp_path / "run", export_path=tmp_path / "models" / "run")
    if is_stale:
        with holding(settings) as (killed, _):
            end(killed)
        assert len(list(tmp_path.rglob("*.rl-lock"))) == 2
    starters = [ready(settings) for _ in range(12)]
    try:
        for starter in starters:
            let_start(starter)
        answers = {starter.pid: said(starter) for starter in starters}
        winners = [pid for pid, answer in answers.items() if answer.startswith("{")]
        assert len(winners) == 1, answers
        losers = [answer for pid, answer in answers.items() if pid not in winners]
        assert all(f"process {winners[0]} on {socket.gethostname()}, started" in answer for answer in losers), answers
        assert [starter.wait(200) for starter in starters if starter.pid not in winners] == [2] * 11
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".run.rl-lock", ".run.rl-lock", "models"]
    finally:
        for starter in starters:
            end(starter)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"run_dir": "b", "ckpt_path": "disk/ckpts"}, "trainer.ckpt_path"),
        ({"run_dir": "b", "export_path": "disk/ckpts"}, "trainer.export_path"),
        ({"run_dir": "disk/ckpts"}, "trainer.run_dir"),
        ({"run_dir": "b", "ckpt_path": "a/checkpoints"}, "trainer.ckpt_path"),
        ({"run_dir": "b", "export_path": "a/model"}, "trainer.export_path"),
        ({"run_dir": "a/within"}, "trainer.run_dir"),
        ({"run_dir": "a/deep/within"}, "trainer.run_dir"),
        ({"run_dir": "disk"}, "trainer.run_dir"),
        ({"run_dir": "b", "ckpt_path": "."}, "trainer.ckpt_path"),
        ({"run_dir": "./b/../a"}, "trainer.run_dir"),
        ({"run_dir": "link"}, "trainer.run_dir"),
        ({"run_dir": "up/a"}, "trainer.run_dir"),
        ({"run_dir": "up/up/link"}, "trainer.run_dir"),
    ],
)
def test_directories_of_two_runs_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str], key: str
):
    """Starts the two runs in both orders, except where the second run cannot see the lock of the first."""
    monkeypatch.setattr(run_lock, "_BEAT_S", 3600.0)  # a touch would change the modification times
    monkeypatch.chdir(tmp_path)
    for directory in ("a", "b", "disk"):
        (tmp_path / directory).mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "up").symlink_to(tmp_path)
    mine = {"run_dir": "a", "ckpt_path": "disk/ckpts"}
    with held_directories(config_of(**mine)):
        before = tree(tmp_path)
        with pytest.raises(ConfigError, match=rf"^{key}: .* is in use: process {os.getpid()} on "):
            held_directories(config_of(**other)).__enter__()
        assert tree(tmp_path) == before
    # A run looks for locks directly inside its directories, not deeper.
    if other["run_dir"] != "a/deep/within":
        with held_directories(config_of(**other)):
            before = tree(tmp_path)
            with pytest.raises(ConfigError, match=rf" is in use: process {os.getpid()} on "):
                held_directories(config_of(**mine)).__enter__()
            assert tree(tmp_path) == before


def test_runs_in_sibling_directories_do_not_lock_each_other_out(tmp_path: Path):
    with (
        holding(settings_of(tmp_path / "a", ckpt_path=tmp_path / "ckpts" / "a")),
        holding(settings_of(tmp_path / "b", ckpt_path=tmp_path / "ckpts" / "b")),
        held_directories(config_of(tmp_path / "a.1", export_path=tmp_path / "ckpts" / "c")),
    ):
        pass


@pytest.mark.parametrize("is_link", [False, True])
def test_the_lock_stays_when_the_directory_is_moved_away(tmp_path: Path, is_link: bool):
    run_dir = tmp_path / "run"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        run_dir.symlink_to(tmp_path / "elsewhere")
    else:
        run_dir.mkdir()
    with held_directories(config_of(run_dir)):
        run_dir.rename(tmp_path / "run.1")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            require_unused(config_of(run_dir))
        run_dir.mkdir()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            held_directories(config_of(run_dir)).__enter__()
    require_unused(config_of(run_dir))


def test_a_mount_point_has_its_lock_inside(tmp_path: Path):
    """Each container has its own root file system, so other containers would not see a lock beside the mount point."""
    assert os.path.ismount("/dev")
    assert run_lock._lock_file(Path("/dev")) == Path("/dev/.rl-lock")
    assert run_lock._directory_of(Path("/dev/.rl-lock")) == Path("/dev")
    assert run_lock._lock_file(tmp_path / "run") == tmp_path / ".run.rl-lock"


LOCKS_INSIDE = """
import os, sys
from pathlib import Path
from rl_core.config import from_mapping
from rl_core.errors import ConfigError
from rl_core.trainer.state.run_lock import held_directories

if os.geteuid() == 0:  # root may write everywhere
    os.setgid(65534)
    os.setuid(65534)
config = from_mapping({"trainer.run_dir": sys.argv[1]})
with held_directories(config):
    print(*(path.name for path in Path(sys.argv[1]).iterdir()))
    try:
        held_directories(config).__enter__()
    except ConfigError as error:
        print(f"process {os.getpid()} on" in str(error))
print(len(list(Path(sys.argv[1]).iterdir())))
"""
"""Holds a directory as a user who cannot write to its parent; prints the files in it, whether it is held, and how many
files are left after release."""


def test_a_directory_with_a_read_only_parent_has_its_lock_inside():
    with tempfile.TemporaryDirectory() as above:  # other users may enter this folder, unlike pytest's own
        run_dir = Path(above) / "run"
        run_dir.mkdir()
        run_dir.chmod(0o777)
        Path(above).chmod(0o555)
        command = [sys.executable, "-c", LOCKS_INSIDE, str(run_dir)]
        result = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        Path(above).chmod(0o755)
    assert result.stdout.split() == [".rl-lock", "True", "0"], result.stderr


def test_a_lock_file_that_cannot_be_made_is_an_error_with_the_key(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"trainer\.run_dir: .*/file/run cannot be locked: .* Choose another directory"
    ):
        held_directories(config_of(tmp_path / "file" / "run")).__enter__()


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The holder took the lock but has not written its name yet. The file is empty or names an earlier holder, which
    the error must not name."""
    path = tmp_path / ".run.rl-lock"
    for left in ("", json.dumps({"pid": dead_process(), "host": socket.gethostname(), "started": "long ago"}) + "\n"):
        path.write_text(left)
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            name = {"pid": os.getpid(), "host": socket.gethostname(), "started": "now"}
            monkeypatch.setattr(run_lock, "_PATIENCE_S", 200.0)
            writer = delayed(0.3, lambda name=name: path.write_text(json.dumps(name) + "\n"))
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on .*, started now"):
                require_unused(config_of(tmp_path / "run"))
            writer.join()
            path.write_text("")
            monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.5)
            begin = time.monotonic()
            with pytest.raises(
                ConfigError, match=r"is in use: an unknown process writes .*; if no run uses it any more,"
            ):
                require_unused(config_of(tmp_path / "run"))
            assert time.monotonic() - begin > 0.5


@pytest.mark.parametrize("content", ["[" * 4096, '{"pid": 1, "host": "a", "started": []}'], ids=["deep", "a list"])
def test_a_lock_file_that_no_run_wrote_keeps_nobody_out(tmp_path: Path, content: str):
    (tmp_path / ".run.rl-lock").write_text(content)
    with held_directories(from_mapping({"trainer.run_dir": str(tmp_path / "run")})):
        pass


def test_a_process_that_only_checks_the_lock_does_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 200.0)
    path = tmp_path / ".run.rl-lock"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        looks = delayed(0.3, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        with held_directories(config_of(tmp_path / "run")):
            looks.join()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unknown_here(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown_here)
    with held_directories(config_of(tmp_path / "run")):
        require_unused(config_of(tmp_path / "run"))
    assert f"trainer.run_dir: the file system of {tmp_path / 'run'} has no locks" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert not list(tmp_path.iterdir())


def named_by_another_host(run_dir: Path) -> Path:
    """A lock file written by a process on another host, whose lock this host cannot see."""
    path = run_dir.with_name(f".{run_dir.name}.rl-lock")
    path.write_text('{"pid": 1, "host": "another-host", "started": "2026-01-01 00:00:00+00:00"}\n')
    return path


def test_a_lock_of_another_host_is_respected_while_its_file_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_lock, "_WATCH_S", 200.0)
    path, config = named_by_another_host(tmp_path / "run"), config_of(tmp_path / "run")
    gone = r"process 1 on another-host, .*; if that machine is gone for good, remove "
    with touched(path):
        with pytest.raises(ConfigError, match=gone):
            require_unused(config)
        with pytest.raises(ConfigError, match="process 1 on another-host"), held_directories(config):
            pass
    assert path.exists()


def test_a_lock_left_by_another_host_is_taken_over_after_one_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(run_lock, "_WATCH_S", 0.5)
    path, config = named_by_another_host(tmp_path / "run"), config_of(tmp_path / "run")
    watch, watched = run_lock._is_touched, list[Path]()

    def recorded(file: Path) -> bool:
        watched.append(file)
        return watch(file)

    monkeypatch.setattr(run_lock, "_is_touched", recorded)
    require_unused(config)
    with held_directories(config):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert watched == [path], "the lock file must be watched only once"
    assert "process 1 on another-host, started 2026-01-01 00:00:00+00:00, left" in caplog.text
    assert not path.exists()


def test_a_run_touches_its_lock_file_while_it_holds_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "_WATCH_S", 200.0)
    with held_directories(config_of(tmp_path / "run")):
        (path,) = tmp_path.glob(".run.rl-lock")
        assert run_lock._is_touched(path)
    assert [thread.name for thread in threading.enumerate() if thread.name == "run-lock"] == []


@pytest.mark.parametrize("is_alive", [True, False])
def test_without_file_locks_a_live_process_of_this_host_keeps_others_out(
    is_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unknown_here(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown_here)
    monkeypatch.setattr(run_lock, "_WATCH_S", 200.0)
    config = config_of(tmp_path / "run")
    pid = os.getppid() if is_alive else dead_process()
    holder = {"pid": pid, "host": socket.gethostname(), "started": "now"}
    path = named_by_another_host(tmp_path / "run")
    path.write_text(json.dumps(holder) + "\n")
    if is_alive:
        with touched(path), pytest.raises(ConfigError, match=f"process {pid} on "), held_directories(config):
            pass
    else:
        with held_directories(config):
            assert json.loads(path.read_text())["pid"] == os.getpid()


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def delayed(seconds: float, action: Callable[[], object]) -> BaseProcess:
    """Runs the action after a delay in a forked process, which shares the open files."""

    def act() -> None:
        time.sleep(seconds)
        action()

    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    return process


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """Context in which another process touches the file again and again."""

    def touch() -> None:
        while True:
            os.utime(path)
            time.sleep(0.1)

    process = multiprocessing.get_context("fork").Process(target=touch, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
