"""docs/chat_templates.md is up to date, and its comparison with transformers finds a product that is wrong."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_rollout.chat import TokenCodec
from rl_rollout.turn_tokens import TurnTokens
from tools.chat_template_page import Wrong, outcome, page
from tools.shipped_templates import shipped_templates

ROOT = Path(__file__).parents[2]
TEMPLATES = shipped_templates()


@pytest.mark.skipif(find_spec("vllm") is None, reason="the page has vLLM's templates")
def test_the_page_is_what_the_installed_templates_give():
    assert (ROOT / "docs/chat_templates.md").read_text() == page(), (
        "docs/chat_templates.md is out of date: run `make docs`"
    )


def test_the_comparison_finds_a_dropped_observation(monkeypatch: pytest.MonkeyPatch):
    between = TurnTokens.between

    def without(self: TurnTokens, response: Any, observation: Any) -> Any:
        blank = [{**message, "content": "?"} for message in observation]
        return between(self, response, blank)

    monkeypatch.setattr(TurnTokens, "between", without)
    for column in ("RL, turns", "tools"):
        with pytest.raises(Wrong):
            outcome(TEMPLATES["trl/qwen2_5"], column)


def test_the_comparison_finds_dropped_calls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TokenCodec, "prove", lambda *args, **settings: None)
    with pytest.raises(Wrong):
        outcome(TEMPLATES["trl/lfm2"], "SFT, calls")
