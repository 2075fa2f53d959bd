"""Runs the untrusted program as a script; or runs it as a module, then calls one of its functions or runs a check.

This code shares the process with the program, so the program can lie about its own results, and can deceive a check
that runs here. Therefore the expected results of scripts and functions never enter this process.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any

_NAME = "program.py"
_MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator io
sys json builtins typing"""
"""In the order of LiveCodeBench's grader: of equal names, the last counts."""
_RECURSION_LIMIT = 50_000


def run(program: str, test: dict[str, Any], record_fd: int, token: str) -> int:
    """Runs one test; returns the exit code.

    Args:
        record_fd: descriptor for the record, which holds the function's result, or says that the check passed or that
            the program has a syntax error.
        token: secret in every record, by which false records are recognised. The program can learn the token only by
            searching the memory of this process.
    """
    _open_standard_streams()

    def record(**fields: Any) -> None:
        os.write(record_fd, json.dumps({"token": token, **fields}).encode())

    try:
        return _exit_code(program, test, record)
    finally:
        _end_quietly()


def imported() -> dict[str, Any]:
    """Returns what the names of the standard library's common modules mean; see `Test.has_imports`."""
    names: dict[str, Any] = {}
    modules = _MODULES.split()
    for module in modules:
        exec(f"from {module} import *", names)
    exec(f"import {', '.join(modules)}", names)
    return {name: value for name, value in names.items() if not name.startswith("__")}


def _exit_code(program: str, test: dict[str, Any], record: Any) -> int:
    try:
        code = compile(program, _NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        traceback.print_exc(limit=0)
        record(end="syntax_error")
        return 1
    linecache.cache[_NAME] = (len(program), None, program.splitlines(keepends=True), _NAME)
    is_script = test["function"] is None and test["check"] is None
    module = types.ModuleType("__main__" if is_script else "solution")
    sys.modules[module.__name__] = module
    sys.argv = [_NAME]
    given = imported() if test["has_imports"] else {}
    module.__dict__.update(given)
    if given:
        sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        exec(code, module.__dict__)
        if test["function"] is not None:
            value = _function(module, test["function"], given)(*test["arguments"])
            record(value=value)
        elif test["check"] is not None:
            exec(compile(test["check"], "check.py", "exec", dont_inherit=True), module.__dict__)
            record()
        # Waits for the program's non-daemon threads, as the interpreter does at its end.
        getattr(threading, "_shutdown", lambda: None)()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Omits this function's own frame.
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _function(module: types.ModuleType, name: str, given: dict[str, Any]) -> Any:
    """Returns the program's function, which is not one of the given names: `operator` has a function `add` too."""
    if hasattr(module, name) and getattr(module, name) is not given.get(name):
        return getattr(module, name)
    solution = getattr(module, "Solution", None)
    if solution is None:
        raise NameError(f"the program defines neither {name} nor a class Solution")
    return getattr(solution(), name)


def _open_standard_streams() -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(fd, "w" if fd else "r", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end_quietly() -> None:
    """Runs exit functions and flushes, as the interpreter does at its end; `os._exit`, which follows, does neither."""
    run_exit_functions = getattr(atexit, "_run_exitfuncs", None)
    for finish in (run_exit_functions, sys.stdout.flush, sys.stderr.flush):
        try:
            if finish is not None:
                finish()
        except BaseException:  # the program may have closed or replaced them
            continue
