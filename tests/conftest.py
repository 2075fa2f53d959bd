"""Settings of every test. Environment variables are set before torch or Ray is imported."""

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
# Tests work without the network: they create the models and data sets that they need.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests share a cache of model proofs, and no test writes into the home directory.
os.environ.setdefault("RL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "rl"))
# Otherwise Ray switches token authentication on and writes a token into the home directory.
os.environ["RAY_AUTH_MODE"] = "disabled"
# With this value, Ray listens only on loopback, on Linux too.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# Without this, garbage collection in a forked process writes to all objects inherited from the parent, so their memory
# is copied. This took a third of the CPU time of tests with several ranks.
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
"""Tests that start their own ranks and servers; they are one lane of `make test`, and all other tests are the other."""


class Lanes(LoadScopeScheduling):
    """Two groups of tests, each in one process, because servers take long to start and use a whole core meanwhile."""

    def _split_scope(self, nodeid: str) -> str:
        return "own servers" if nodeid.startswith(OWN_SERVERS) else "shared servers"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    """The scheduler of `--dist=loadscope`. `--dist=loadgroup` does not work: xdist 3.8 adds a group's name to the test
    id, which it cannot change under pytest 9.2, so groups are silently ignored and each process starts all servers."""
    return Lanes(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_finish() -> None:
    """Freezes modules and tests, so that garbage collection skips them: they live until the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Unfreezes all objects; otherwise libraries that count their objects at exit report leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` if torch finds no GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"needs a GPU: torch {torch.__version__} finds no CUDA device")


def pytest_report_header() -> str:
    """The CPU and its instruction sets, on which the numbers of a run depend."""
    try:
        cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    except (OSError, ValueError):
        return f"cpu: {platform.processor()}"
    facts = {name.strip(): value.strip() for name, value in cpu.items()}
    sets = [
        flag for flag in facts.get("flags", "").split() if flag.startswith(("avx2", "avx512_bf16", "avx512f", "amx"))
    ]
    return f"cpu: {facts.get('model name', 'unknown')} × {os.cpu_count()}, {' '.join(sets)}"
