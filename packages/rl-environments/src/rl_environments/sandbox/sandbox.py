"""Starts a sandbox for each program (`Sandbox`) and runs the program's tests in it (`Session`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rl_core.errors import DeadlineError
from rl_core.interfaces import between
from rl_environments.sandbox.bubblewrap import SUPERVISOR, WORK, bubblewrap_command
from rl_environments.sandbox.inside import frames
from rl_environments.sandbox.limits import ProgramLimits, ProgramOutcome, SandboxError, Test
from rl_environments.sandbox.seccomp import seccomp_filter
from rl_environments.sandbox.slots import MOST_SLOTS, Slot, locked_slot

logger = logging.getLogger(__name__)
Mechanism = Literal["bubblewrap", "landlock", "none"]
_SOURCE = Path(__file__).parents[2]
_INSIDE = Path(__file__).parent / "inside"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
"""A program's environment variables, besides HOME and TMPDIR, which the supervisor sets. The hash seed is fixed, so
that a program always prints a set in the same order."""
_START_S = 120.0
_ANSWER_S = 60.0
"""Time beyond a test's wall-clock limit in which the supervisor must end the test and answer; long enough for a very
busy machine."""
_END_S = 60.0


@attrs.frozen(kw_only=True)
class Sandbox:
    """Runs programs with one mechanism, from any event loop. `probe_sandbox` returns one that works on this machine."""

    mechanism: Mechanism
    python: str
    """The programs' interpreter, which the sandbox's user must be able to read."""
    readable: tuple[str, ...] = ()
    """Directories that programs may read besides the system's."""
    slots: int = attrs.field(validator=between(1, MOST_SLOTS))
    """Maximum number of programs that all of this user's processes on the machine run at a time."""
    has_disk: bool = True
    """Whether programs have a directory to write to; False with Landlock in a container that may not mount."""

    async def run(
        self, program: str, tests: Sequence[Test], *, limits: ProgramLimits | None = None, wait_s: float = 300.0
    ) -> tuple[ProgramOutcome, ...]:
        """Runs all tests of a program and returns their outcomes. See `opened` for arguments and errors."""
        async with self.opened(program, limits=limits, wait_s=wait_s) as session:
            return tuple([await session.run(test) for test in tests])

    @contextlib.asynccontextmanager
    async def opened(
        self, program: str, *, limits: ProgramLimits | None = None, wait_s: float = 300.0
    ) -> AsyncIterator[Session]:
        """Opens a sandbox for one program. All processes of the program have ended when the context ends.

        Args:
            wait_s: longest wait for a free slot in seconds.

        Raises:
            DeadlineError: no slot became free within `wait_s`, or the supervisor did not answer in time.
            SandboxError: the supervisor failed.
            ConfigError: the directory of the slots' lock files cannot be used.
        """
        limits = limits or ProgramLimits()
        async with locked_slot(self.slots, wait_s=wait_s) as slot:
            process = await self._started(slot, limits)
            try:
                session = Session(process, program, limits, who=f"the supervisor of the {self.mechanism} sandbox")
                await session.begin(self._settings(slot, limits))
                yield session
            finally:
                await self._ended(process, slot)

    async def _started(self, slot: Slot, limits: ProgramLimits) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as open_files:
            command, fds = self._command(slot, limits, open_files)
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                # Programs inherit the supervisor's environment, so it must not hold secrets.
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[slot.lock_fd, *fds],
                # Ctrl-C must reach only the trainer; a supervisor ends when its stdin ends.
                start_new_session=True,
            )

    def _command(
        self, slot: Slot, limits: ProgramLimits, open_files: contextlib.ExitStack
    ) -> tuple[list[str], list[int]]:
        if self.mechanism != "bubblewrap":
            return _python(self.python, str(_SOURCE)), []
        paths = sorted(_INSIDE.glob("*.py"))
        fds = [open_files.enter_context(path.open("rb")).fileno() for path in paths]
        files = {f"{SUPERVISOR}/{path.relative_to(_SOURCE)}": fd for path, fd in zip(paths, fds, strict=True)}
        command = bubblewrap_command(
            _python(self.python, SUPERVISOR),
            uid=slot.uid,
            disk_bytes=limits.disk_bytes,
            readable=[path for path in self.readable if not Path(path).is_relative_to("/usr")],
            files=files,
        )
        return command, fds

    def _settings(self, slot: Slot, limits: ProgramLimits) -> dict[str, Any]:
        confined = self.mechanism != "none"
        # The limit also counts the supervisor, which is process 1 of the namespace.
        own = 1 if self.mechanism == "bubblewrap" else 0
        return {
            "mechanism": self.mechanism,
            "uid": slot.uid,
            "ending_uid": slot.ending_uid,
            "work": WORK if self.mechanism == "bubblewrap" else str(slot.work),
            "readable": [*_SYSTEM, *self.readable],
            "filter": base64.b64encode(seccomp_filter()).decode() if confined else "",
            "max_processes": limits.processes + own if confined else None,
            "limits": attrs.asdict(limits),
        }

    async def _ended(self, process: asyncio.subprocess.Process, slot: Slot) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self.mechanism == "landlock" and process.returncode != 0:
            await self._cleared(slot)

    async def _cleared(self, slot: Slot) -> None:
        """Ends the processes that a killed supervisor has left: starts a new supervisor, which ends all processes of
        the slot's user. If this takes too long, only logs a warning, because an exception would replace the first
        supervisor's error."""
        process = await self._started(slot, ProgramLimits())
        settings = {**self._settings(slot, ProgramLimits()), "clear": True}
        try:
            await asyncio.wait_for(process.communicate(frames.packed(settings)), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            logger.warning(
                "a program's processes may still run: its supervisor was killed, and another one did not end them "
                f"within {_END_S:g} s. The next program in the slot {slot.work} ends them before it starts"
            )


def _python(python: str, root: str) -> list[str]:
    """Returns the command that starts the supervisor. The directory `root` is on `sys.path` only while the supervisor
    is imported, so programs cannot import other modules from it."""
    start = (
        f"import sys; sys.path[0] = {root!r}; from rl_environments.sandbox.inside import supervisor; del sys.path[0]; "
    )
    return [python, "-s", "-B", "-c", f"{start}supervisor.main()"]


class Session:
    """A program in an open sandbox; `run` tests it any number of times."""

    def __init__(self, process: asyncio.subprocess.Process, program: str, limits: ProgramLimits, *, who: str) -> None:
        self.process, self._program, self._limits, self._who = process, program, limits, who
        self._token = secrets.token_hex(16)
        self._syntax_error: ProgramOutcome | None = None
        self.has_disk = True

    async def begin(self, settings: dict[str, Any]) -> None:
        """Sends the program and its settings to the supervisor."""
        answer = await self._asked({**settings, "program": self._program, "token": self._token}, _START_S)
        self.has_disk = answer["work"] is not None

    async def run(self, test: Test) -> ProgramOutcome:
        """Runs one test and returns its outcome, whatever the program does.

        After a syntax error, further calls return the same outcome without starting the program.

        Raises:
            DeadlineError: the supervisor did not answer in time.
            SandboxError: the supervisor failed.
        """
        if self._syntax_error is not None:
            return self._syntax_error
        answer = await self._asked(attrs.asdict(test), self._limits.wall_s + _ANSWER_S)
        outcome = self._outcome(answer)
        if outcome.end == "syntax_error":
            self._syntax_error = outcome
        return outcome

    def _outcome(self, answer: dict[str, Any]) -> ProgramOutcome:
        record = self._record(answer["record"])
        if record.get("end") == "broken":
            raise SandboxError(f"{self._who} could not confine the program: {answer['stderr'][-500:]}")
        status = answer["status"]
        ended_by = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        end = answer["end"] or record.get("end") or ("exited" if ended_by is None else "signalled")
        return ProgramOutcome(
            end=end,
            exit_code=os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            signal=ended_by if end in ("signalled", "cpu_limit") else None,
            stdout=answer["stdout"],
            stderr=answer["stderr"],
            is_complete=end == "exited" and bool(record),
            value=record.get("value"),
            cpu_s=answer["cpu_s"],
            wall_s=answer["wall_s"],
        )

    def _record(self, text: str) -> dict[str, Any]:
        """Parses the record that `inside.program` wrote. Returns an empty dict if it wrote none. Text that is not JSON
        or lacks this session's token counts as no record, because the untrusted program wrote it."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        is_own = isinstance(record, dict) and record.get("token") == self._token
        return record if is_own else {}

    async def _asked(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self.process.stdin.write(frames.packed(message))
                await self.process.stdin.drain()
                head = await self.process.stdout.readexactly(frames.LENGTH.size)
                return json.loads(await self.process.stdout.readexactly(frames.LENGTH.unpack(head)[0]))
        except TimeoutError as error:
            raise DeadlineError(f"waited {timeout_s:g} s for {self._who} to answer") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxError(f"{self._who} ended: {await self._last_words()}") from error

    async def _last_words(self) -> str:
        assert self.process.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                said = (await self.process.stderr.read()).decode(errors="replace").strip()
                code = await self.process.wait()
                ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
                return f"{ended}; it said {said[-1000:]!r}"
        return "its stderr is still open"
