"""What every test runs under. Set before torch or Ray is imported."""

from __future__ import annotations

import gc
import os
import platform
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# Tiny models run up to 15 times slower when two threads share a busy core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No test reads the network: a model or data set that is not here is made here.
os.environ["HF_HUB_OFFLINE"] = "1"
# What was proved of a model holds for the next test, and no test writes into the home folder.
os.environ.setdefault("RL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "rl"))
# Ray otherwise switches token authentication on and writes a token into the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ray then listens on loopback alone, on Linux too.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# A garbage collection in a forked process would write to, and so copy, all objects of the process that it comes from:
# a third of the processor time of tests with several ranks.
os.register_at_fork(after_in_child=gc.freeze)

# The same examples on every machine and in every run; no deadline, because a shared machine may pause for seconds.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("reproducible")


OWN_SERVERS = (
    "tests/examples/test_killed_ranks.py",
    "tests/rollout/vllm/test_faults.py",
    "tests/rollout/vllm/test_recipes.py",
    "tests/rollout/vllm/test_split_engines.py",
    "tests/third_party_backend",
)
"""Tests that start ranks and servers of their own: one lane of `make test`. The other is those that share servers."""


class Lanes(LoadScopeScheduling):
    """Two lanes, each in one process: servers take long to start, and one core at that."""

    def _split_scope(self, nodeid: str) -> str:
        return "own servers" if nodeid.startswith(OWN_SERVERS) else "shared servers"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    """For `--dist=loadscope`. (Groups of `--dist=loadgroup` are part of a test's id, which xdist 3.8 cannot change
    under pytest 9.2: without a word, every process started all servers.)"""
    return Lanes(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    """Modules and tests live until the end, so no collection needs to look at them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Otherwise libraries that count their objects at exit report leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where there is no GPU, a test that needs one is skipped, and says so."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"needs a GPU: torch {torch.__version__} finds no CUDA device")


def pytest_report_header() -> str:
    """What the numbers of a run depend on."""
    try:
        cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    except (OSError, ValueError):
        return f"cpu: {platform.processor()}"
    facts = {name.strip(): value.strip() for name, value in cpu.items()}
    sets = [
        flag for flag in facts.get("flags", "").split() if flag.startswith(("avx2", "avx512_bf16", "avx512f", "amx"))
    ]
    return f"cpu: {facts.get('model name', 'unknown')} × {os.cpu_count()}, {' '.join(sets)}"
