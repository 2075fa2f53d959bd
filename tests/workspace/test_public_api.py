"""Public names are added, changed or removed only on purpose."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path

import pytest

from tests.workspace.imports import PACKAGES
from tests.workspace.public_api import LISTING, definitions, entry_points, listing, public_modules, public_names, signed


def test_the_public_names_are_those_of_the_listing():
    expected, actual = LISTING.read_text(encoding="utf-8"), listing()
    difference = "\n".join(
        difflib.unified_diff(expected.splitlines(), actual.splitlines(), "listed", "found", lineterm="")
    )
    assert not difference, (
        f"{difference}\nIf this is meant, run `make public-api` and commit tests/workspace/public_api.txt; "
        "removing a name or changing its meaning needs a new version."
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_an_all_list_can_be_imported(package):
    for name in public_modules(package):
        module = importlib.import_module(name)
        for public_name in public_names(module):
            assert hasattr(module, public_name), f"{name} lists {public_name!r} but does not define it"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_entry_point_names_something_that_exists(package):
    for line in entry_points(package):
        module_name, _, attribute = line.partition(" = ")[2].partition(":")
        assert hasattr(importlib.import_module(module_name), attribute), line


def test_a_new_public_name_is_listed_and_a_private_name_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "made_up.py").write_text("from math import pi\nLIMIT: int = 3\n_secret = 1\ndef answer(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert public_names(importlib.import_module("made_up")) == ["LIMIT", "answer"]


def test_public_names_of_a_module_are_its_all_list(tmp_path, monkeypatch):
    (tmp_path / "made_up_table.py").write_text("__all__ = ['b', 'a']\na = b = c = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert public_names(importlib.import_module("made_up_table")) == ["a", "b"]


CONTRACT = """
from typing import Protocol

Names = tuple[str, ...]
TABLE: dict[str, int] = {"a": 1, "b": 2}


class Base(Protocol):
    async def ask(self, question: str, *, mode: str = "keep") -> Names:
        \"\"\"Asks.\"\"\"
        ...

    def _private(self): ...

    @property
    def size(self) -> int: ...


class Engine(Base, Protocol):
    def __call__(self, row): ...


class Record:
    lr: float = 1e-6
    \"\"\"The rate.\"\"\"
    _cache: int = 0


class Suite:
    plugin: object

    def damage(self, path: str) -> bool: ...

    def test_a_check(self): ...
"""


def signatures(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """The listing lines of a made-up package's names."""
    package = folder / "made_up_contract"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    defined = definitions(importlib.import_module("made_up_contract"))
    return "\n".join(line for name, node in defined.items() for line in signed(name, node))


def test_a_contract_is_listed_with_all_that_its_users_rely_on(tmp_path, monkeypatch):
    assert signatures(tmp_path, monkeypatch, CONTRACT) == (
        "Names = tuple[str, ...]\n"
        "TABLE\n"
        "    'a': 1\n"
        "    'b': 2\n"
        "Base(Protocol)\n"
        "    async ask(self, question: str, *, mode: str='keep') -> Names\n"
        "    @property size(self) -> int\n"
        "Engine(Base, Protocol)\n"
        "    __call__(self, row)\n"
        "Record\n"
        "    lr: float = 1e-06\n"
        "Suite\n"
        "    plugin: object\n"
        "    damage(self, path: str) -> bool"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("question: str", "question: bytes"),
        ("question: str,", "question: str, speaker: str,"),
        ('"keep"', '"wait"'),
        ("-> Names", "-> str"),
        ("async def ask", "def ask"),
        ("def size", "def length"),
        ("-> int", "-> float"),
        ("Engine(Base, Protocol)", "Engine(Protocol)"),
        ("1e-6", "1e-5"),
        ("lr: float", "rate: float"),
        ("plugin: object", "plugin: str"),
        ("def damage", "def spoil"),
        ('"b": 2', '"b": 3'),
    ],
)
def test_a_changed_contract_is_seen(tmp_path, monkeypatch, old: str, new: str):
    assert old in CONTRACT
    changed = signatures(tmp_path, monkeypatch, CONTRACT.replace(old, new))
    assert changed != signatures(tmp_path, monkeypatch, CONTRACT)


def test_docstrings_and_private_members_do_not_change_signatures(tmp_path, monkeypatch):
    changed = CONTRACT.replace("Asks.", "Asks again.").replace("_private(self)", "_private(self, more)")
    assert changed != CONTRACT
    assert signatures(tmp_path, monkeypatch, changed) == signatures(tmp_path, monkeypatch, CONTRACT)
