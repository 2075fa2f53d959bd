"""Plug-ins import what has moved under its earlier name."""

from __future__ import annotations

import importlib
import sys

import pytest

from rl_core.moved_modules import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_the_earlier_name_warns_and_gives_the_same_objects(name: str):
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"{name} has moved to {MOVED[name]}"):
        module = importlib.import_module(name)
    moved = importlib.import_module(MOVED[name])
    public = next(key for key, value in vars(moved).items() if getattr(value, "__module__", "") == MOVED[name])
    assert getattr(module, public) is getattr(moved, public)


def test_what_was_never_there_is_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rl_core.never_there")
