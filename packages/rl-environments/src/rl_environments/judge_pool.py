"""Processes that compare answers, shared by all episodes of this process, whatever event loop they run on.

A process is used again until an answer ends it. All end with this process, also when it is killed: each waits at a pipe
from here, and the kernel kills it together with the thread that started it.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from rl_core.errors import ConfigError, DataError, DeadlineError, RLError, install
from rl_environments.sandbox.inside import frames

_START_S = 300.0
"""math-verify is imported in 3 s, on a busy machine in 15."""
_LEAST_WALL_S, _WALL_PER_CPU = 60.0, 10.0
_END_S = 30.0
_INHERITED = ("PATH", "LANG", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Of the environment: what Python needs. Secrets stay here, since the process reads what the policy wrote."""
_ANSWERS_OWN_FAULT = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
"""CPU time used up; a stack that a deep expression broke."""


class JudgeError(RLError, RuntimeError):
    """A process that compares answers ended by itself, which says nothing about the answer."""


@attrs.frozen(kw_only=True)
class Verdict:
    """What became of one answer."""

    is_right: bool
    has_answer: bool
    """Something in the response could be read as an expression."""
    is_given_up: bool
    """It took too long, or broke the process. Such an answer is wrong."""


class JudgePool:
    """A bounded number of processes, started as they are needed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="judge")
        self._idle: queue.LifoQueue[_Judge] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._all: set[_Judge] = set()
        self._is_closed = False

    async def verdict(self, response: str, reference: str, *, cpu_s: float, wait_s: float) -> Verdict:
        """Compares a response with a reference.

        Args:
            cpu_s: of this answer; one that takes more is wrong.
            wait_s: longest wait for the verdict, the wait for a free process included.

        Raises:
            DataError: the reference cannot be read.
            ConfigError: math-verify is not installed.
            DeadlineError: no verdict in time; the answer may be right or wrong.
            JudgeError: the process was ended by somebody else.
        """
        judged = self._executor.submit(self._verdict, response, reference, cpu_s)
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.wrap_future(judged)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"waited {wait_s:g} s for one of {self._count} processes that compare answers: raise `processes` where "
                "CPU cores are left, or `wait_s`"
            ) from error

    def pids(self) -> list[int]:
        """The processes that there are."""
        with self._lock:
            return sorted(judge.pid for judge in self._all)

    def close(self) -> None:
        """Ends all processes, at work or not, and waits for their end."""
        with self._lock:
            self._is_closed = True
            judges, self._all = self._all, set()
        for judge in judges:
            judge.kill()
        # Who waits for one of them sees its end, and closes its pipes itself.
        self._executor.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().end()

    def _verdict(self, response: str, reference: str, cpu_s: float) -> Verdict:
        judge = self._taken()
        try:
            verdict = judge.verdict(response, reference, cpu_s)
        except BaseException:
            self._ended(judge)
            raise
        with self._lock:
            is_kept = not verdict.is_given_up and not self._is_closed
            if is_kept:
                self._idle.put(judge)
        if not is_kept:
            self._ended(judge)
        return verdict

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
    """This side of one process."""

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

    def verdict(self, response: str, reference: str, cpu_s: float) -> Verdict:
        """See `JudgePool.verdict`."""
        self._get_ready()
        assert self._process.stdin is not None
        request = {"response": response, "reference": reference, "cpu_s": cpu_s}
        wall_s = max(_LEAST_WALL_S, _WALL_PER_CPU * cpu_s)
        try:
            frames.send(self._process.stdin.fileno(), request)
        except BrokenPipeError:
            answer = None
        else:
            answer = self._answer(wall_s, "to compare an answer")
        if answer is None:
            return self._given_up()
        if "unreadable" in answer:
            raise DataError(f"the reference answer {reference!r:.200} cannot be read: {answer['unreadable']}")
        return Verdict(is_right=answer["is_right"], has_answer=answer["has_answer"], is_given_up=False)

    def kill(self) -> None:
        """Kills it, and waits for its end."""
        self._process.kill()
        self._process.wait(_END_S)

    def end(self) -> None:
        """Ends the process when nothing waits for its answers any more."""
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
        """The next message; None where the process has ended. Raises DeadlineError."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        waiting = select.poll()  # `select.select` knows no file above 1023
        waiting.register(fd, select.POLLIN)
        started = time.monotonic()
        if not waiting.poll(timeout_s * 1000):
            waited_s = time.monotonic() - started
            raise DeadlineError(f"waited {waited_s:.0f} s for process {self.pid} {purpose}, which used little CPU time")
        return frames.receive(fd)

    def _given_up(self) -> Verdict:
        code = self._process.wait(_END_S)
        if -code in _ANSWERS_OWN_FAULT:
            return Verdict(is_right=False, has_answer=True, is_given_up=True)
        raise JudgeError(f"the process that compares answers was ended from outside, with code {code}")


_lock = threading.Lock()
_pools: dict[int, JudgePool] = {}


def shared_pool(count: int) -> JudgePool:
    """This process's pool of so many processes."""
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
