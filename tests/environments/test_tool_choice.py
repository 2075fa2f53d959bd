"""A required call can be parsed and has valid arguments, whatever tokens the model prefers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xgrammar

from rl_core.errors import ConfigError
from rl_core.interfaces import Action
from rl_environments.tools import Call, ToolChoiceEnvironment, format_of_name, tool
from tests.rollout.chat_templates import tokenizer_of

ROW = {"prompt": [{"role": "user", "content": "Two apples?"}]}
HERMES = '<tool_call>{"name": "look_up", "arguments": {"word": "example"}}</tool_call>'
MAX_TOKENS = 500


class Shop(ToolChoiceEnvironment):
    @tool
    def price(self, article: Literal["apple", 'a "pear"'], count: int = 1, rebate: float | None = None) -> float:
        """The price of an article."""
        return 1.0

    @tool
    def order(self, pieces: list[Literal["a", "b"]], is_gift: bool) -> str:
        """Orders pieces."""
        return "ordered"

    @tool
    def stop(self) -> str:
        """Stops."""
        return "stopped"

    async def judge(self, answer: str) -> float:
        return 0.0


class AlwaysCalls(Shop):
    def tool_choice(self) -> Literal["auto", "required"]:
        return "required"


def said_at_random(rng: random.Random, grammar: xgrammar.CompiledGrammar | None) -> str | None:
    """Text of tokens drawn uniformly from those that the grammar allows; None if the text is cut off at MAX_TOKENS.
    Without a grammar, the text has MAX_TOKENS tokens, drawn from the whole vocabulary."""
    tokenizer = tokenizer_of("tool_chatml")
    tokens: list[int] = []
    if grammar is None:
        return str(tokenizer.decode(rng.choices(range(len(tokenizer)), k=MAX_TOKENS)))
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    while not matcher.is_terminated():
        if len(tokens) == MAX_TOKENS:
            return None
        matcher.fill_next_token_bitmask(mask)
        allowed = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")[: len(tokenizer)]
        tokens.append(rng.choice(np.flatnonzero(allowed).tolist()))
        assert matcher.accept_token(tokens[-1])
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("name", ["hermes", "llama_json"])
async def test_every_text_that_a_grammar_allows_is_one_valid_call(name: str):
    environment = AlwaysCalls(ROW, {"call_format": name})
    tokenizer = tokenizer_of("tool_chatml")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))
    tag = await environment.structural_tag(None)
    assert tag is not None
    grammar, rng = compiler.compile_structural_tag(tag), random.Random(0)
    said = [said_at_random(rng, grammar) for _ in range(60)]
    whole = [text for text in said if text is not None]
    assert len(whole) > 50
    for text in whole:
        (call,) = format_of_name(name).read(text)
        assert isinstance(call, Call), call
        await environment.step(Action(text=text, tokens=(), stop_reason="stop"))
    assert environment.num_calls == len(whole)
    assert environment.num_wrong_calls == 0
    free = [said_at_random(rng, None) or "" for _ in range(60)]
    assert not any(isinstance(call, Call) for text in free for call in format_of_name(name).read(text))


async def test_the_environment_in_the_documentation_requires_a_call_in_the_first_turn():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    text = next(part.split("```")[0] for part in page.split("```python\n") if "class LooksUpFirst" in part)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(text, "docs/environments.md", "exec"), names)
    environment = names["LooksUpFirst"]({**ROW, "meanings": {"apple": "a fruit"}, "answer": "fruit"}, {})
    assert environment.forces_responses
    (tag,) = json.loads(await environment.structural_tag(HERMES) or "")["format"]["elements"]
    assert tag["begin"] == '<tool_call>\n{"name": "look_up", "arguments": '
    call = HERMES.replace("example", "apple")
    result = await environment.step(Action(text=call, tokens=(), stop_reason="stop", example_call=HERMES))
    assert result.observation == [{"role": "tool", "content": "a fruit", "name": "look_up"}]
    assert await environment.structural_tag(HERMES) is None


@pytest.mark.parametrize("name", ["qwen_xml", "marked"])
async def test_a_format_without_grammar_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"Shop\.tool_choice: .*format '{name}' has no grammar; set environment.opt"):
        await Shop(ROW, {"call_format": name}).structural_tag(None)


async def test_an_unknown_choice_is_refused():
    class Never(Shop):
        def tool_choice(self) -> Literal["auto", "required"]:
            return "none"  # pyright: ignore[reportReturnType]

    with pytest.raises(ConfigError, match=r"Never\.tool_choice: got 'none'; expected 'auto' or 'required'"):
        await Never(ROW, {}).structural_tag(HERMES)
