"""What programs in the sandbox can do, which mechanism is chosen, and the slots that sandboxes share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest

import rl_environments
from rl_core.errors import ConfigError, DeadlineError
from rl_environments.sandbox import (
    ProgramLimits,
    Sandbox,
    SandboxError,
    Test,
    escapes,
    probe_sandbox,
    probing,
    shared_sandbox,
)
from rl_environments.sandbox import sandbox as sandbox_module
from rl_environments.sandbox.bubblewrap import bubblewrap_command
from rl_environments.sandbox.inside import processes
from rl_environments.sandbox.slots import locked_slot
from tests.environments.boxes import LIMITS, MECHANISMS, SLOTS, answer_of, outcome_of, processes_named, sandbox_by


@pytest.fixture(params=MECHANISMS)
async def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return await sandbox_by(request.param)


# --- programs ---------------------------------------------------------------------------------------------------------


async def test_a_script_reads_stdin_and_writes_stdout(sandbox):
    program = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)), 'ünï 東京')"
    numbers = range(200_000)
    outcome = await outcome_of(sandbox, program, stdin="\n".join(map(str, numbers)))
    assert outcome.is_clean
    assert outcome.stdout == f"{sum(numbers)} ünï 東京\n"
    assert not outcome.is_complete


async def test_a_function_is_called_with_json_and_answers_json(sandbox):
    program = "def swapped(pair, *, _=None):\n    return {'swapped': (pair[1], pair[0])}"
    assert (await outcome_of(sandbox, program, function="swapped", arguments=[[1, "ö"]])).value == {"swapped": ["ö", 1]}
    method = "class Solution:\n    def twice(self, x): return 2 * x"
    assert (await outcome_of(sandbox, method, function="twice", arguments=[1.5])).value == 3.0
    absent = await outcome_of(sandbox, method, function="thrice", arguments=[1])
    assert not absent.is_complete
    assert "thrice" in absent.stderr
    unfit = await outcome_of(sandbox, "def f(): return {1, 2}", function="f")
    assert not unfit.is_complete
    assert "set is not JSON serializable" in unfit.stderr


async def test_only_the_result_counts_as_a_functions_output(sandbox):
    limits = attrs.evolve(LIMITS, output_bytes=1000)
    program = "def f(count): return 'x' * count"
    tests = [Test(function="f", arguments=[count]) for count in (998, 3000)]  # the result's quotes add two bytes
    fits, exceeds = await sandbox.run(program, tests, limits=limits)
    assert (fits.end, fits.value) == ("exited", "x" * 998)
    assert (exceeds.end, exceeds.is_complete) == ("output_limit", False)
    silent = attrs.evolve(LIMITS, output_bytes=0)
    (checked,) = await sandbox.run("", [Test(check="pass")], limits=silent)
    assert checked.is_complete


async def test_a_check_runs_after_the_program_in_its_namespace(sandbox):
    outcomes = await sandbox.run(
        "def f(x): return x + 1\nif __name__ == '__main__': raise SystemExit(7)",
        [Test(check="assert f(1) == 2"), Test(check="assert f(1) == 3"), Test(check="undefined")],
        limits=LIMITS,
    )
    assert [outcome.is_complete for outcome in outcomes] == [True, False, False]
    assert "AssertionError" in outcomes[1].stderr


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import os; os.write(3, b'{}'); os._exit(0)",
        """import os; os.write(3, b'{"token": "", "value": 5}'); os._exit(0)""",
        "import os, sys; os.close(3); os._exit(0)",
    ],
)
async def test_a_program_that_ends_early_or_writes_its_own_record_passes_no_test(sandbox, program):
    outcomes = await sandbox.run(program, [Test(check="pass"), Test(function="f")], limits=LIMITS)
    for outcome in outcomes:
        assert outcome.is_clean
        assert not outcome.is_complete
        assert outcome.value is None


async def test_a_syntax_error_is_reported_once_for_all_tests(sandbox):
    first, second = await sandbox.run("def f(:\n", [Test(), Test()], limits=LIMITS)
    assert first.end == "syntax_error"
    assert "SyntaxError" in first.stderr
    assert second is first
    assert (await outcome_of(sandbox, "a = '\0'")).end == "syntax_error"


async def test_exit_codes_and_signals_are_reported(sandbox):
    cases = {
        "raise SystemExit(3)": ("exited", 3, None),
        "import sys; sys.exit('said')": ("exited", 1, None),
        "1 / 0": ("exited", 1, None),
        "exit()": ("exited", 0, None),
        "import os; os.kill(os.getpid(), 11)": ("signalled", None, 11),
    }
    for program, expected in cases.items():
        outcome = await outcome_of(sandbox, program)
        assert (outcome.end, outcome.exit_code, outcome.signal) == expected, program
    assert 'File "program.py", line 2, in f' in (await outcome_of(sandbox, "def f():\n    1 / 0\nf()")).stderr


async def test_threads_and_exit_functions_run_to_their_end(sandbox):
    program = """
import atexit, threading, time
atexit.register(print, "at exit")
printed = threading.Event()
threading.Thread(target=lambda: (printed.wait(), time.sleep(0.1), print("thread"))).start()
print("main")
printed.set()
"""
    assert (await outcome_of(sandbox, program)).stdout == "main\nthread\nat exit\n"


async def test_a_program_may_use_files_processes_and_the_standard_library(sandbox):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    program = """
import asyncio, multiprocessing, subprocess, tempfile
def attack():
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("file"); file.seek(0)
        said = [file.read()]
    said.append(subprocess.run(["/usr/bin/env", "echo", "child"], capture_output=True, text=True).stdout)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=theirs.send, args=("forked",))
    child.start()
    said.append(ours.recv())
    child.join()
    asyncio.run(asyncio.sleep(0))
    return said
"""
    assert await answer_of(sandbox, program) == ["file", "child\n", "forked"]


async def test_hashes_are_the_same_in_every_run(sandbox):
    outcomes = [await outcome_of(sandbox, "print(hash('a'))") for _ in range(2)]
    assert outcomes[0].stdout == outcomes[1].stdout


async def test_concurrent_programs_do_not_see_each_other(sandbox):
    if not sandbox.has_disk:
        pytest.skip("this sandbox has no writable directory")
    program = """
import os, time
with open("mine", "w") as file:
    file.write(input())
time.sleep(0.2)
print(open("mine").read(), os.listdir("."))
"""
    outcomes = await asyncio.gather(*[outcome_of(sandbox, program, stdin=str(number)) for number in range(6)])
    assert [outcome.stdout for outcome in outcomes] == [f"{number} ['mine']\n" for number in range(6)]


# --- the mechanism ----------------------------------------------------------------------------------------------------


async def test_the_probe_chooses_a_sandbox_from_which_no_attack_escapes():
    try:
        sandbox = await probe_sandbox()
    except ConfigError as error:
        pytest.skip(f"this machine has no sandbox: {error}")
    assert (await escapes(sandbox))[0] == []


async def test_a_missing_mechanism_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"not installed: bwrap.*apt-get install bubblewrap.*sandbox=none"):
        await probe_sandbox("bubblewrap")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_landlock_without_root_is_refused():
    script = (
        "import asyncio, os; from rl_environments.sandbox import probe_sandbox; os.setuid(65534); "
        "asyncio.run(probe_sandbox('landlock'))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert "it needs root" in run.stderr


async def test_a_missing_interpreter_is_named():
    with pytest.raises(ConfigError, match=r"with /nowhere/python3: "):
        await probe_sandbox("auto", python="/nowhere/python3")


async def test_the_probe_detects_a_readable_file_of_the_run():
    await sandbox_by("landlock")
    # All temporary files may be read, so the probe's own secret file can be read too.
    with pytest.raises(ConfigError, match="it is not secure: a program in it could read a file of the run"):
        await probe_sandbox("landlock", readable=[tempfile.gettempdir()])


async def test_no_program_escapes_from_landlock_where_nothing_can_be_mounted():
    """Runs as root without CAP_SYS_ADMIN and CAP_SYS_PTRACE, as in a container."""
    await sandbox_by("landlock")
    script = f"""
import asyncio
from rl_environments.sandbox import Test, escapes, probe_sandbox
async def main():
    sandbox = await probe_sandbox("landlock", slots={SLOTS})
    assert not sandbox.has_disk
    program = "try: open('a', 'w')\\nexcept OSError: print('no disk')"
    (outcome,) = await sandbox.run(program, [Test()])
    print(outcome.stdout, await escapes(sandbox))
asyncio.run(main())
"""
    dropped = ["setpriv", "--bounding-set", "-sys_admin,-sys_ptrace", "--inh-caps", "-sys_admin,-sys_ptrace"]
    run = subprocess.run([*dropped, sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert run.stdout == "no disk\n ([], False)\n", run.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="without root, the other tests already cover this")
async def test_no_program_escapes_from_bubblewrap_started_by_a_user_without_rights():
    """Runs as on a laptop. All imports happen as root, because the other user may be unable to read the files."""
    await sandbox_by("bubblewrap")
    script = f"""
import asyncio, os
from rl_environments.sandbox import Sandbox, escapes
sandbox = Sandbox(mechanism="bubblewrap", python="/usr/bin/python3", slots={SLOTS})
asyncio.run(escapes(sandbox))
os.setgroups([])
os.setresgid(65533, 65533, 65533)
os.setresuid(65533, 65533, 65533)
print(asyncio.run(escapes(sandbox)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    if "PermissionError" in run.stderr and str(Path(rl_environments.__file__).parent) in run.stderr:
        pytest.skip("another user may not read this project's files")
    assert run.stdout == "([], True)\n", run.stderr


def test_bubblewrap_is_started_by_the_path_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command contains bwrap's full path, because it runs with a shorter PATH than this process."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command = bubblewrap_command(["true"], uid=60578, disk_bytes=1 << 20, readable=[], files={})
    assert str(program) in command
    assert "bwrap" not in command


async def test_the_error_of_a_supervisor_that_cannot_start_gives_its_exit_code():
    await sandbox_by("bubblewrap")
    broken = Sandbox(mechanism="bubblewrap", python="/usr/bin/false", slots=SLOTS)
    with pytest.raises(SandboxError, match="ended: with code 1"):
        await outcome_of(broken, "")


async def test_a_supervisor_that_hangs_is_killed_and_its_error_is_kept(tmp_path, monkeypatch, caplog):
    for name in ("_START_S", "_END_S"):
        monkeypatch.setattr(sandbox_module, name, 0.2)
    python, marker = tmp_path / "python", f"604801.{secrets.randbelow(10**15) + 10**15}"
    python.write_text(f"#!/bin/sh\nexec sleep {marker}\n")
    python.chmod(0o755)
    hanging = Sandbox(mechanism="landlock", python=str(python), slots=SLOTS)
    with pytest.raises(DeadlineError, match=r"waited 0.2 s for the supervisor of the landlock sandbox to answer"):
        await outcome_of(hanging, "")
    assert processes_named(marker) == []
    assert "another one did not end them within 0.2 s" in caplog.text


def test_the_memory_of_an_ended_process_counts_as_zero():
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert processes._share(ended.pid, 100 << 20) == 0
    assert 0 < processes._share(os.getpid(), 1 << 50) < 1 << 50


def test_limits_out_of_bounds_are_named():
    below = (("cpu_s", 0), ("wall_s", 0), ("processes", 0), ("memory_bytes", 5), ("output_bytes", -1))
    names = ("cpu_s", "address_space_bytes", "file_bytes", "disk_bytes", "files", "open_files")
    for name, value in (*below, *((name, 10**30) for name in names)):
        with pytest.raises(ConfigError, match=f"{name}: got {value}; expected"):
            attrs.evolve(ProgramLimits(), **{name: value})


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give slots their own users")
async def test_a_slots_processes_cannot_stop_the_process_that_ends_them():
    async with locked_slot(SLOTS, wait_s=250.0) as slot:
        script = """
import os, signal, sys, time
from rl_environments.sandbox.inside.confinement import act_as_user, change_user
uid, ending_uid = map(int, sys.argv[1:])
read, write = os.pipe()
ender = os.fork()
if ender == 0:
    act_as_user(uid, ending_uid)
    os.write(write, b"!")
    while True:
        time.sleep(0.1)
os.close(write)
assert os.read(read, 1) == b"!"
program = os.fork()
if program == 0:
    change_user(uid)
    try:
        os.kill(ender, signal.SIGSTOP)
        os._exit(1)
    except PermissionError:
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
os.kill(ender, signal.SIGKILL)
"""
        users = [str(slot.uid), str(slot.ending_uid)]
        run = subprocess.run([sys.executable, "-c", script, *users], capture_output=True, text=True, timeout=240)
        assert run.stdout == "0\n", run.stderr


# --- slots ------------------------------------------------------------------------------------------------------------


async def test_a_slot_has_one_holder_at_a_time():
    # Other processes on this machine may hold some slots too.
    async with locked_slot(SLOTS, wait_s=250.0) as first, locked_slot(SLOTS, wait_s=250.0) as second:
        assert first.work != second.work
        assert os.getuid() != 0 or first.uid != second.uid


@pytest.mark.parametrize("count", [0, 304])
async def test_too_few_and_too_many_slots_are_refused(count: int):
    with pytest.raises(ConfigError, match=f"slots: got {count}; expected between 1 and 303"):
        await probe_sandbox("none", slots=count)


async def test_waiting_too_long_for_a_slot_is_an_error():
    async def take_three_of_two() -> None:
        async with contextlib.AsyncExitStack() as held:
            for _ in range(3):
                await held.enter_async_context(locked_slot(2, wait_s=0.1))

    with pytest.raises(DeadlineError, match=r"waited 0.1 s for one of the 2 sandbox slots"):
        await take_three_of_two()


async def test_settings_that_cannot_work_are_not_probed_for_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    with pytest.raises(ConfigError, match="cannot run untrusted programs") as first:
        await shared_sandbox("none", python=str(python), slots=1)
    python.symlink_to(sys.executable)
    with pytest.raises(ConfigError) as second:
        await shared_sandbox("none", python=str(python), slots=1)
    assert str(second.value) == str(first.value)
    monkeypatch.setattr(probing, "_REFUSED_S", 0.0)
    assert (await shared_sandbox("none", python=str(python), slots=1)).python == str(python)
