"""Prints how many things a reader of this repository meets: contracts, checks of abilities, exported names, lines.

Run: python tools/house_counts.py

    contracts             Protocols of rl_core.interfaces, and its other classes that are no records
    isinstance            calls of isinstance or issubclass with one of these contracts, in product code
    exported names        names in `__all__` of the packages of rl_core
    unused names          those of them that no page names and nothing outside their package imports from it
    source lines          lines of all Python files of the packages
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages" / "rl-core" / "src" / "rl_core"
PUBLIC = ("packages", "benchmarks", "tools", "docs", "README.md", "CONTRIBUTING.md")


def sources() -> list[Path]:
    """The Python files of all packages."""
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def contracts(trees: dict[Path, ast.Module]) -> list[str]:
    """The names of the contracts of `rl_core.interfaces`."""
    own = [cls for path, tree in trees.items() if path.parent == CORE / "interfaces" for cls in _classes(tree)]
    is_record = {cls.name: any("attrs" in ast.unparse(one) for one in cls.decorator_list) for cls in own}
    return sorted(cls.name for cls in own if not is_record[cls.name] and not cls.name.startswith("_"))


def ability_checks(trees: dict[Path, ast.Module], names: list[str]) -> list[str]:
    """`file:line` of each isinstance or issubclass with one of these classes."""
    found = []
    for path, tree in trees.items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {name.name for node in imports if node.module == "rl_core.interfaces" for name in node.names}
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and _name(call.func) in ("isinstance", "issubclass")):
                continue
            if {_name(node) for node in ast.walk(call.args[1])} & imported & set(names):
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    return found


def exported(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Package of rl_core → the names in its `__all__`."""
    found = {}
    for path, tree in trees.items():
        if path.name == "__init__.py" and CORE in path.parents:
            room = ".".join(("rl_core", *path.parent.relative_to(CORE).parts))
            for node in tree.body:
                if isinstance(node, ast.Assign) and _name(node.targets[0]) == "__all__":
                    found[room] = ast.literal_eval(node.value)
    return found


def unused(exports: dict[str, list[str]]) -> dict[str, list[str]]:
    """Package → those of its exported names that nothing outside the package imports from it."""
    used: dict[str, set[str]] = {room: set() for room in exports}
    for path in _files():
        text = path.read_text(encoding="utf-8")
        for room in used:
            if path.is_relative_to(CORE / Path(*room.split(".")[1:])) and room != "rl_core":
                continue
            for names in re.findall(rf"from {re.escape(room)} import (\([^)]*\)|[^\n]*)", text):
                used[room] |= set(re.findall(r"\w+", names))
            used[room] |= set(re.findall(rf"{re.escape(room)}[.:](\w+)", text))
            last = room.rpartition(".")[2]
            for alias in re.findall(rf"from rl_core import {last}(?: as (\w+))?$", text, re.MULTILINE):
                used[room] |= set(re.findall(rf"\b{alias or last}\.(\w+)", text))
            if path.suffix == ".md":
                used[room] |= set(re.findall(r"`(\w+)", text))
    return {room: sorted(set(names) - used[room]) for room, names in exports.items()}


def _files() -> Iterator[Path]:
    for place in (ROOT / name for name in PUBLIC):
        for path in [place] if place.is_file() else place.rglob("*"):
            if path.suffix in (".py", ".md", ".toml") and not {".venv", "build"} & set(path.parts):
                yield path


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, without its index; empty if the node is no name."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def main() -> None:
    """Prints the counts."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    found = contracts(trees)
    checks, exports = ability_checks(trees, found), exported(trees)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in trees)
    print(f"contracts of rl_core.interfaces: {len(found)} ({', '.join(found)})")
    print(f"isinstance with a contract: {len(checks)} {' '.join(checks)}".rstrip())
    print(f"exported names: {sum(map(len, exports.values()))}")
    idle = unused(exports)
    for room, names in exports.items():
        rest = f", {len(idle[room])} of them unused: {', '.join(idle[room])}" if idle[room] else ""
        print(f"    {room}: {len(names)}{rest}")
    print(f"source lines: {lines}")


if __name__ == "__main__":
    main()
