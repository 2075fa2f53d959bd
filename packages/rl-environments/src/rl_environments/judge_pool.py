"""Compares answers in child processes. All episodes of the parent process share them, whichever event loop they use.

A child compares one answer after another, until an answer takes too much CPU time or crashes it. All children end when
the parent ends or is killed, because this closes the pipe that is their stdin. On Linux the kernel also kills a child
when the thread that started it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from rl_core.errors import ConfigError, DataError, DeadlineError, RLError, install
from rl_environments.sandbox.inside import frames

_START_S = 300.0
"""Deadline for the start of a process. The process imports math-verify, which takes 3 s, or 15 s on a busy machine."""
_LEAST_WALL_S, _WALL_PER_CPU = 60.0, 10.0
_END_S = 30.0
_INHERITED = ("PATH", "LANG", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that Python needs. The processes inherit no others: they parse the policy's text, and other
variables may hold secrets."""
_ANSWERS_OWN_FAULT = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
"""Signals that end a process because of the answer itself: it exhausted its CPU time (SIGPROF), or a deep expression
overflowed the stack."""


class JudgeError(RLError, RuntimeError):
    """A process that compares answers ended for a reason unrelated to the answer."""


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of comparing one answer."""

    is_right: bool
    has_answer: bool
    """Whether an expression was found in the response; also True if the comparison failed or was given up."""
    is_given_up: bool
    """Whether the comparison took too long or crashed the process. Such an answer counts as wrong."""


class JudgePool:
    """Starts processes that compare answers, each when it is needed, and keeps at most `count` of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="judge")
        self._idle: queue.LifoQueue[_Judge] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._all: set[_Judge] = set()
        self._is_closed = False

    async def verdict(self, response: str, references: Sequence[str], *, cpu_s: float, wait_s: float) -> Verdict:
        """Compares a response with the references, any of which is right.

        Args:
            cpu_s: CPU time in seconds for comparing this answer; an answer that takes longer counts as wrong.
            wait_s: longest wait for the verdict in seconds, including the wait for a free process.

        Raises:
            DataError: none of the references can be read.
            ConfigError: math-verify is not installed.
            DeadlineError: there is no verdict within `wait_s`; the answer may be right or wrong.
            JudgeError: the process ended for a reason unrelated to the answer, or the pool was closed.
        """
        request = {"response": response, "references": list(references), "cpu_s": cpu_s}
        judged = self._executor.submit(self._answer, request)
        try:
            async with asyncio.timeout(wait_s):
                answer = await asyncio.wrap_future(judged)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"waited {wait_s:g} s for one of {self._count} processes that compare answers: raise `processes` if "
                "CPU cores are idle, or raise `wait_s`"
            ) from error
        if answer is None:
            return Verdict(is_right=False, has_answer=True, is_given_up=True)
        if not answer["is_readable"]:
            raise DataError(f"the reference answers {list(references)!r:.200} cannot be read as expressions")
        return Verdict(is_right=answer["is_right"], has_answer=answer["has_answer"], is_given_up=False)

    def problem(self, reference: str, *, cpu_s: float) -> str | None:
        """Returns why no answer could be judged by this reference; None if it can be used. Blocks until it is known,
        and starts no thread, so that the caller can fork.

        Raises:
            ConfigError, DeadlineError, JudgeError: as `verdict`.
        """
        answer = self._answer({"reference": reference, "cpu_s": cpu_s})
        return f"reading it takes more than {cpu_s:g} s of CPU time" if answer is None else answer["problem"]

    def pids(self) -> list[int]:
        """Returns the ids of the pool's existing processes."""
        with self._lock:
            return sorted(judge.pid for judge in self._all)

    def close(self) -> None:
        """Ends all processes, busy or idle, and waits for their end."""
        with self._lock:
            self._is_closed = True
            judges, self._all = self._all, set()
        for judge in judges:
            judge.kill()
        # A thread that waits for a killed process notices the end of its stdout and closes the pipes itself.
        self._executor.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().end()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        judge = self._taken()
        try:
            answer = judge.answer(request)
        except BaseException:
            self._ended(judge)
            raise
        # Under the lock, so that either `close` finds the process in the queue, or this thread sees that the pool is
        # closed.
        with self._lock:
            is_kept = answer is not None and not self._is_closed
            if is_kept:
                self._idle.put(judge)
        if not is_kept:
            self._ended(judge)
        return answer

    def _taken(self) -> _Judge:
        while True:
            try:
                judge = self._idle.get_nowait()
            except queue.Empty:
                return self._started()
            if judge.is_alive():
                return judge
            self._ended(judge)

    def _started(self) -> _Judge:
        with self._lock:
            if self._is_closed:
                raise JudgeError("the processes that compare answers were ended while an answer waited for one")
            judge = _Judge()
            self._all.add(judge)
            return judge

    def _ended(self, judge: _Judge) -> None:
        judge.end()
        with self._lock:
            self._all.discard(judge)


class _Judge:
    """Starts one process that compares answers, and exchanges messages with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl_environments.judge_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._is_ready = False

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the process's answer to a request; None if the process has ended because of what it should read."""
        self._get_ready()
        assert self._process.stdin is not None
        wall_s = max(_LEAST_WALL_S, _WALL_PER_CPU * request["cpu_s"])
        try:
            frames.send(self._process.stdin.fileno(), request)
        except BrokenPipeError:
            answer = None
        else:
            answer = self._answer(wall_s, "to compare an answer")
        if answer is None:
            self._require_own_fault()
        return answer

    def kill(self) -> None:
        """Kills the process and waits until it has ended."""
        self._process.kill()
        self._process.wait(_END_S)

    def end(self) -> None:
        """Kills the process and closes its pipes. Call this only when no thread waits for its answers any more."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _get_ready(self) -> None:
        if self._is_ready:
            return
        answer = self._answer(_START_S, "to import math-verify")
        if answer is None:
            raise JudgeError(f"the process that compares answers ended at its start, with code {self._process.wait()}")
        if "missing" in answer:
            raise ConfigError(
                f"the environment 'mathematics' needs math-verify: {install('rl-environments[mathematics]')} "
                f"({answer['missing']})"
            )
        self._is_ready = True

    def _answer(self, timeout_s: float, purpose: str) -> dict[str, Any] | None:
        """Returns the process's next message, or None if the process has ended. Raises DeadlineError if neither happens
        within `timeout_s`."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        waiting = select.poll()  # `select.select` fails for descriptors above 1023
        waiting.register(fd, select.POLLIN)
        started = time.monotonic()
        if not waiting.poll(timeout_s * 1000):
            waited_s = time.monotonic() - started
            raise DeadlineError(
                f"waited {waited_s:.0f} s for process {self.pid} {purpose}; the machine may be overloaded: lower "
                "`processes`"
            )
        return frames.receive(fd)

    def _require_own_fault(self) -> None:
        code = self._process.wait(_END_S)
        if -code not in _ANSWERS_OWN_FAULT:
            raise JudgeError(
                f"the process that compares answers ended unexpectedly, with code {code}; -9 often means that the "
                "machine ran out of memory"
            )


_lock = threading.Lock()
_pools: dict[int, JudgePool] = {}


def shared_pool(count: int) -> JudgePool:
    """Returns the pool of `count` processes that this process's environments share; the first call creates it."""
    with _lock:
        if count not in _pools:
            _pools[count] = JudgePool(count)
        return _pools[count]


@atexit.register
def close_pools() -> None:
    """Ends the processes of all pools; the next answer starts new ones."""
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
