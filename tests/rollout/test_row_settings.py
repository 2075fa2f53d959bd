"""Columns of a row that change how its conversation is rendered are used, in prompts and in rows with responses, or the
row is refused."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Environment, StepResult
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec, codec_of
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.supervised_tokens import RowEncoder
from rl_transformers.testing.models import make_checkpoint
from tests.rollout.chat_templates import TOOL_CHATML, tokenizer_of
from tests.rollout.requests import one_sample_of

TEMPLATE = "{{ 'fast ' if enable_thinking is defined and not enable_thinking else 'slow ' }}" + TOOL_CHATML
ASKED = {"role": "user", "content": "12+30?"}
ANSWER = {"role": "assistant", "content": "42"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CLOCK = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
FAST = {"enable_thinking": False}


def tokenizer_with(template: str = TEMPLATE) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = template
    return tokenizer


class OneTurn(Environment):
    """Offers no tools."""

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._row = row

    async def reset(self) -> Any:
        return self._row["prompt"]

    async def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, done=True)


class WithClock(OneTurn):
    offers_tools = True

    async def tools(self) -> Sequence[Any]:
        return [CLOCK]


def played(row: dict[str, Any], environment: type[Environment] = OneTurn, template: str = TEMPLATE) -> tuple[str, int]:
    """The prompt of an episode, and the length that was measured before it. Raises DataError if the sample failed."""
    tokenizer = tokenizer_with(template)
    said = tuple(tokenizer("42", add_special_tokens=False)["input_ids"])
    generator = EnvironmentGenerator(
        ScriptedClient(lambda request: said),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment),
    )
    length = generator.prompt_length(row)
    request = one_sample_of(row)
    (trajectory,) = asyncio.run(generator.generate(request))
    if trajectory.failure is not None:
        raise DataError(trajectory.failure)
    return trajectory.prompt_text, length


def rendered(messages: list[Any], **settings: Any) -> str:
    return tokenizer_with().apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)


COLUMNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"chat_template_kwargs": FAST}, FAST),
    ({"chat_template_kwargs": json.dumps(FAST)}, FAST),
    ({"chat_template_kwargs": None}, {}),
    ({"tools": [ADD]}, {"tools": [ADD]}),
    ({"tools": json.dumps([ADD])}, {"tools": [ADD]}),
    ({"tools": []}, {}),
    ({"tools": [ADD, CLOCK], "chat_template_kwargs": FAST}, {"tools": [ADD, CLOCK], **FAST}),
]


@pytest.mark.parametrize(("columns", "settings"), COLUMNS)
def test_the_columns_of_a_row_reach_its_prompt_and_its_length(columns: dict[str, Any], settings: dict[str, Any]):
    text, length = played({"prompt": [ASKED], **columns})
    assert text == rendered([ASKED], **settings)
    assert length == len(tokenizer_with()(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("columns", "settings"), COLUMNS)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER]},
        {"prompt": [ASKED], "completion": [ANSWER]},
        {"prompt": [ASKED], "completion": "42"},
        {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "41"}]},
    ],
    ids=["messages", "completion", "text", "pair"],
)
def test_the_columns_of_a_row_reach_its_responses(row: Any, columns: dict[str, Any], settings: dict[str, Any]):
    tokenizer = tokenizer_with()
    encoder = RowEncoder(
        TokenCodec(tokenizer, chat_template_kwargs={}),
        response_key="completion",
        trained_roles=["assistant"],
        trained_turns="all",
        scored_at_end=False,
    )
    whole = {**row, **columns}
    sequence = encoder.pair(whole)[0] if "chosen" in row else encoder.response(whole)
    assert tokenizer.decode(sequence.tokens[: sequence.prompt_length]) == rendered([ASKED], **settings)
    assert tokenizer.decode(sequence.tokens[sequence.prompt_length :]) == "42<|im_end|>"


def test_the_configurations_settings_stay_unless_the_row_has_others():
    codec = TokenCodec(tokenizer_with(), chat_template_kwargs=FAST)
    assert codec.prompt_text([ASKED]).startswith("fast")
    assert codec.with_settings({}).prompt_text([ASKED]).startswith("fast")
    assert codec.with_settings({"enable_thinking": True}).prompt_text([ASKED]).startswith("slow")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": [ASKED], "tools": ["add"]}, "the row's 'tools' must be a list of"),
        ({"prompt": [ASKED], "tools": "add"}, "the row's 'tools' are not JSON"),
        ({"prompt": "12+30=", "tools": [ADD]}, "tools, which only a chat template can show, but its prompt is text"),
        (
            {"prompt": "12+30=", "chat_template_kwargs": FAST},
            "chat_template_kwargs, which only a chat template can show",
        ),
        ({"prompt": [ASKED], "chat_template_kwargs": [1]}, "'chat_template_kwargs' must be a mapping"),
        ({"prompt": [ASKED], "chat_template_kwargs": {"tools": [ADD]}}, "write them into the column 'tools'"),
        (
            {"prompt": [ASKED], "chat_template_kwargs": {"enable_thinkin": 1}},
            "'enable_thinkin', which the .* does not read",
        ),
        ({"prompt": [ASKED, ANSWER]}, "the prompt ends with a message of the assistant, .*continue_final_message"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused_before_the_run(row: dict[str, Any], problem: str):
    with pytest.raises(DataError, match=problem):
        played(row)


def test_tools_that_the_template_does_not_show_are_refused_before_the_run():
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises((ConfigError, DataError), match="does not show"):
        played({"prompt": [ASKED], "tools": [ADD]}, template=plain)


def test_tools_of_the_environment_come_first_and_must_include_the_rows():
    text, _ = played({"prompt": [ASKED], "tools": [CLOCK]}, WithClock)
    assert text == rendered([ASKED], tools=[CLOCK])
    text, _ = played({"prompt": [ASKED], "tools": ["clock"]}, WithClock)  # a column that the environment may read
    assert text == rendered([ASKED], tools=[CLOCK])
    with pytest.raises(DataError, match=r"'tools' have 'add', which its environment does not offer \(time\)"):
        played({"prompt": [ASKED], "tools": [ADD, CLOCK]}, WithClock)


def test_an_answer_behind_a_prompt_that_ends_with_one_is_refused():
    encoder = RowEncoder(
        TokenCodec(tokenizer_with(), chat_template_kwargs={}),
        response_key="completion",
        trained_roles=["assistant"],
        trained_turns="all",
        scored_at_end=False,
    )
    for completion in ("42", [ANSWER]):
        with pytest.raises(DataError, match="write both as one message in 'completion'"):
            encoder.response({"prompt": [ASKED, {**ANSWER, "content": "It is "}], "completion": completion})


def test_a_prompt_that_was_rendered_as_text_continues_the_assistants_message():
    """The way out that the message names, compared with transformers' own tokens."""
    tokenizer = tokenizer_with()
    messages = [ASKED, {**ANSWER, "content": "It is"}]
    text = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    expected = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert TokenCodec(tokenizer, chat_template_kwargs={}).encode(text) == tuple(expected)


def test_a_setting_of_the_configuration_that_the_template_does_not_read_is_refused(tmp_path: Path):
    model = make_checkpoint(tmp_path / "model", vocab_size=1000)
    tokenizer_with().save_pretrained(model)
    codec = codec_of(str(model), chat_template_kwargs=FAST)
    assert codec.prompt_text([ASKED]).startswith("fast")
    with pytest.raises(ConfigError, match=r"generator\.chat_template_kwargs: got 'thinking', which the model's chat"):
        codec_of(str(model), chat_template_kwargs={**FAST, "thinking": False})


class InParts(OneTurn):
    """Writes prompt and observation in the forms in which data sets write messages."""

    async def reset(self) -> Any:
        return ({**ASKED, "name": None, "content": [{"type": "text", "text": "12+"}, {"type": "text", "text": "30?"}]},)

    async def step(self, action: Any) -> StepResult:
        parts = [{"type": "text", "text": "again"}]
        return StepResult(reward=1.0, done=False, observation=({"role": "user", "content": parts, "name": None},))


def test_the_messages_of_an_environment_are_read_as_those_of_a_row():
    tokenizer = tokenizer_with()
    said = tuple(tokenizer("42<|im_end|>", add_special_tokens=False)["input_ids"])
    generator = EnvironmentGenerator(
        ScriptedClient(lambda request: said),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: InParts, limits=Limits(max_turns=2)),
    )
    request = one_sample_of({"prompt": [ASKED]}, max_tokens=20)
    (trajectory,) = asyncio.run(generator.generate(request))
    assert trajectory.failure is None
    whole = tokenizer.apply_chat_template(
        [ASKED, ANSWER, {"role": "user", "content": "again"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(trajectory.steps[0].tokens) == whole + "42<|im_end|>"
    assert [turn.observation for turn in trajectory.turns] == ["again", None]
