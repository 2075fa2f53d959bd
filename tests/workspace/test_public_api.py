"""A public name appears, changes or goes only on purpose."""

from __future__ import annotations

import difflib
import importlib

import pytest

from tests.workspace.imports import PACKAGES
from tests.workspace.public_api import LISTING, entry_points, listing, public_modules, public_names


def test_the_public_names_are_those_of_the_listing():
    expected, actual = LISTING.read_text(encoding="utf-8"), listing()
    difference = "\n".join(
        difflib.unified_diff(expected.splitlines(), actual.splitlines(), "listed", "found", lineterm="")
    )
    assert not difference, (
        f"{difference}\nIf this is meant, run `make public-api` and commit tests/workspace/public_api.txt; "
        "a name that goes or changes its meaning also raises the version."
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_a_table_of_contents_can_be_imported(package):
    for name in public_modules(package):
        module = importlib.import_module(name)
        for public_name in public_names(module):
            assert hasattr(module, public_name), f"{name} promises {public_name!r} and does not have it"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_entry_point_names_something_that_exists(package):
    for line in entry_points(package):
        module_name, _, attribute = line.partition(" = ")[2].partition(":")
        assert hasattr(importlib.import_module(module_name), attribute), line


def test_a_new_public_name_is_seen_and_a_private_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "made_up.py").write_text("from math import pi\nLIMIT: int = 3\n_secret = 1\ndef answer(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert public_names(importlib.import_module("made_up")) == ["LIMIT", "answer"]


def test_a_table_of_contents_is_taken_at_its_word(tmp_path, monkeypatch):
    (tmp_path / "made_up_table.py").write_text("__all__ = ['b', 'a']\na = b = c = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert public_names(importlib.import_module("made_up_table")) == ["a", "b"]
