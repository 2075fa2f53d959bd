"""Code that two packages need exists only once: no function has the same body as a function of another package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.workspace.imports import PACKAGES, source_root


def bodies(source: Path) -> Iterator[tuple[str, str]]:
    """Yields syntax tree and location of each function with at least two statements besides its docstring.

    `__getattr__` is left out: every package needs its own, which imports the package's names on first use.
    """
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__getattr__":
                continue
            has_docstring = ast.get_docstring(node, clean=False) is not None
            statements = node.body[1:] if has_docstring else node.body
            if len(statements) > 1:
                tree = ast.dump(ast.Module(statements, []))
                yield tree, f"{path.relative_to(source)}:{node.lineno} {node.name}"


def twins(sources: dict[str, Path]) -> list[list[str]]:
    """Locations of equal functions that occur in more than one package."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for package, source in sources.items():
        for tree, place in bodies(source):
            found[tree].append((package, place))
    return [[place for _, place in same] for same in found.values() if len({package for package, _ in same}) > 1]


def test_no_function_is_duplicated_in_two_packages():
    found = twins({package: source_root(package) for package in PACKAGES})
    assert not found, "\n".join(" = ".join(places) for places in found)


def test_a_made_up_twin_is_caught(tmp_path: Path):
    one = 'def add(a, b):\n    """One."""\n    total = a + b\n    return total\n'
    other = "class Adder:\n    def plus(self, a, b):\n        total = a + b  # the same\n        return total\n"
    different = "def add(a, b):\n    total = a - b\n    return total\n"
    for package, text in {"rl_one": one, "rl_other": other, "rl_third": different}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "adding.py").write_text(text)
    (found,) = twins({package: tmp_path / package for package in ("rl_one", "rl_other", "rl_third")})
    assert found == ["adding.py:1 add", "adding.py:2 plus"]
