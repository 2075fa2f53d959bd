"""The number of contracts and exported names stays within its bounds, and product code asks no object for its class."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.house_counts import ROOT, ability_checks, contracts, exported, sources, unused

MADE_UP = """
from rl_core.interfaces import Worker
def offload(worker):
    if isinstance(worker, (int, Worker)):
        worker.offload()
"""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The syntax trees of all packages."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}


def test_there_are_few_contracts_and_no_checks_of_their_abilities(trees: dict[Path, ast.Module]):
    names = contracts(trees)
    assert {"Backend", "Worker", "EnginePlugin", "InferenceClient", "Environment"} <= set(names)
    assert len(names) <= 15, names
    assert ability_checks(trees, names) == []


def test_a_made_up_check_of_an_ability_is_caught():
    assert ability_checks({ROOT / "made_up.py": ast.parse(MADE_UP)}, ["Worker"]) == ["made_up.py:4"]


def test_few_names_are_exported_and_each_has_a_user(trees: dict[Path, ast.Module]):
    exports = exported(trees)
    assert sum(map(len, exports.values())) <= 260
    assert {room: names for room, names in unused(exports).items() if names} == {}


def test_a_made_up_name_without_a_user_is_caught():
    name = "_".join(["nobody", "reads", "this"])
    assert unused({"rl_core.interfaces": ["Backend", name]}) == {"rl_core.interfaces": [name]}
