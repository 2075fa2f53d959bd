"""Reward functions that misbehave if the row's column `what` says so, each in its own way."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import threading
import time
from typing import Any

_PYTHON = ctypes.PyDLL(None)
"""The C library, called without releasing the interpreter."""


def holds(completions: list[Any], what: list[str], **_: Any) -> list[float | None]:
    """Holds the interpreter for an hour, as a regular expression that backtracks does."""
    if what[0] == "hold":
        until = time.monotonic() + 3600
        while time.monotonic() < until:
            _PYTHON.sleep(3600)  # a signal ends a sleep early
    return [1.0]


def odd(completions: list[Any], what: list[str], **_: Any) -> list[Any]:
    match what[0]:
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "print":
            while True:
                print("x" * 100)
                time.sleep(0.001)
        case "fork":
            pid = os.fork()
            if pid == 0:
                time.sleep(3600)
            return [float(pid > 0)]
        case "sleep":
            time.sleep(0.2)
        case "nan":
            return [float("nan")]
        case "text":
            return ["good"]
        case "none":
            return [None]
        case "raise":
            raise SystemExit(2)
    return [1.0]


async def slow(completions: list[Any], what: list[str], **_: Any) -> list[float]:
    if what[0] == "never":
        await asyncio.Event().wait()
    await asyncio.sleep(0.2)
    return [1.0]


def hashes(completions: list[Any], **_: Any) -> list[float]:
    return [float(hash("a text") % 1_000_003)]


def starts_another(completions: list[Any], **_: Any) -> list[float]:
    """Leaves a process running. Returns its number."""
    return [float(subprocess.Popen(["sleep", "3600"]).pid)]


def where(completions: list[Any], **_: Any) -> list[float]:
    return [float(os.getpid())]


def is_in_main_process(completions: list[Any], parent: list[int], **_: Any) -> list[float]:
    return [float(os.getpid() == parent[0] and threading.current_thread() is not threading.main_thread())]
