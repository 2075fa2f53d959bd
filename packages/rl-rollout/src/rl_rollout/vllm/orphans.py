"""Makes the processes of an engine end, and free their memory, when the server that started them ends for any reason.

vLLM's workers watch their engine's core, but the core does not watch its parent: after kill -9 of a server, its core
kept running and, on a GPU, kept its memory. vLLM calls `end_with_parent` in each of its processes, through the entry
point group `vllm.general_plugins`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.process import BaseProcess

from rl_rollout.vllm import fixes

_MARK = "RL_ROLLOUT_SERVER"
"""Environment variable that marks the engine processes of this package's servers; `end_with_parent` does nothing in
other programs that use vLLM on this machine."""


def mark() -> None:
    """After this call, the end of this process also ends the vLLM processes that it starts."""
    os.environ[_MARK] = "1"


def end_with_parent() -> None:
    """In a process that was started after `mark`: applies the fixes that vLLM's processes need, and ends this process
    when its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None and _MARK in os.environ:
        fixes.unlink_message_queues()
        fixes.lock_progress_bars_by_threads()
        fixes.unlink_shared_memory_on_cpu()
        fixes.allow_sampling_masks_on_cpu()
        threading.Thread(target=_follow, args=(parent,), name="rl-rollout-parent", daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    print(f"process {os.getpid()} ends: process {parent.pid}, which started it, has ended", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
