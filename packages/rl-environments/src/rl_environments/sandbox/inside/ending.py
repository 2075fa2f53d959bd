"""Ends what a test has started, all of it, before the next one begins."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from rl_environments.sandbox.inside import confinement
from rl_environments.sandbox.inside.processes import children_below

_KILL_S = 30.0
_RETRY_S = 0.0005


def end_all(box: dict[str, Any], pid: int = -1) -> tuple[int, float] | None:
    """Ends and reaps everything that the supervisor's tests started; the status and CPU time of `pid`, if it was there.

    Raises TimeoutError for processes that SIGKILL does not end, such as those that wait for a broken disk.
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
                left = children_below(os.getpid())
                raise TimeoutError(f"waited {_KILL_S:g} s after SIGKILL for the end of the processes {left}")
            time.sleep(_RETRY_S)


def _kill_all(box: dict[str, Any]) -> None:
    """SIGKILL to everything that may have come from a test, at one stroke where the kernel can."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif box["mechanism"] == "landlock":
        _kill_user(box["uid"], box["ending_uid"])
    else:
        for pid in children_below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _kill_user(uid: int, ending_uid: int) -> None:
    """SIGKILL to all processes of a user: the kernel sends it to all at once, so none can fork away."""
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
