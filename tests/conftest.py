"""Settings and hooks for all tests; environment variables are set before torch or Ray is imported."""

from __future__ import annotations

import gc
import os
import platform
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# Tiny models run up to 15 times slower when two threads share a busy core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests load nothing from the Hugging Face Hub; they create the models and data sets that they need.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests share this cache of model proofs instead of writing into the home folder.
os.environ.setdefault("RL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "rl"))
# Otherwise Ray enables token authentication and writes a token into the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
# With this setting Ray listens on loopback only, also on Linux.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

# A garbage collection in a forked process would write to all inherited objects and so copy them. These copies took
# a third of the processor time of tests with several ranks.
os.register_at_fork(after_in_child=gc.freeze)

# The same examples on every machine and in every run; no deadline, because a shared machine may pause for seconds.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("reproducible")


OWN_SERVERS = (
    "tests/examples/test_killed_ranks.py",
    "tests/rollout/vllm/test_faults.py",
    "tests/rollout/vllm/test_recipes.py",
    "tests/rollout/vllm/test_serve.py",
    "tests/rollout/vllm/test_split_engines.py",
    "tests/third_party_backend",
)
"""Tests that start their own ranks and servers: one lane of `make test`. The other lane's tests share servers."""

LONG = (
    "tests/examples/test_fuzzed_configurations.py",
    "tests/examples/test_large_recipes.py",
    "tests/real_model",
    "tests/workspace/test_wheels.py",
)
"""Tests that run first, because they take longest: if they ran last, one core would be busy with them while the others
are idle."""


class Lanes(LoadScopeScheduling):
    """Two lanes, each in one process. Each test server takes long to start and keeps a core busy, so few start at
    once."""

    def _split_scope(self, nodeid: str) -> str:
        return "own servers" if nodeid.startswith(OWN_SERVERS) else "shared servers"


@pytest.fixture(scope="session", autouse=True)
def forked_proofs() -> Iterator[None]:
    """Uses forked processes for the model proofs that this process requests. Commands that tests start use a new
    interpreter for each proof, as they do when a user starts them."""
    from tests import forked_proofs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked_proofs.model_proof, "run_interpreter", forked_proofs.run_forked)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs except with `-m gpu` or `-m "gpu and …"`: other tests expect results computed on the CPU."""
    if not re.fullmatch("gpu( and .*)?", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    """Uses the lanes for `--dist=loadscope`.

    `--dist=loadgroup` does not work: it needs to append the group to each test's id, which xdist 3.8 cannot do under
    pytest 9.2. xdist then ignores the groups without a message, and every process starts all servers.
    """
    return Lanes(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If a module defines `IN_BFLOAT16`, adds the mark `parity` to the bfloat16 checks of variants that are not in it.
    On a `parity_only` variant, the bfloat16 check takes as long as all other checks together. Puts LONG tests first.
    """
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname.startswith("test_bfloat16_errs"):
            measured = getattr(item.module, "IN_BFLOAT16", None)
            if measured is not None and item.callspec.params["variant"] not in measured:
                item.add_marker("parity")
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are imported and tests collected, which takes a sixth less time. Afterwards
    excludes all modules and tests from garbage collection, since they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Undoes the freeze: otherwise libraries that count their objects at exit report leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `gpu` on a machine without a CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"needs a GPU, which tests see only with -m gpu: torch {torch.__version__} finds no device")


def pytest_report_header() -> str:
    """The CPU and its instruction sets, on which the numerical results of a run depend."""
    try:
        cpu = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    except (OSError, ValueError):
        return f"cpu: {platform.processor()}"
    facts = {name.strip(): value.strip() for name, value in cpu.items()}
    sets = [
        flag for flag in facts.get("flags", "").split() if flag.startswith(("avx2", "avx512_bf16", "avx512f", "amx"))
    ]
    return f"cpu: {facts.get('model name', 'unknown')} × {os.cpu_count()}, {' '.join(sets)}"
