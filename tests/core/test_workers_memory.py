"""A process that computes on a CPU keeps freed memory, unless the user configures the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import torch
from rl_core.workers.memory import keep_freed_memory

keep_freed_memory() if "keep" in sys.argv else None

def steps(count):
    for _ in range(count):
        tensors = [torch.ones(30 << 20) for _ in range(3)]  # 120 MiB each
        del tensors

def main():
    steps(10)  # the heap settles within six steps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(5)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

# A rank in the controller's process computes in a thread, too.
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


def faults(*arguments: str, **environment: str) -> int:
    """Minor page faults in five steps, each of which allocates and frees 360 MiB."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the allocator of glibc")
def test_freed_memory_is_used_again_without_page_faults():
    given_back = faults()
    assert given_back > 400_000, "the control must fault on each 4 KiB page of 1.8 GiB"
    assert faults("keep") < given_back / 10
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > given_back / 2, "the user's setting must win"
