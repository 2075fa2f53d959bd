"""Ends all processes of a test, so that none runs during the next test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from rl_environments.sandbox.inside import confinement
from rl_environments.sandbox.inside.processes import descendants_of

_KILL_S = 30.0
_RETRY_S = 0.0005


def end_all(box: dict[str, Any], pid: int = -1) -> tuple[int, float] | None:
    """Ends and reaps all processes that the supervisor's tests started; returns status and CPU time of `pid` if it was
    one of them.

    Raises TimeoutError if SIGKILL does not end a process, for example one that waits for a broken disk.
    """
    found = None
    deadline = time.monotonic() + _KILL_S
    while True:
        _kill_all(box)
        try:
            ended, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == pid:
            found = (status, usage.ru_utime + usage.ru_stime)
        if not ended:
            if time.monotonic() > deadline:
                left = descendants_of(os.getpid())
                raise TimeoutError(f"waited {_KILL_S:g} s after SIGKILL for the processes {left} to end")
            time.sleep(_RETRY_S)


def _kill_all(box: dict[str, Any]) -> None:
    """Sends SIGKILL to all processes that a test may have started, atomically if the mechanism allows it."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif box["mechanism"] == "landlock":
        _kill_user(box["uid"], box["ending_uid"])
    else:
        for pid in descendants_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill_user(uid: int, ending_uid: int) -> None:
    """Sends SIGKILL to all processes of a user; the kernel does so atomically, so none can escape by forking."""
    pid = os.fork()
    if pid == 0:
        try:
            confinement.act_as_user(uid, ending_uid)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
