"""Lists every public name of the workspace for `public_api.txt`; `make public-api` regenerates that file.

Public is what a user imports as `package` or `package.module`: the names in `__all__`, or, for a module without it, the
names it defines without a leading underscore. Names of deeper modules count only if one of these
modules lists them in `__all__`.

The modules in SIGNED are contracts that other packages build on. For their names the listing also has fields with
defaults, parameters of methods and functions, and values.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from tests.workspace.imports import PACKAGES, module_name, source_root

LISTING = Path(__file__).with_name("public_api.txt")
SIGNED = ("rl_core.interfaces", "rl_core.testing", "rl_transformers.testing")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def public_modules(package: str) -> list[str]:
    """The package and its direct modules, without those that begin with an underscore."""
    source = source_root(package)
    paths = [*source.glob(f"{package}/*.py"), *source.glob(f"{package}/*/__init__.py")]
    names = {module_name(path, source) for path in paths}
    return sorted(name for name in names if not name.rpartition(".")[2].startswith("_"))


def public_names(module: ModuleType) -> list[str]:
    """Names in `__all__`, else those defined at the top level of the module's file."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    assert module.__file__ is not None
    names = set()
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return sorted(name for name in names if not name.startswith("_"))


def definitions(package: ModuleType) -> dict[str, Definition]:
    """Top-level definitions in the modules of a package, by name."""
    assert package.__file__ is not None
    found: dict[str, Definition] = {}
    for path in sorted(Path(package.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found[name] = node
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    found[name] = node
    return found


def signed(name: str, node: Definition) -> list[str]:
    """The lines of a public name with everything that its users rely on."""
    match node:
        case ast.ClassDef(bases=bases):
            above = ", ".join(map(ast.unparse, bases))
            return [f"{name}({above})" if above else name, *(f"    {line}" for line in map(member, node.body) if line)]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [signature(node)]
        case ast.AnnAssign(value=ast.Dict(keys=keys, values=values)):
            pairs = zip(keys, values, strict=True)
            return [name, *(f"    {key and ast.unparse(key)}: {ast.unparse(value)}" for key, value in pairs)]
    return [ast.unparse(node)]


def member(node: ast.stmt) -> str | None:
    """A field, property or method of a class; None for private ones and for a suite's checks."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            is_public = name in ("__init__", "__call__") or not name.startswith(("_", "test_"))
            decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
            return f"{decorators}{signature(node)}" if is_public else None
        case ast.AnnAssign(target=ast.Name(id=name)):
            return None if name.startswith("_") else ast.unparse(node)
    return None


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's name, parameters and return type."""
    asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{asynchronous}{node.name}({ast.unparse(node.args)}){returns}"


def contents(module: ModuleType) -> list[str]:
    """The public names of a module; for a module in SIGNED, with their signatures."""
    names = public_names(module)
    if module.__name__ not in SIGNED:
        return names
    defined = definitions(module)
    return [line for name in names for line in signed(name, defined[name])]


def entry_points(package: str) -> list[str]:
    """`group: name = value` for each plug-in and command that a package installs."""
    project = tomllib.loads((source_root(package).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"command": project.get("scripts", {}), **project.get("entry-points", {})}
    return sorted(f"{group}: {name} = {value}" for group, entries in groups.items() for name, value in entries.items())


def listing() -> str:
    """The whole text of `public_api.txt`."""
    sections = []
    for package in PACKAGES:
        for name in public_modules(package):
            sections.append([name, *contents(importlib.import_module(name))])
        if plugins := entry_points(package):
            sections.append([f"plug-ins of {package.replace('_', '-')}", *plugins])
    return "\n\n".join("\n    ".join(section) for section in sections) + "\n"


if __name__ == "__main__":
    LISTING.write_text(listing(), encoding="utf-8")
    sys.stdout.write(f"wrote {LISTING}\n")
