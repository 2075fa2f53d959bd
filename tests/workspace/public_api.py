"""Lists every public name of the workspace, as `public_api.txt` keeps it. `make public-api` writes that file again.

Public is what a user imports as `package` or `package.module`: the names in `__all__`, or without one those the module
defines without a leading underscore. Modules further down are reached through their package's table of contents.
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


def public_modules(package: str) -> list[str]:
    """The package and its direct modules, `_private` ones left out."""
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


def entry_points(package: str) -> list[str]:
    """`group: name = value` of every plug-in, and the commands, that a package installs."""
    project = tomllib.loads((source_root(package).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"command": project.get("scripts", {}), **project.get("entry-points", {})}
    return sorted(f"{group}: {name} = {value}" for group, entries in groups.items() for name, value in entries.items())


def listing() -> str:
    """The whole text of `public_api.txt`."""
    sections = []
    for package in PACKAGES:
        for name in public_modules(package):
            sections.append([name, *public_names(importlib.import_module(name))])
        if plugins := entry_points(package):
            sections.append([f"plug-ins of {package.replace('_', '-')}", *plugins])
    return "\n\n".join("\n    ".join(section) for section in sections) + "\n"


if __name__ == "__main__":
    LISTING.write_text(listing(), encoding="utf-8")
    sys.stdout.write(f"wrote {LISTING}\n")
