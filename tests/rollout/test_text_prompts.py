"""Prompts of text begin with the tokens with which the tokenizer itself begins a text."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import from_mapping, generator_spec
from rl_core.errors import ConfigError
from rl_core.interfaces import Environment, StepResult
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.supervised_tokens import RowEncoder
from rl_transformers.testing.models import make_checkpoint
from tests.rollout.chat_templates import tokenizer_of
from tests.rollout.requests import one_sample_of

SPECIAL = ["<bos>", "<sop>", "<cls>"]
TEXTS = ["12+30=", " and a space", "\n\nlines\n", "naïve 東京", "<sop>12", "x<bos>12"]
PLACES = {
    "llama": "<bos> $A",
    "glm": "<bos> <sop> $A",
    "t5": "$A <cls>",
    "bert": "<bos> $A <cls>",
    "qwen": "$A",
}
"""Where the tokenizers of model families add special tokens to a text."""


def tokenizer_with(place: str, family: str = "chatml") -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizer_of(family))
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=place, special_tokens=ids)
    return tokenizer


def expected(tokenizer: Any, text: str) -> tuple[int, ...]:
    """What the tokenizer makes of the text, without the special tokens behind it."""
    tokens = list(tokenizer(text)["input_ids"])
    while tokens and tokens[-1] == tokenizer.convert_tokens_to_ids("<cls>"):
        tokens.pop()
    return tuple(tokens)


@pytest.mark.parametrize("family", ["chatml", "llama2"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_prompt_of_text_has_the_tokens_that_the_tokenizer_itself_writes(place: str, family: str):
    tokenizer = tokenizer_with(place, family)
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    plain = TokenCodec(tokenizer, chat_template_kwargs={}, add_special_tokens=False)
    for text in TEXTS:
        assert codec.encode(text) == expected(tokenizer, text)
        assert plain.encode(text) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert (codec.encode(TEXTS[0]) != plain.encode(TEXTS[0])) == place.startswith("<bos>")


def test_special_tokens_that_the_text_already_has_are_not_added_again():
    tokenizer = tokenizer_with(PLACES["glm"])
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    assert codec.encode("<bos><sop>12") == codec.encode("12") == expected(tokenizer, "12")


def test_messages_get_no_tokens_that_their_template_does_not_write():
    tokenizer = tokenizer_with(PLACES["llama"])
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    messages = [{"role": "user", "content": "12+30="}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode(messages) == tuple(whole)


def test_a_text_that_the_tokenizer_encodes_differently_behind_its_own_tokens_is_refused():
    class Odd:
        eos_token_id = None

        def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [0, *map(ord, text.upper())] if add_special_tokens else list(map(ord, text))}

    odd: Any = Odd()
    assert TokenCodec(odd, chat_template_kwargs={}).encode("12") == (0, 49, 50)
    with pytest.raises(ConfigError, match=r"data\.add_special_tokens: .*set the key to false"):
        TokenCodec(odd, chat_template_kwargs={}).encode("ab")


class TwoTurns(Environment):
    def __init__(self, row: Any, options: Any) -> None:
        self._row, self._left = row, 1

    async def reset(self) -> str:
        return self._row["prompt"]

    async def step(self, action: Any) -> StepResult:
        self._left -= 1
        return StepResult(reward=1.0, done=self._left < 0, observation=" no, again: ")


def test_an_episode_of_text_begins_once(tmp_path: Path):
    tokenizer = tokenizer_with(PLACES["bert"])
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    said = tuple(tokenizer("42", add_special_tokens=False)["input_ids"])
    client = ScriptedClient(lambda request: said)
    generator = EnvironmentGenerator(
        client, codec, Episodes(environment_of=lambda row: TwoTurns, limits=Limits(max_turns=2))
    )
    row = {"prompt": "12+30="}
    request = one_sample_of(row)
    (trajectory,) = asyncio.run(generator.generate(request))
    (step,) = trajectory.steps
    observed = tuple(tokenizer(" no, again: ", add_special_tokens=False)["input_ids"])
    assert tuple(step.tokens) == expected(tokenizer, "12+30=") + said + observed + said
    assert generator.prompt_length(row) == len(expected(tokenizer, "12+30="))


ROWS = [
    {"prompt": "12+30=", "completion": "42"},
    {"prompt": "12+30=", "chosen": "42", "rejected": "41"},
    {"chosen": "12+30= 42", "rejected": "12+30= 31"},
]


@pytest.mark.parametrize("row", ROWS, ids=["completion", "pair", "implicit"])
def test_rows_with_responses_begin_as_prompts_do(row: dict[str, str]):
    from rl_core.trainer.before.data import checked_row

    tokenizer = tokenizer_with(PLACES["bert"])
    encoder = RowEncoder(
        TokenCodec(tokenizer, chat_template_kwargs={}),
        response_key="completion",
        trained_roles=["assistant"],
        trained_turns="all",
        scored_at_end=False,
    )
    read = checked_row(row, "d:1").row
    sequences = encoder.pair(read) if "chosen" in row else (encoder.response(read),)
    beginning = expected(tokenizer, "12+30=")
    answers: Sequence[str] = [read[name] for name in ("completion", "chosen", "rejected") if name in read]
    for sequence, answer in zip(sequences, answers, strict=True):
        said = tuple(tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"])
        assert sequence.tokens == beginning + said
        assert sequence.trained == (False,) * len(beginning) + (True,) * len(said)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", ["environment", "dataset"])
def test_the_key_reaches_the_generators_of_a_run(kind: str, adds: bool, tmp_path: Path):
    from rl_core.trainer.before.preflight import NoSampler

    tokenizer = tokenizer_with(PLACES["llama"])
    model = make_checkpoint(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    keys: dict[str, Any] = {"generator.type": kind, "data.add_special_tokens": adds}
    if kind == "environment":
        keys["environment.env_class"] = f"{__name__}:TwoTurns"
    plugin, spec = generator_spec(from_mapping({"trainer.policy.model.path": str(model), **keys}))
    generator = plugin.create(spec, NoSampler())
    num_plain = len(tokenizer("12+30=", add_special_tokens=False)["input_ids"])
    assert generator.prompt_length(ROWS[0]) == num_plain + adds
