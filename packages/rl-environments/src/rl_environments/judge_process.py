"""Compares mathematical answers with math-verify. `judge_pool` starts this module as a process.

math-verify implements its timeout with an alarm signal, which works only in the main thread and cannot interrupt native
code. This process switches that timeout off; instead, the kernel ends the process when an answer has used up its CPU
time. A wall-clock limit would make right answers count as wrong on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import Any

from rl_environments.sandbox.inside import frames

_ADDRESS_SPACE_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads requests from stdin and answers each on stdout, until stdin ends."""
    answers_fd = os.dup(1)
    _become_quiet()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    try:
        import math_verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        frames.send(answers_fd, {"missing": str(error)})
        return
    # The parent may ignore SIGPROF, and a process inherits which signals are ignored.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    frames.send(answers_fd, {"ready": True})
    while (request := frames.receive(0)) is not None:
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        verdict = _verdict(math_verify, request["response"], request["reference"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        with contextlib.suppress(BrokenPipeError):
            frames.send(answers_fd, verdict)


def _verdict(math_verify: Any, response: str, reference: str) -> dict[str, Any]:
    """Returns the message that says whether the response's answer equals the reference. An answer counts as wrong if
    comparing it raises, for example because it needs too much memory or recursion depth."""
    try:
        expected = math_verify.parse(_marked(reference), parsing_timeout=None)
    except Exception as error:
        return {"unreadable": repr(error)[:200]}
    if not expected:
        return {"unreadable": "math-verify finds no expression in it"}
    try:
        found = math_verify.parse(response, parsing_timeout=None)
        is_right = bool(found) and bool(math_verify.verify(expected, found, timeout_seconds=None))
        return {"is_right": is_right, "has_answer": bool(found)}
    except (Exception, MemoryError, RecursionError) as error:
        return {"is_right": False, "has_answer": True, "error": repr(error)[:200]}


def _marked(reference: str) -> str:
    """Marks the reference as LaTeX if it is not marked yet, because math-verify does not find unmarked LaTeX."""
    is_marked = "$" in reference or "\\boxed" in reference or "\\(" in reference or "\\[" in reference
    return reference if is_marked else f"\\boxed{{{reference}}}"


def _become_quiet() -> None:
    """Sends library output and warnings to /dev/null, so that the requester gets only answers."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


if __name__ == "__main__":
    main()
