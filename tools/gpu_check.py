"""Checks, without a GPU, the names from GPU libraries that the packages use: `make gpu-check`.

The libraries are vLLM, Megatron-Core, Megatron-Bridge and Transformer Engine. Every name from these libraries that the
packages import, read, patch, pass as a keyword or quote ("megatron.core.optimizer") is looked up in the syntax trees of
the wheels that a GPU machine installs; a group of entry points is looked up among the texts that the sources quote. The
wheels are unpacked, not installed, because CUDA builds cannot be imported here. A fix for a library's fault names the
version in which the fault was seen; that version has to be the pinned one.

    python -m tools.gpu_check WHEELS               # a folder of unpacked wheels
    python -m tools.gpu_check --fetch WHEELS       # fills the folder first, with pip
    python -m tools.gpu_check --resolve UV WHEELS  # also checks that the Dockerfile's requirements are compatible

Names that cannot be determined statically are not checked: attributes of objects without an annotated class, and
attributes of classes that inherit from any library other than these four and torch. torch is read from its
installation.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import attrs
import torch

from tools import locks

ROOT = Path(__file__).parents[1]
LIBRARIES = {
    "vllm": "vllm",
    "megatron-core": "megatron.core",
    "megatron-bridge": "megatron.bridge",
    "transformer-engine": "transformer_engine",
}
"""Distribution → its package. The GPU locks pin the versions. Transformer Engine has three distributions:
transformer-engine has the Python sources; the other two have a library for CUDA 13 and its torch bindings."""
TELLING_ATTRIBUTES = {
    "transformer_engine.pytorch.Linear": "parallel_mode",
    "transformer_engine.pytorch.LayerNormLinear": "parallel_mode",
    "transformer_engine.pytorch.GroupedLinear": "parallel_mode",
}
"""Class → the attribute by which the packages recognise it without importing it (rl_megatron/rank/shard_marks.py)."""
_SEEN_IN = re.compile(r"\b(vllm|Megatron-Core|Megatron-Bridge|Bridge) (\d+\.\d+\.\d+)\b", re.IGNORECASE)
_INSTALLED = Path(torch.__file__).parents[1]
_DOTTED = re.compile(r"\w+(?:\.\w+)*")
_FIXES = (
    "rl-rollout/src/rl_rollout/vllm/fixes.py",
    "rl-rollout/src/rl_rollout/vllm/engine_cores.py",
    "rl-megatron/src/rl_megatron/patches/*.py",
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@attrs.frozen
class Problem:
    """A name or version that would fail on a GPU machine."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


# --- the libraries --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Module:
    """A module of an unpacked wheel."""

    name: str
    path: Path
    wheels: Wheels

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.wheels.source_of(self))

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """Names defined at the module's top level, in any branch."""
        return {name: node for node in _statements(self.tree.body) for name in _defined_by(node)}

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@attrs.define(eq=False)
class Class:
    """A class of an unpacked wheel."""

    node: ast.ClassDef
    module: Module

    def members(self) -> tuple[dict[str, ast.AST], bool]:
        """Own and inherited members, and whether they are complete, that is, no base class is unknown."""
        found, are_all = {}, True
        for base in self.node.bases:
            resolved = self.module.wheels.value_of(base, self.module)
            if isinstance(resolved, Class):
                inherited, known = resolved.members()
                found |= {name: node for name, node in inherited.items() if not _is_abstract(node)}
                are_all &= known
            else:
                are_all &= isinstance(base, ast.Name) and base.id in ("object", "ABC", "Protocol", "Exception")
        for node in _statements(self.node.body):
            found |= dict.fromkeys(_defined_by(node), node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {name: node for name in _set_on_self(node) if name not in found}
        return found, are_all


class Wheels:
    """A folder of unpacked wheels."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._modules: dict[str, Module | None] = {}

    def version(self, distribution: str) -> str:
        """The version of the unpacked wheel.

        Raises SystemExit unless the folder has exactly one wheel of the distribution.
        """
        pattern = f"{distribution.replace('-', '_')}-*.dist-info"
        found = [path.name.removesuffix(".dist-info").rpartition("-")[2] for path in self._directory.glob(pattern)]
        if len(found) != 1:
            raise SystemExit(
                f"{self._directory}: got {len(found)} wheels of {distribution}, expected 1; "
                "fill an empty folder with --fetch"
            )
        return found[0]

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            base = self._place(name)
            path = next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)
            self._modules[name] = None if path is None else Module(name, path, self)
        return self._modules[name]

    def source_of(self, module: Module) -> str:
        return module.path.read_text()

    def is_known(self, name: str) -> bool:
        """Whether the libraries or torch have a module of this name, or a package without `__init__.py`."""
        return self.module(name) is not None or self._place(name).is_dir()

    def _place(self, name: str) -> Path:
        is_torch = name.partition(".")[0] == "torch"
        return (_INSTALLED if is_torch else self._directory).joinpath(*name.split("."))

    def member(self, module: str, name: str) -> Module | Class | ast.AST | None:
        """The object that `from module import name` would import; None if that fails."""
        found = self.module(module)
        if found is not None and name in found.names:
            node = found.names[name]
            if isinstance(node, ast.ClassDef):
                return Class(node, found)
            if isinstance(node, ast.ImportFrom | ast.Import):
                return self._imported(node, name, found)
            return node
        if self.is_known(f"{module}.{name}"):
            return self.module(f"{module}.{name}") or ast.Module(body=[], type_ignores=[])
        if found is not None:
            for star in (node for node in _statements(found.tree.body) if _is_star(node)):
                assert isinstance(star, ast.ImportFrom)
                reached = self.member(_absolute(star, found), name)
                if reached is not None:
                    return reached
        return None

    def quotes(self, text: str) -> bool:
        """Whether a source of the library that the text begins with quotes it."""
        sources = self._place(text.partition(".")[0]).rglob("*.py")
        return any(f'"{text}"' in path.read_text(encoding="utf-8") for path in sources)

    def named(self, path: str) -> Module | Class | ast.AST | None:
        """The object at the path of a module or of `package.module.name`; None if there is none."""
        owner, _, name = path.rpartition(".")
        return self.module(path) or (self.member(owner, name) if self.is_known(owner) else None)

    def value_of(self, node: ast.expr, module: Module) -> Module | Class | ast.AST | None:
        """The module, class or function that a name or a chain of attributes refers to; None if it is none of these."""
        if isinstance(node, ast.Subscript):
            return self.value_of(node.value, module)
        if isinstance(node, ast.Name):
            return self.member(module.name, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value, module)
            return self.member(owner.name, node.attr) if isinstance(owner, Module) else None
        return None

    def _imported(
        self, node: ast.ImportFrom | ast.Import, name: str, module: Module
    ) -> Module | Class | ast.AST | None:
        """The object that an import statement binds to the name; the statement itself for imports from other
        libraries."""
        (alias,) = [alias for alias in node.names if name in (alias.asname, alias.name, alias.name.partition(".")[0])]
        if isinstance(node, ast.Import):
            return self.module(alias.name) or node
        source = _absolute(node, module)
        if source == module.name:  # `from package import part` in the package itself
            return self.module(f"{source}.{alias.name}")
        return self.member(source, alias.name) if self.is_known(source) else node


# --- the packages ---------------------------------------------------------------------------------------------------


@attrs.define
class Use:
    """The names that one file of the packages uses, checked against the wheels."""

    path: Path
    wheels: Wheels
    problems: list[Problem] = attrs.field(factory=list)
    num_checked: int = 0
    _bound: dict[str, Module | Class | ast.AST] = attrs.field(factory=dict)
    """Name in the file → the object of the libraries that it refers to."""

    def check(self) -> None:
        tree = ast.parse(self.path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._bind(node)
        instances = self._instances(tree)
        groups = {id(part) for node in ast.walk(tree) if _reads_entry_points(node) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self._check_member(node, self._value_of(node.value), node.attr)
                self._check_member(node, instances.get(_own_attribute(node.value)), node.attr)
            elif isinstance(node, ast.Call):
                self._check_call(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._check_quoted(node, node.value, is_group=id(node) in groups)

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            source = alias.name if isinstance(node, ast.Import) else node.module or ""
            if not _is_of_libraries(source) or (isinstance(node, ast.ImportFrom) and node.level):
                continue
            self.num_checked += 1
            if isinstance(node, ast.Import):
                found: Module | Class | ast.AST | None = self.wheels.module(alias.name)
                bound = alias.asname
            else:
                found = self.wheels.member(source, alias.name)
                bound = alias.asname or alias.name
            if found is None:
                self._say(node, f"{source} has no {alias.name}" if source != alias.name else f"there is no {source}")
            elif bound is not None:
                self._bound[bound] = found

    def _instances(self, tree: ast.Module) -> dict[str | None, Class]:
        """Returns attributes of self that hold a parameter whose annotation is a class of the libraries. Also checks
        the attributes of these parameters."""
        found: dict[str | None, Class] = {}
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            classes = {a.arg: self._value_of(a.annotation) for a in arguments if a.annotation is not None}
            given = {name: value for name, value in classes.items() if isinstance(value, Class)}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    self._check_member(node, given.get(node.value.id), node.attr)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in given:
                    found |= dict.fromkeys(map(_own_attribute, node.targets), given[node.value.id])
        found.pop(None, None)
        return found

    def _value_of(self, node: ast.expr) -> Module | Class | ast.AST | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            name = node.args[0]
            return self.wheels.module(str(name.value)) if isinstance(name, ast.Constant) else None
        if isinstance(node, ast.Attribute):
            owner = self._value_of(node.value)
            return self.wheels.member(owner.name, node.attr) if isinstance(owner, Module) else None
        return None

    def _check_member(self, node: ast.AST, owner: Module | Class | ast.AST | None, name: str) -> None:
        if isinstance(owner, Module):
            self.num_checked += 1
            if self.wheels.member(owner.name, name) is None:
                self._say(node, f"{owner.name} has no {name}")
        elif isinstance(owner, Class):
            members, are_all = owner.members()
            self.num_checked += are_all or name in members
            if are_all and name not in members and not name.startswith("__"):
                self._say(node, f"{owner.module.name}.{owner.node.name} has no {name}")

    def _check_call(self, node: ast.Call) -> None:
        function = node.func.id if isinstance(node.func, ast.Name) else None
        # Quoted names: getattr(owner, "name"), replace(owner, "name", new).
        if function in ("getattr", "setattr", "replace") and len(node.args) > 1:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._check_member(node, self._value_of(owner), name.value)
        called = self._value_of(node.func)
        given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        accepted = _keywords_of(called)
        if accepted is not None:
            self.num_checked += len(given)
            for name in given:
                if name not in accepted:
                    self._say(node, f"{ast.unparse(node.func)}() takes no {name}")

    def _check_quoted(self, node: ast.AST, text: str, *, is_group: bool) -> None:
        if _is_of_libraries(text) and _DOTTED.fullmatch(text):
            self.num_checked += 1
            if not (self.wheels.quotes(text) if is_group else self.wheels.named(text)):
                self._say(node, f"there is no {text}")

    def _say(self, node: ast.AST, message: str) -> None:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        self.problems.append(Problem(f"{place}:{getattr(node, 'lineno', 0)}", message))


def check(wheels: Wheels, files: Sequence[Path]) -> tuple[list[Problem], int]:
    """The problems with names in the files, and the number of names that were looked up in the wheels."""
    problems, num_checked = [], 0
    for path in files:
        use = Use(path, wheels)
        use.check()
        problems += use.problems
        num_checked += use.num_checked
    for path, attribute in TELLING_ATTRIBUTES.items():
        found = wheels.named(path)
        num_checked += 1
        if not isinstance(found, Class) or attribute not in found.members()[0]:
            problems.append(Problem("TELLING_ATTRIBUTES", f"{path} has no {attribute}"))
    return problems, num_checked


def check_fixes(files: Sequence[Path], versions: dict[str, str]) -> list[Problem]:
    """A problem for each fix of a fault that was seen in another version than the pinned one."""
    problems = []
    for path in files:
        for library, seen in sorted(set(_SEEN_IN.findall(path.read_text()))):
            pinned = versions["megatron-bridge" if library.lower() == "bridge" else library.lower()]
            if seen != pinned:
                problems.append(
                    Problem(
                        path.name,
                        f"fixes a fault of {library} {seen}, but {pinned} is pinned; check that {pinned} still has it",
                    )
                )
    return problems


# --- syntax trees ---------------------------------------------------------------------------------------------------


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, including those inside branches, which define names at the same level."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                yield from _statements(getattr(node, part, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _defined_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own_attribute(node) is not None:
            yield node.attr


def _keywords_of(called: Module | Class | ast.AST | None) -> set[str] | None:
    """The keywords that a call accepts; None if it accepts any, or if they are unknown."""
    if isinstance(called, Class):
        members, are_all = called.members()
        start = members.get("__init__")
        if isinstance(start, ast.FunctionDef):
            return _keywords_of(start)
        fields = {name for name, node in members.items() if isinstance(node, ast.AnnAssign)}
        return fields if are_all and fields else None
    if isinstance(called, ast.FunctionDef | ast.AsyncFunctionDef):
        if called.args.kwarg is not None or called.decorator_list:
            return None
        return {argument.arg for argument in (*called.args.args, *called.args.kwonlyargs)}
    return None


def _own_attribute(node: ast.expr) -> str | None:
    """The attribute name in `self.name`; None for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def _reads_entry_points(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "entry_points"


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    package = module.package.split(".")
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_abstract(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        "abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)


def _is_of_libraries(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in LIBRARIES.values())


# --- the command ----------------------------------------------------------------------------------------------------


def pinned_versions() -> dict[str, str]:
    """The libraries' versions in the GPU locks, which the Dockerfile installs."""
    pins = [pin for lock in (locks.GPU_LOCK, locks.KERNELS_LOCK) for pin in locks.read_pins((ROOT / lock).read_text())]
    pinned = {pin.name: pin.version for pin in pins}
    return {distribution: pinned[distribution] for distribution in LIBRARIES}


def fetch(directory: Path) -> None:
    """Unpacks the sources of the pinned GPU wheels for Linux into `directory`."""
    with tempfile.TemporaryDirectory() as downloads:
        wanted = [f"{name}=={version}" for name, version in pinned_versions().items()]
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
        command += ["--platform=manylinux_2_28_x86_64", f"--dest={downloads}", *wanted]
        subprocess.run([sys.executable, *command], check=True)
        for wheel in Path(downloads).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(directory, [name for name in packed.namelist() if name.endswith((".py", "METADATA"))])


def installed_by_dockerfile() -> list[str]:
    """The requirements in the Dockerfile's `pip install` lines: the pins of the lock files, and the folders of our
    packages, with their extras. Megatron-Bridge is left out, because it is installed without its declared
    dependencies."""
    extras = {requirement.partition("[")[0]: requirement for requirement in locks.GPU_PACKAGES}
    requirements = []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        words = shlex.split(line)
        if words[:3] != ["RUN", "pip", "install"]:
            continue
        folders = [word for word in words if word.startswith("packages/")]
        requirements += [locks.as_folder(extras[folder.removeprefix("packages/")]) for folder in folders]
        for lock in (word for word in words if word.endswith(".lock")):
            pins = locks.read_pins((ROOT / lock).read_text())
            requirements += [pin.requirement for pin in pins if pin.name != locks.WITHOUT_DEPENDENCIES]
    return requirements


def resolve(uv: Path) -> Problem | None:
    """A problem if the Dockerfile's requirements are incompatible on Linux with CUDA 13, or need a package that its
    locks lack. Nothing is built or installed."""
    command = [str(uv.absolute()), "pip", "compile", "--no-config", "--quiet", "--python-version=3.12", "-"]
    command += ["--python-platform=x86_64-manylinux_2_28"]
    # UV_FIND_LINKS is removed, because a site's own wheels are for machines without GPUs.
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as never:
        never.write(locks.NOT_WITH_CUDA_13)
        never.flush()
        command += ["--overrides", never.name]
        asked = "\n".join(installed_by_dockerfile())
        answer = subprocess.run(
            command, input=asked, env=environment, cwd="/", capture_output=True, text=True, check=False
        )
    if answer.returncode:
        return Problem("Dockerfile", f"the packages that it installs do not resolve:\n{answer.stderr}")
    resolved = {line.partition(" ")[0] for line in answer.stdout.splitlines() if "==" in line}
    pinned = {requirement.partition(" ")[0] for requirement in installed_by_dockerfile()}
    if forgotten := sorted(resolved - pinned):
        return Problem("Dockerfile", f"its locks lack {', '.join(forgotten)}; run `make constraints`")
    print(f"the Dockerfile's {len(resolved)} packages are compatible on Linux with CUDA 13")
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("wheels", type=Path, help="folder of unpacked wheels")
    parser.add_argument("--fetch", action="store_true", help="fill the folder first, with pip")
    parser.add_argument(
        "--resolve", type=Path, metavar="UV", help="check that the Dockerfile's packages are compatible"
    )
    given = parser.parse_args(arguments)
    if given.fetch:
        fetch(given.wheels)
    wheels = Wheels(given.wheels)
    versions = {distribution: wheels.version(distribution) for distribution in LIBRARIES}
    packages = ROOT / "packages"
    problems, num_checked = check(wheels, sorted(packages.glob("*/src/**/*.py")))
    fixes = [file for pattern in _FIXES for file in packages.glob(pattern)]
    problems += check_fixes(fixes, versions)
    if given.resolve and (problem := resolve(given.resolve)) is not None:
        problems.append(problem)
    for problem in problems:
        print(problem, file=sys.stderr)
    against = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{num_checked} names looked up in {against}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
