"""Plug-ins can import moved modules under their earlier names."""

from __future__ import annotations

import importlib
import sys

import pytest

from rl_core.moved_modules import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_the_earlier_name_gives_the_same_objects_and_says_where_they_are(name: str, caplog: pytest.LogCaptureFixture):
    sys.modules.pop(name, None)
    with caplog.at_level("INFO"):
        module = importlib.import_module(name)
    assert f"{name} has moved to {MOVED[name]}" in caplog.text
    moved = importlib.import_module(MOVED[name])
    public = next(key for key, value in vars(moved).items() if getattr(value, "__module__", "") == MOVED[name])
    assert getattr(module, public) is getattr(moved, public)


def test_a_name_that_never_existed_is_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rl_core.never_there")
