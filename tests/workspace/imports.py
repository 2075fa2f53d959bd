"""The imports in source files, read from the syntax trees without executing any code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import attrs

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "rl_core",
    "rl_deepspeed",
    "rl_environments",
    "rl_examples",
    "rl_fsdp",
    "rl_megatron",
    "rl_rollout",
    "rl_transformers",
)

When = Literal["import", "call", "typing"]


@attrs.frozen(kw_only=True)
class Import:
    """One name in an import statement."""

    importer: str
    """Dotted name of the module that imports."""
    imported: str
    """Absolute dotted name; for `from package import name` it is `package.name`, since that may be a module."""
    when: When
    """On import of the module, on a function call, or for type checkers only."""
    place: str
    """`file:line`, for messages."""

    def __str__(self) -> str:
        return f"{self.place} imports {self.imported}"


def source_root(package: str) -> Path:
    """The folder that goes on `sys.path` for `package`, e.g. packages/rl-core/src."""
    return ROOT / "packages" / package.replace("_", "-") / "src"


@cache
def imports_of(source: Path) -> list[Import]:
    """Every import below a source root, including those inside functions."""
    return [found for path in sorted(source.rglob("*.py")) for found in _imports_of_file(path, source)]


def module_name(path: Path, source: Path) -> str:
    """Dotted name of a file below a source root."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _imports_of_file(path: Path, source: Path) -> Iterator[Import]:
    importer = module_name(path, source)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node, when in _walk(ast.parse(path.read_text(encoding="utf-8")), "import"):
        place = f"{path.relative_to(source)}:{node.lineno}"
        for imported in _names(node, package):
            yield Import(importer=importer, imported=imported, when=when, place=place)


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, "call" if when == "import" else when)
        else:
            yield from _walk(child, when)


def _names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]
