"""The table in docs/coming_from.md agrees with what the configuration does with other trainers' keys."""

from __future__ import annotations

import re

import pytest

from rl_core.config import Config
from rl_core.errors import RLError
from tools import key_table
from tools.key_table import BEGIN, PAGE, keys, outcome, page, row

KEYS = keys()


def rows() -> dict[str, str]:
    """Key → its row in the table."""
    table = PAGE.read_text().partition(BEGIN)[2]
    return {found[1]: found[0] for found in re.finditer(r"^\| `([\w.]+)` \| .*$", table, re.MULTILINE)}


def test_the_page_is_up_to_date_and_has_no_unknown_key():
    assert page(PAGE.read_text()) == PAGE.read_text(), "the table is out of date: run python -m tools.key_table"
    assert len(KEYS) == 317
    verdicts = [line.rsplit(" | ", 1)[1] for line in rows().values()]
    assert all(re.match(r"the same|→|no effect|refused", verdict) for verdict in verdicts)
    assert not any("unknown" in verdict for verdict in verdicts)


@pytest.mark.parametrize("model", ["ref", "critic"])
def test_every_policy_key_is_known_for_the_other_models_too(model: str):
    for key, value in KEYS.items():
        if key.startswith("trainer.policy.") and not (model == "ref" and ".optimizer_config." in key):
            outcome(key.replace("trainer.policy.", f"trainer.{model}."), value)


def test_an_unknown_key_has_no_row():
    with pytest.raises(RLError, match="unknown key"):
        row("trainer.zero_variance", 1)


def test_a_default_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def broken(config: Config, key: str) -> None:
        raise AttributeError(key)

    monkeypatch.setattr(key_table, "value_at", broken)
    with pytest.raises(AttributeError, match=r"trainer\.epochs"):
        outcome("trainer.epochs", 1)
