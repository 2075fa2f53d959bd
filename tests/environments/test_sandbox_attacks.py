"""Programs that try to escape from the sandbox, to take more than their share, or to outlive their test. Every
mechanism must stop each of them.

Those attacks on files, processes and sockets that are harmless also run without a sandbox, where they must succeed: an
attack that fails everywhere proves nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from rl_environments.sandbox import ProgramLimits, Sandbox, SandboxError, Test, escapes, shared_sandbox
from tests.environments.boxes import (
    DEADLINE_S,
    LIMITS,
    MECHANISMS,
    SLOTS,
    WALL_LIMITS_S,
    answer_of,
    outcome_of,
    processes_named,
    sandbox_by,
    sandbox_without_mounts,
    wait_until_gone,
)

MEBIBYTE = 1 << 20
_SLEEPER = """
import os

def sleeper(marker):
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/usr/bin/env", ["env", "sleep", "600." + marker])
        os._exit(0)
    os.close(write)
    os.read(read, 1)
"""
"""Defines `sleeper`, which leaves an orphan in a session of its own. It returns when the orphan's
`execv` has closed the orphan's end of the pipe."""


WITHOUT_MOUNTS = "landlock without mounts"


@pytest.fixture(params=[*MECHANISMS, WITHOUT_MOUNTS])
async def sandbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    if request.param == WITHOUT_MOUNTS:
        return await sandbox_without_mounts(tmp_path_factory.mktemp("python"))
    return await sandbox_by(request.param)


@pytest.fixture
async def no_sandbox() -> Sandbox:
    return await shared_sandbox("none", slots=SLOTS)


@pytest.fixture
def marker() -> Iterator[str]:
    """A number that no other process has in its command line. At the end, all processes that have it are killed."""
    word = str(secrets.randbelow(10**15) + 10**15)
    yield word
    for pid in processes_named(word):
        os.kill(pid, signal.SIGKILL)


# --- resources --------------------------------------------------------------------------------------------------------


async def test_a_fork_bomb_ends_at_the_process_limit(sandbox):
    program = """
import os, time
def attack():
    count = 0
    try:
        while True:
            if os.fork() == 0:
                time.sleep(600)
            count += 1
    except OSError:
        return count
"""
    # The limit counts the program itself, and dead processes of the slot's previous user that are not reaped yet.
    assert 1 <= await answer_of(sandbox, program, limits=attrs.evolve(LIMITS, processes=10)) <= 9


async def test_a_recursive_fork_bomb_ends_with_its_test(sandbox):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    for wall_s in WALL_LIMITS_S:
        bombed, next_test = await sandbox.run(
            f"import sys\nif input() == 'bomb':\n    exec({bomb!r})\nprint('well')",
            [Test(stdin="bomb"), Test(stdin="peace")],
            limits=attrs.evolve(LIMITS, wall_s=wall_s),
        )
        assert bombed.end in ("wall_limit", "cpu_limit")
        if next_test.end != "wall_limit":
            break
    assert next_test.stdout == "well\n"


async def test_threads_count_as_processes(sandbox):
    program = """
import threading, time
def attack():
    count = 0
    try:
        while True:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            count += 1
    except (RuntimeError, MemoryError):
        return count
"""
    assert 1 <= await answer_of(sandbox, program, limits=attrs.evolve(LIMITS, processes=5)) <= 4


async def test_ten_gigabytes_of_memory_are_refused(sandbox):
    program = """
import mmap
def attack():
    failed = []
    for take in (lambda: bytearray(10 << 30), lambda: mmap.mmap(-1, 10 << 30)):
        try:
            take()
        except (MemoryError, OSError) as error:
            failed.append(type(error).__name__)
    return failed
"""
    assert await answer_of(sandbox, program) == ["MemoryError", "OSError"]


async def test_thirty_processes_of_200_megabytes_are_ended_together(sandbox):
    program = """
import os, time
for _ in range(30):
    if os.fork() == 0:
        data = bytearray(200 << 20)
        data[::4096] = b"x" * len(data[::4096])
        time.sleep(600)
print("all started", flush=True)
time.sleep(600)
"""
    limits = attrs.evolve(LIMITS, processes=40, memory_bytes=500 * MEBIBYTE)
    outcome = await outcome_of(sandbox, program, limits=limits)
    assert outcome.end == "memory_limit"
    assert outcome.signal is None


async def test_pages_that_processes_share_are_counted_once(sandbox):
    program = """
import os, time
data = bytearray(100 << 20)
data[::4096] = b"x" * len(data[::4096])
children = [pid for pid in (os.fork() for _ in range(8)) if pid or time.sleep(0.5) or os._exit(0)]
for child in children:
    os.waitpid(child, 0)
print("done")
"""
    limits = attrs.evolve(LIMITS, memory_bytes=400 * MEBIBYTE)
    outcome = await outcome_of(sandbox, program, limits=limits)
    assert (outcome.end, outcome.stdout) == ("exited", "done\n")


async def test_an_endless_loop_that_ignores_signals_ends_at_the_cpu_limit(sandbox):
    program = "import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    outcome = await outcome_of(sandbox, program, limits=attrs.evolve(LIMITS, cpu_s=1))
    assert (outcome.end, outcome.signal) == ("cpu_limit", signal.SIGKILL)


async def test_a_program_that_waits_ends_at_the_wall_clock_limit(sandbox):
    program = "print('a', flush=True)\nimport time; time.sleep(600)"
    for wall_s in WALL_LIMITS_S:
        outcome = await outcome_of(sandbox, program, limits=attrs.evolve(LIMITS, wall_s=wall_s))
        assert (outcome.end, outcome.exit_code) == ("wall_limit", None)
        if outcome.stdout:
            break
    assert outcome.stdout == "a\n"


async def test_a_full_disk_fails_the_program_and_is_empty_for_the_next_test(sandbox):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    program = """
import os
def attack():
    before = os.listdir(".")
    count = 0
    try:
        while True:
            with open(str(count), "wb") as file:
                file.write(bytes(1 << 20))
            count += 1
    except OSError as error:
        return before, count, os.strerror(error.errno)
"""
    limits = attrs.evolve(LIMITS, disk_bytes=8 * MEBIBYTE)
    outcomes = await sandbox.run(program, [Test(function="attack")] * 2, limits=limits)
    for outcome in outcomes:
        assert outcome.value[0] == []
        assert outcome.value[1] in (7, 8)
        assert outcome.value[2] == "No space left on device"


async def test_large_files_and_too_many_small_files_are_refused(sandbox):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    limits = attrs.evolve(LIMITS, file_bytes=MEBIBYTE, files=500)
    large = await outcome_of(sandbox, "open('a', 'wb').write(bytes(2 << 20))", limits=limits)
    assert "File too large" in large.stderr
    many = await outcome_of(sandbox, "import itertools\nfor i in itertools.count(): open(str(i), 'w')", limits=limits)
    assert many.end == "disk_limit" or "No space left on device" in many.stderr


async def test_a_deep_tree_of_files_does_not_outlive_its_test(sandbox):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    program = """
import os
if input():
    for _ in range(900):
        os.mkdir("d"); os.chdir("d")
    os.chmod(".", 0)
else:
    print(os.listdir("."))
"""
    deep, after = await sandbox.run(program, [Test(stdin="1\n"), Test(stdin="\n")], limits=LIMITS)
    assert deep.is_clean, deep
    assert after.stdout == "[]\n" or after.end == "disk_limit"


async def test_a_flood_of_output_ends_the_test_and_keeps_the_beginning(sandbox):
    limits = attrs.evolve(LIMITS, output_bytes=100_000)
    for stream in ("stdout", "stderr"):
        outcome = await outcome_of(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 65536)", limits=limits)
        assert outcome.end == "output_limit"
        assert getattr(outcome, stream) == "x" * 100_000


async def test_a_program_cannot_raise_its_limits(sandbox):
    program = """
import resource
def attack():
    raised = []
    for name in ("CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE"):
        kind = getattr(resource, "RLIMIT_" + name)
        soft, hard = resource.getrlimit(kind)
        try:
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            raised.append(name)
        except (ValueError, OSError):
            pass
    return raised
"""
    assert await answer_of(sandbox, program) == []


# --- access -----------------------------------------------------------------------------------------------------------


async def test_nothing_outside_can_be_written(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    places = [
        str(tmp_path),
        "/",
        "/usr",
        "/etc",
        "/dev",
        "/dev/shm",
        "/var/tmp",
        "/proc",
        "/sys",
        "/run",
        str(Path.home()),
    ]
    assert await answer_of(sandbox, _WRITES, places) == []
    assert list(tmp_path.iterdir()) == []


async def test_without_a_sandbox_outside_files_can_be_written(no_sandbox, tmp_path):
    written = [f"{tmp_path}/written_by_a_test", f"{tmp_path}/null"]
    assert await answer_of(no_sandbox, _WRITES, [str(tmp_path)]) == written


_WRITES = """
def attack(places):
    written = []
    for place in places:
        for name in ("/written_by_a_test", "/null"):
            try:
                open(place + name, "x").close()
                written.append(place + name)
            except OSError:
                pass
    return written
"""


async def test_files_of_the_run_cannot_be_read_or_listed(sandbox, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("secret")
    paths = [
        str(tmp_path / "secret"),
        str(Path.home()),
        str(Path(__file__)),
        "/etc/shadow",
        "/etc/passwd",
        str(tmp_path),
    ]
    assert await answer_of(sandbox, _READ, paths) == []


async def test_without_a_sandbox_files_can_be_read_and_listed(no_sandbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    paths = [str(tmp_path / "secret"), str(tmp_path), "/etc/passwd"]
    assert await answer_of(no_sandbox, _READ, paths) == paths


_READ = """
import os
def attack(paths):
    read = []
    for path in paths:
        try:
            os.listdir(path) if os.path.isdir(path) else open(path).read()
            read.append(path)
        except OSError:
            pass
    return read
"""


async def test_other_processes_and_secret_environment_variables_cannot_be_read(sandbox, monkeypatch):
    monkeypatch.setenv("API_KEY", "the-secret-key")
    found = await answer_of(sandbox, _READS_PROCESSES, [os.getpid(), os.getppid()], True)
    assert "the-secret-key" not in json.dumps(found)
    assert set(found) & {"API_KEY", f"{os.getpid()}/environ", f"{os.getpid()}/mem", "1/mem", "1/maps"} == set()
    assert {name for name in found if "/" not in name} <= {
        "PATH", "LANG", "OMP_NUM_THREADS", "PYTHONHASHSEED", "HOME", "TMPDIR", "LC_CTYPE", "PWD",
    }  # fmt: skip


async def test_without_a_sandbox_the_secrets_of_another_process_can_be_read(no_sandbox):
    with subprocess.Popen(["sleep", "600"], env={"API_KEY": "the-secret-key"}) as bystander:
        try:
            found = await answer_of(no_sandbox, _READS_PROCESSES, [bystander.pid], False)
        finally:
            bystander.kill()
    assert "the-secret-key" in found[f"{bystander.pid}/environ"]


_READS_PROCESSES = """
import os
def attack(pids, and_all):
    found = dict(os.environ)
    try:
        pids += [int(name) for name in os.listdir("/proc") if name.isdigit() and and_all]
    except OSError:
        pass
    for pid in [*pids, "self", 1, os.getppid()]:
        for name in ("environ", "cmdline", "maps", "mem"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    found[f"{pid}/{name}"] = file.read(4000).decode(errors="replace") if name != "mem" else "opened"
            except OSError:
                pass
    return found
"""


async def test_open_files_of_the_supervisor_are_not_inherited(sandbox):
    program = """
import os
def attack():
    return [fd for fd in range(1024) if _is_open(fd)]
def _is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
"""
    assert await answer_of(sandbox, program) == [0, 1, 2, 3]


async def test_only_socket_pairs_can_be_made(sandbox):
    assert await answer_of(sandbox, _SOCKETS) == [[], "through the pair"]


async def test_without_a_sandbox_sockets_can_be_made(no_sandbox):
    made, _ = await answer_of(no_sandbox, _SOCKETS)
    assert [socket.AF_UNIX, socket.SOCK_STREAM] in made
    assert [socket.AF_INET, socket.SOCK_DGRAM] in made


_SOCKETS = """
import socket
def attack():
    made = []
    for family in range(46):
        for kind in (1, 2, 3, 5):
            try:
                socket.socket(family, kind).close()
                made.append((family, kind))
            except OSError:
                pass
    left, right = socket.socketpair()
    left.send(b"through the pair")
    return made, right.recv(100).decode()
"""


async def test_a_symlink_leads_nowhere_and_only_the_link_is_removed(sandbox, tmp_path):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    outcomes = await sandbox.run(_follows_links(tmp_path), [Test(), Test()], limits=LIMITS)
    assert [outcome.stdout for outcome in outcomes] == ["refused\nrefused\n"] * 2
    assert (tmp_path / "kept").read_text() == "kept"


async def test_without_a_sandbox_a_symlink_leads_out_and_its_target_is_kept(no_sandbox, tmp_path):
    (tmp_path / "kept").write_text("kept")
    outcomes = await no_sandbox.run(_follows_links(tmp_path), [Test(), Test()], limits=LIMITS)
    assert [outcome.stdout for outcome in outcomes] == ["kept\nkept\n"] * 2
    assert (tmp_path / "kept").read_text() == "kept"


def _follows_links(directory: Path) -> str:
    return f"""
import os
os.symlink({str(directory)!r}, "directory")
os.symlink({str(directory / "kept")!r}, "file")
for path in ("directory/kept", "file"):
    try:
        print(open(path).read())
    except OSError:
        print("refused")
"""


async def test_dangerous_system_calls_are_refused(sandbox):
    assert await answer_of(sandbox, _CALLS, None) == []


async def test_without_a_sandbox_system_calls_are_answered(no_sandbox):
    """Makes only calls that affect the program alone."""
    assert await answer_of(no_sandbox, _CALLS, ["memfd", "hide"]) == ["memfd", "hide"]


_CALLS = """
import ctypes, os
def attack(names):
    libc = ctypes.CDLL(None, use_errno=True)
    attempts = {
        "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0),
        "unshare": lambda: libc.unshare(0x10000000),
        "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "memfd": lambda: libc.memfd_create(b"a", 0),
        "shared memory": lambda: libc.shmget(0, 1 << 20, 0o1600),
        "setuid": lambda: libc.setuid(0),
        "hide": lambda: libc.prctl(4, 0, 0, 0, 0),
        "limits of another": lambda: libc.prlimit(os.getppid(), 7, None, ctypes.create_string_buffer(16)),
        "io_uring": lambda: libc.syscall(425, 8, ctypes.create_string_buffer(120)),
    }
    return [name for name in names or attempts if attempts[name]() != -1]
"""


async def test_signals_reach_no_other_process(sandbox):
    with subprocess.Popen(["sleep", "600"]) as bystander:
        program = f"""{_SIGNALS}
import signal
def attack(pids):
    signals([*pids, os.getppid(), 1], range(1, 65))
    signals([-1], [signal.SIGKILL])
    return "alive"
"""
        try:
            assert await answer_of(sandbox, program, [bystander.pid, os.getpid()]) == "alive"
            assert bystander.poll() is None
        finally:
            bystander.kill()


async def test_without_a_sandbox_a_signal_reaches_another_process(no_sandbox):
    with subprocess.Popen(["sleep", "600"]) as bystander:
        await answer_of(no_sandbox, f"{_SIGNALS}\nattack = signals", [bystander.pid], [signal.SIGTERM])
        assert bystander.wait(DEADLINE_S) == -signal.SIGTERM


_SIGNALS = """
import os
def signals(pids, numbers):
    for number in numbers:
        for pid in pids:
            try:
                os.kill(pid, number)
            except OSError:
                pass
"""


# --- leftovers --------------------------------------------------------------------------------------------------------


async def test_orphans_are_gone_when_the_test_has_ended(sandbox, marker):
    program = f"{_SLEEPER}\nsleeper(input())\nprint('left an orphan')"
    seen = await outcome_of(sandbox, program, stdin=marker)
    assert seen.stdout == "left an orphan\n"
    assert processes_named(f"600.{marker}") == []


async def test_a_program_that_stops_all_processes_is_still_ended(sandbox, marker):
    program = f"""{_SLEEPER}
import signal
sleeper(input())
for _ in range(8):
    if os.fork() == 0:
        while True:
            os.kill(-1, signal.SIGSTOP)
"""
    first, second = await sandbox.run(program, [Test(stdin=marker)] * 2, limits=attrs.evolve(LIMITS, wall_s=1.0))
    assert {first.end, second.end} <= {"exited", "wall_limit"}
    assert processes_named(f"600.{marker}") == []


async def test_nothing_is_left_when_the_run_is_cancelled(sandbox, marker):
    program = f"{_SLEEPER}\nsleeper(input())\nimport time\ntime.sleep(600)"
    run = asyncio.create_task(outcome_of(sandbox, program, stdin=marker))
    await _seen(f"600.{marker}")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert processes_named(f"600.{marker}") == []


async def test_nothing_is_left_when_the_supervisor_is_killed(sandbox, marker):
    program = f"{_SLEEPER}\nsleeper(input())\nimport time\ntime.sleep(600)"
    async with sandbox.opened(program, limits=LIMITS) as session:
        run = asyncio.create_task(session.run(Test(stdin=marker)))
        await _seen(f"600.{marker}")
        session.process.kill()
        with pytest.raises(SandboxError, match="ended: by SIGKILL"):
            await run
    # The processes may outlive the supervisor by a moment.
    wait_until_gone(f"600.{marker}")


def test_nothing_is_left_when_the_trainer_is_killed(sandbox, marker):
    script = f"""
import asyncio
from rl_environments.sandbox import ProgramLimits, Sandbox, Test
sandbox = Sandbox(**{attrs.asdict(sandbox)!r})
program = {_SLEEPER!r} + "sleeper(input())\\nimport time\\ntime.sleep(600)"
asyncio.run(sandbox.run(program, [Test(stdin={marker!r})], limits=ProgramLimits(wall_s=600.0)))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as trainer:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not processes_named(f"600.{marker}"):
                assert time.monotonic() < deadline, "the program did not start"
                time.sleep(0.02)
        finally:
            trainer.kill()
    wait_until_gone(f"600.{marker}")


async def test_the_probes_attacks_succeed_without_a_sandbox(no_sandbox):
    found, _ = await escapes(no_sandbox)
    assert len(found) == 5


async def test_even_without_a_sandbox_processes_end_with_their_test(no_sandbox, marker):
    outcome = await outcome_of(no_sandbox, f"{_SLEEPER}\nsleeper(input())\nprint('left')", stdin=marker)
    assert outcome.stdout == "left\n"
    assert processes_named(f"600.{marker}") == []
    assert (
        await outcome_of(no_sandbox, "while True: pass", limits=ProgramLimits(cpu_s=1, wall_s=60.0))
    ).end == "cpu_limit"


async def _seen(word: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not processes_named(word):
        assert time.monotonic() < deadline, f"no process named {word}"
        await asyncio.sleep(0.02)
