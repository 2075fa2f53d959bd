"""The form in which a chat template reads a call: content "" or null, arguments as a mapping or as JSON text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import trl

from rl_core.errors import DataError
from rl_core.interfaces import EXAMPLE_CALL, require_messages
from rl_rollout.chat import TokenCodec
from tests.rollout.chat_templates import tokenizer_of

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
OWN_FORM = {
    "deepseek_r1_distill": (None, True),
    "deepseek_r1_distill_training": (None, True),
    "deepseekv3": ("", True),
}
"""How the templates that differ from all others read a call: its content, and whether its arguments are text."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_call_is_rendered_in_the_form_that_the_template_reads(path: Path):
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = path.read_text()
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    function = {"name": "add", "arguments": {"a": "twelve", "b": [30]}}
    content, is_text = OWN_FORM.get(path.stem, ("", False))
    shown = {**function, "arguments": json.dumps(function["arguments"]) if is_text else function["arguments"]}

    def messages(content: str | None, function: Any) -> list[Any]:
        return [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]},
        ]

    try:
        expected = tokenizer.apply_chat_template(messages(content, shown), tokenize=False, add_generation_prompt=False)
    except Exception:
        expected = None
    for given in (function, {**function, "arguments": json.dumps(function["arguments"])}):
        row = require_messages(messages(None, given), "a prompt")
        if expected is None:
            with pytest.raises(DataError, match="the chat template refuses the messages"):
                codec.render(row, add_generation_prompt=False)
        else:
            assert codec.render(row, add_generation_prompt=False) == expected


def test_the_templates_that_read_calls_in_their_own_form_show_the_call():
    for name in OWN_FORM:
        tokenizer = copy.deepcopy(tokenizer_of("chatml"))
        tokenizer.chat_template = next(path for path in TEMPLATES if path.stem == name).read_text()
        codec = TokenCodec(tokenizer, chat_template_kwargs={})
        calling = {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]}
        assert '{"word": "example"}' in codec.render([{"role": "user", "content": "?"}, calling])
