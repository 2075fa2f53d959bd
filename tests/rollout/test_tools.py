"""Environments with tools: the prompt shows the tools, and the text between turns is what the template renders with
them.

Random conversations are checked as in `test_conversations`: against one rendering of the whole conversation, with marks
in place of the responses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import (
    Environment,
    GroupRequest,
    SamplingParams,
    StepResult,
    Trajectory,
    require_messages,
    require_tools,
)
from rl_core.testing.scripted_engine import Exchange, ScriptedClient
from rl_core.trainer.update.collate import collate
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.turn_tokens import TurnTokens
from tests.rollout.chat_templates import FAMILIES, tokenizer_of
from tests.rollout.test_conversations import MAX_TOKENS, expected_prompts, random_script, random_text, rendered

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers: <b> 1 < 2 & 'quoted' — ünïcode.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


class UsesTools(Environment):
    """Answers with the observations of its row. Offers the row's tools, and empties the list at the first step."""

    offers_tools = True

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._row, self._turn = row, 0
        self._tools = list(row["tools"])
        self.asked = row.setdefault("asked", [])

    async def reset(self) -> Any:
        self.asked.append("reset")
        return self._row["prompt"]

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        self.asked.append("tools")
        return self._tools

    async def step(self, action: Any) -> StepResult:
        self._tools.clear()
        observations = self._row["observations"]
        done = self._turn == len(observations)
        self._turn += 1
        return StepResult(reward=1.0, done=done, observation=None if done else observations[self._turn - 1])


def random_row(name: str, rng: random.Random, num_turns: int) -> dict[str, Any]:
    observations = []
    for _ in range(num_turns - 1):
        role = rng.choice(FAMILIES[name].observers)
        extra = {"name": "add", "tool_call_id": f"call{rng.randint(0, 9)}"} if role == "tool" else {}
        observations.append([{"role": role, "content": random_text(rng), **extra}])
    prompt: list[dict[str, Any]] = [{"role": "user", "content": random_text(rng)}]
    if name == "tool_chatml" and rng.random() < 0.5:
        # Earlier calls as a data file may store them: None for a key that a message lacks.
        prompt = [
            {"role": "user", "content": "1+2?", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001", "tool_calls": None},
        ]
    return {"prompt": prompt, "observations": observations, "tools": rng.choice([[CALCULATOR], [CLOCK, CALCULATOR]])}


async def play(
    name: str, row: Mapping[str, Any], rng: random.Random, *, step_wise: bool = False, **settings: Any
) -> tuple[Trajectory, list[Exchange]]:
    tokenizer = tokenizer_of(name)
    client = ScriptedClient(random_script(tokenizer, rng), end_tokens=[tokenizer.eos_token_id])
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs=settings),
        Episodes(environment_of=lambda row: UsesTools, limits=Limits(max_turns=8), step_wise=step_wise),
    )
    request = GroupRequest(
        group_id=3,
        row=row,
        row_place="rows:1",
        num_samples=1,
        params=SamplingParams(max_tokens=MAX_TOKENS),
        seed=0,
        start_version=0,
    )
    (trajectory,) = await generator.generate(request)
    return trajectory, client.exchanges


async def mismatches(name: str, num_conversations: int) -> int:
    """The number of conversations in which the prompt of some turn is not what the template renders."""
    wrong = 0
    for seed in range(num_conversations):
        rng = random.Random(seed)
        row = random_row(name, rng, rng.randint(1, 5))
        trajectory, exchanges = await play(name, row, rng)
        assert trajectory.failure is None, trajectory.failure
        assert row["asked"] == ["reset", "tools"]
        (step,) = trajectory.steps
        batch = collate([trajectory])
        assert batch["tokens"][batch["sampled"]].tolist() == [t for e in exchanges for t in e.completion.tokens]
        assert tuple(step.tokens) == exchanges[-1].request.prompt_tokens + exchanges[-1].completion.tokens
        wrong += [list(e.request.prompt_tokens) for e in exchanges] != expected_prompts(name, row, exchanges)
    return wrong


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.shows_tools])
async def test_every_prompt_is_what_the_template_renders_with_the_environments_tools(name: str):
    assert await mismatches(name, 100) == 0


async def test_the_check_notices_turns_that_were_cut_from_a_rendering_without_the_tools(
    monkeypatch: pytest.MonkeyPatch,
):
    cut = TurnTokens.between

    def without_tools(self: TurnTokens, *args: Any) -> tuple[int, ...]:
        return cut(TurnTokens(self.codec.with_tools(())), *args)

    monkeypatch.setattr(TurnTokens, "between", without_tools)
    # This template writes the number of tools into each result.
    assert await mismatches("tools_last", 20) > 10


async def test_the_prompt_shows_the_tools_the_calls_and_the_results():
    row = {
        "prompt": [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"},
        ],
        "observations": [],
        "tools": [CLOCK],
    }
    trajectory, _ = await play("tool_chatml", row, random.Random(0))
    assert trajectory.prompt_text == (
        "<|im_start|>system\nYou are a helpful assistant.\n<tools>\n"
        '{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}\n'
        "</tools><|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool add #call00001\n3<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_tools_that_move_with_the_conversation_need_step_wise_trajectories():
    rng = random.Random(0)
    row = random_row("tools_last", rng, 3) | {"observations": [[{"role": "user", "content": "again"}]] * 2}
    with pytest.raises(ConfigError, match=r"renders earlier turns differently.*step_wise_trajectories=true"):
        await play("tools_last", row, rng)
    trajectory, exchanges = await play("tools_last", row, rng, step_wise=True)
    assert len(trajectory.steps) == 3
    tokenizer = tokenizer_of("tools_last")
    said = [tokenizer.decode(e.completion.tokens, skip_special_tokens=True) for e in exchanges]
    messages = list(row["prompt"])
    for exchange, text in zip(exchanges, said, strict=True):
        prompt = rendered("tools_last", messages, row["tools"])
        assert list(exchange.request.prompt_tokens) == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]


async def test_samples_of_a_group_may_have_tools_of_their_own():
    row = {"prompt": [{"role": "user", "content": "?"}], "observations": [], "tools": []}
    offered = iter([[CLOCK], [CALCULATOR], []])

    class Differ(UsesTools):
        async def tools(self) -> Any:
            return next(offered)

    tokenizer = tokenizer_of("tool_chatml")
    client = ScriptedClient(lambda request: [5, tokenizer.eos_token_id], end_tokens=[tokenizer.eos_token_id])
    generator = EnvironmentGenerator(
        client, TokenCodec(tokenizer, chat_template_kwargs={}), Episodes(environment_of=lambda row: Differ)
    )
    request = GroupRequest(
        group_id=0,
        row=row,
        row_place="rows:1",
        num_samples=3,
        params=SamplingParams(max_tokens=4),
        seed=0,
        start_version=0,
    )
    texts = [trajectory.prompt_text for trajectory in await generator.generate(request)]
    # Environments run in threads, so the order in which they are asked for tools is not fixed.
    offered_in = sorted(('"time"' in text, '"add"' in text) for text in texts)
    assert offered_in == [(False, False), (False, True), (True, False)]


# --- what is refused ------------------------------------------------------------------------------------------------


def row_with(tools: Any, prompt: Any = None) -> dict[str, Any]:
    return {"prompt": prompt or [{"role": "user", "content": "?"}], "observations": [], "tools": tools}


async def test_a_template_that_does_not_show_tools_ends_the_run():
    with pytest.raises(ConfigError, match="rows:1: the model's chat template does not show the name of the tool"):
        await play("chatml", row_with([CLOCK]), random.Random(0))


async def test_tools_in_both_configuration_and_environment_are_refused():
    with pytest.raises(ConfigError, match=r"generator\.chat_template_kwargs: got 'tools', but the environment"):
        await play("tool_chatml", row_with([CLOCK]), random.Random(0), tools=[CALCULATOR])
    trajectory, _ = await play("tool_chatml", row_with([]), random.Random(0), tools=[CALCULATOR])
    assert '"add"' in trajectory.prompt_text


async def test_a_text_prompt_with_tools_is_a_failure():
    trajectory, _ = await play("tool_chatml", row_with([CLOCK], "text"), random.Random(0))
    assert "the row or its environment has tools, which only a chat template can show" in trajectory.failure


async def test_a_synchronous_tools_method_fails_but_a_tools_attribute_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(UsesTools, "tools", lambda self: [CLOCK])
    trajectory, _ = await play("tool_chatml", row_with([CLOCK]), random.Random(0))
    message = "DataError: the environment's `tools` returned list, expected an awaitable; define it with `async def"
    assert message in trajectory.failure
    monkeypatch.setattr(UsesTools, "tools", {"hammer": 1})
    monkeypatch.setattr(UsesTools, "offers_tools", False)
    trajectory, _ = await play("tool_chatml", row_with([]), random.Random(0))
    assert trajectory.failure is None
    assert "<tools>" not in trajectory.prompt_text


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"type": "function"}, "tools must be a list of"),
        (["add"], "tools must be a list of"),
        ([{"name": "add"}], "tools must be a list of"),
        ([{"type": "function", "function": {"name": ""}}], "tools must be a list of"),
        ([{"type": "function", "function": {"name": "add", "parameters": "a, b"}}], "tools must be a list of"),
        ([{"type": "function", "function": {"name": "add", "parameters": {"default": {1, 2}}}}], "cannot be written"),
        (
            [{"type": "function", "function": {"name": "add", "parameters": {"default": float("nan")}}}],
            "cannot be written",
        ),
        ([CLOCK, CALCULATOR, CLOCK], "two of the environment's tools have the name 'time'"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, message: str):
    with pytest.raises(DataError, match=message):
        require_tools(tools)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "content": None}, "text or a list of messages"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "of role 'user' with 'tool_calls'"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "whose 'tool_calls' are not a list"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"name": "add"}]}, "whose 'tool_calls' are not a list"),
        ({"role": "assistant", "tool_calls": "add"}, "whose 'tool_calls' are not a list"),
        ({"role": "tool", "content": "3", "tool_call_id": 7}, "whose 'tool_call_id' is not text"),
    ],
)
def test_malformed_messages_are_refused(message: Any, problem: str):
    with pytest.raises(DataError, match=f"a prompt .*{problem}"):
        require_messages([message], "a prompt")


def test_arguments_may_be_json_text():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert require_messages([{"role": "assistant", "tool_calls": [call]}], "a prompt")
