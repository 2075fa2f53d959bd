"""Conversations of several turns: training uses exactly the prompts that the engine got and the tokens that it sampled.

The engine here answers with arbitrary tokens, mostly in sequences that are the encoding of no text. The text between
the turns is checked against the template itself: the test renders the whole conversation with marks in place of the
responses, and splits it at the marks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import Environment, GenerateRequest, GroupRequest, SamplingParams, StepResult, Trajectory
from rl_core.testing.scripted_engine import Exchange, ScriptedClient, expected_routes
from rl_core.trainer.update.collate import collate, merged
from rl_rollout.chat import TokenCodec
from rl_rollout.conversation import ChatHistory, RenderedHistory, Tokens
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from tests.rollout.chat_templates import FAMILIES, tokenizer_of

MAX_TOKENS = 24
NUM_CONVERSATIONS = 200
WORDS = ["higher", " lower\n", "東京 🙂", "{'x': 1}", "[INST]", "3", "user:", "  two  spaces ", "\n\nnew\n"]


class Talks(Environment):
    """Answers with its row's observations, whatever the policy says; records each response in `row["heard"]`."""

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._row = row
        self.heard = row["heard"]

    async def reset(self) -> Any:
        return self._row["prompt"]

    async def step(self, action: Any) -> StepResult:
        turn = len(self.heard)
        self.heard.append(action.text)
        done = turn == len(self._row["observations"])
        observation = None if done else self._row["observations"][turn]
        return StepResult(reward=turn + 1.0, done=done, observation=observation, metrics={"last": float(turn)})


@attrs.frozen(kw_only=True, eq=False)
class Played:
    """A conversation: its row, the engine's requests and answers, and the trajectory."""

    row: Mapping[str, Any]
    exchanges: list[Exchange]
    trajectory: Trajectory


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 4))).strip() or "x"


def random_row(name: str, rng: random.Random, num_turns: int) -> dict[str, Any]:
    family = FAMILIES[name]
    prompt = [{"role": "user", "content": random_text(rng)}]
    if family.has_system and rng.random() < 0.5:
        prompt.insert(0, {"role": "system", "content": random_text(rng)})
    observations = []
    for _ in range(num_turns - 1):
        role = rng.choice(family.observers)
        count = rng.randint(1, 3) if role == "tool" else 1
        observations.append([{"role": role, "content": random_text(rng)} for _ in range(count)])
    return {"prompt": prompt, "observations": observations, "heard": []}


def random_script(tokenizer: Any, rng: random.Random) -> Callable[[GenerateRequest], list[int]]:
    """Answers with random tokens; the token limit cuts about a third of the responses off."""

    def script(request: GenerateRequest) -> list[int]:
        length = rng.randint(1, MAX_TOKENS * 3 // 2)
        others = [token for token in rng.choices(range(len(tokenizer)), k=length) if token != tokenizer.eos_token_id]
        return [*others, tokenizer.eos_token_id]

    return script


async def play(
    name: str,
    row: Mapping[str, Any],
    script: Callable[[GenerateRequest], Sequence[int]],
    *,
    step_wise: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    params: SamplingParams | None = None,
    **client_settings: Any,
) -> Played:
    tokenizer = tokenizer_of(name)
    client = ScriptedClient(script, end_tokens=[tokenizer.eos_token_id], **client_settings)
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs=template_kwargs or {}),
        Episodes(environment_of=lambda row: Talks, limits=Limits(max_turns=8), step_wise=step_wise),
    )
    request = GroupRequest(
        group_id=3,
        row=row,
        row_place="rows:1",
        num_samples=1,
        params=params or SamplingParams(max_tokens=MAX_TOKENS),
        seed=0,
        start_version=0,
    )
    (trajectory,) = await generator.generate(request)
    assert trajectory.failure is None, trajectory.failure
    return Played(row=row, exchanges=client.exchanges, trajectory=trajectory)


def rendered(name: str, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return tokenizer_of(name).apply_chat_template(given, tools=tools, add_generation_prompt=True, tokenize=False)


def expected_prompts(name: str, row: Mapping[str, Any], exchanges: Sequence[Exchange]) -> list[list[int]]:
    """The prompt of each turn, from one rendering of the whole conversation with the row's tools. The template must
    keep earlier turns.
    """
    tokenizer = tokenizer_of(name)
    messages, turns = list(row["prompt"]), len(exchanges)
    for turn, observation in enumerate(row["observations"][: turns - 1]):
        messages += [{"role": "assistant", "content": f"MARK{turn}MARK"}, *observation]
    text = rendered(name, messages, row.get("tools"))
    tokens, prompts = [], []
    for turn, exchange in enumerate(exchanges):
        before, _, text = text.partition(f"MARK{turn}MARK") if turn < turns - 1 else (text, "", "")
        before = before.removesuffix(" ") if name == "llama2" and turn < turns - 1 else before
        piece = tokenizer(before, add_special_tokens=False)["input_ids"]
        if tokens and tokens[-1] == tokenizer.eos_token_id:
            # If the response ends with the end of the turn, the template's own end of turn is dropped.
            piece = piece[piece.index(tokenizer.eos_token_id) + 1 :]
        tokens = [*tokens, *piece]
        prompts.append(tokens)
        tokens = [*tokens, *exchange.completion.tokens]
    return prompts


def require_exact(played: Played) -> None:
    """Requires the engine's tokens in the trajectory. Only tokens that the engine sampled may be marked as sampled."""
    batch = collate([played.trajectory])
    sampled = batch["sampled"]
    for name, expected in (
        ("tokens", [token for e in played.exchanges for token in e.completion.tokens]),
        ("rollout_logprobs", [logprob for e in played.exchanges for logprob in e.completion.logprobs]),
        ("policy_version", [version for e in played.exchanges for version in e.completion.policy_versions]),
    ):
        assert batch[name][sampled].tolist() == expected, name
    assert not batch["rollout_logprobs"][~sampled].any()
    last_step = played.trajectory.steps[-1]
    last = played.exchanges[-1]
    assert tuple(last_step.tokens) == last.request.prompt_tokens + last.completion.tokens


# --- templates that keep earlier turns ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.keeps_thinking])
async def test_random_conversations_are_trained_on_exactly_as_the_engine_had_them(name: str):
    num_cut = 0
    for seed in range(NUM_CONVERSATIONS):
        rng = random.Random(seed)
        num_turns = rng.randint(1, 5)
        row = random_row(name, rng, num_turns)
        played = await play(name, row, random_script(tokenizer_of(name), rng))
        assert len(played.trajectory.steps) == 1
        assert len(played.exchanges) == num_turns
        require_exact(played)
        expected = expected_prompts(name, row, played.exchanges)
        assert [list(e.request.prompt_tokens) for e in played.exchanges] == expected
        step = played.trajectory.steps[0]
        for exchange in played.exchanges:
            have = exchange.request.prompt_tokens + exchange.completion.tokens
            assert tuple(step.tokens[: len(have)]) == have
        num_cut += sum(e.completion.stop_reason == "length" for e in played.exchanges)
    assert num_cut > NUM_CONVERSATIONS // 4


@pytest.mark.parametrize("step_wise", [False, True])
async def test_the_checks_notice_a_reencoded_conversation(monkeypatch: pytest.MonkeyPatch, step_wise: bool):
    tokenizer = tokenizer_of("chatml")

    def encode_anew(self: Any, prompt: Tokens, response: Tokens, observation: Any) -> Tokens:
        text = tokenizer.decode([*prompt, *response]) + "".join(message["content"] for message in observation)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for history in (ChatHistory, RenderedHistory):
        monkeypatch.setattr(history, "next_prompt", encode_anew)
    rng = random.Random(0)
    playing = play("chatml", random_row("chatml", rng, 3), random_script(tokenizer, rng), step_wise=step_wise)
    if not step_wise:
        with pytest.raises(AssertionError, match="must begin with the tokens before it"):
            await playing
        return
    played = await playing
    expected = expected_prompts("chatml", played.row, played.exchanges)
    assert [list(e.request.prompt_tokens) for e in played.exchanges] != expected
    assert len(merged(collate([played.trajectory]))[0].lengths) == 3


@pytest.mark.parametrize("name", ["chatml", "llama3"])
async def test_steps_of_an_appended_conversation_merge_into_one_sequence(name: str):
    for seed in range(30):
        rng, again = random.Random(seed), random.Random(seed)
        whole = await play(name, random_row(name, rng, 4), random_script(tokenizer_of(name), rng), route_layers=2)
        stepped = await play(
            name, random_row(name, again, 4), random_script(tokenizer_of(name), again), route_layers=2, step_wise=True
        )
        assert len(stepped.trajectory.steps) == 4
        one, (several, metrics) = collate([whole.trajectory]), merged(collate([stepped.trajectory]))
        saved_tokens, num_tokens = metrics["rollout/merged_tokens"]
        assert 0 < saved_tokens < num_tokens
        assert set(one) == set(several)
        for column in one:
            assert one[column].tolist() == several[column].tolist(), column


# --- templates that drop the thinking of earlier turns --------------------------------------------------------------


def thinking_script(tokenizer: Any, rng: random.Random) -> Callable[[GenerateRequest], list[int]]:
    """Answers mostly with thinking and an answer, as such models do, and now and then with random tokens."""
    anything = random_script(tokenizer, rng)

    def script(request: GenerateRequest) -> list[int]:
        if rng.random() < 0.3:
            return anything(request)
        text = f"<think>\nth0ught {rng.randint(0, 99)}\n</think>\n\nthe answer {rng.randint(0, 99)}"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    return script


def rendered_prompts(name: str, played: Played) -> list[str]:
    """The prompt of each turn as the template renders it, with the responses decoded to text."""
    tokenizer = tokenizer_of(name)
    messages, texts = list(played.row["prompt"]), []
    for exchange, observation in zip(played.exchanges, [*played.row["observations"], None], strict=True):
        texts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        said = tokenizer.decode(exchange.completion.tokens, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": said}, *(observation or [])]
    return texts


@pytest.mark.parametrize("name", ["thinking_chatml", "reasoning"])
async def test_each_step_of_a_template_that_drops_thinking_is_exact(name: str):
    tokenizer, num_sequences, num_turns = tokenizer_of(name), 0, 0
    for seed in range(NUM_CONVERSATIONS):
        rng = random.Random(seed)
        row = random_row(name, rng, rng.randint(1, 5))
        played = await play(
            name, row, thinking_script(tokenizer, rng), step_wise=True, params=SamplingParams(max_tokens=200)
        )
        require_exact(played)
        for step, exchange in zip(played.trajectory.steps, played.exchanges, strict=True):
            assert tuple(step.tokens) == exchange.request.prompt_tokens + exchange.completion.tokens
            assert sum(step.sampled) == len(exchange.completion.tokens)
        for exchange, text in zip(played.exchanges, rendered_prompts(name, played), strict=True):
            prompt = exchange.request.prompt_tokens
            is_rendered = list(prompt) == tokenizer(text, add_special_tokens=False)["input_ids"]
            goes_on = any(
                prompt[: len(e.request.prompt_tokens + e.completion.tokens)]
                == e.request.prompt_tokens + e.completion.tokens
                for e in played.exchanges
                if e is not exchange
            )
            assert is_rendered or goes_on
        batch, _ = merged(collate([played.trajectory]))
        sampled = [token for e in played.exchanges for token in e.completion.tokens]
        assert batch["tokens"][batch["sampled"]].tolist() == sampled
        num_sequences += batch.num_sequences
        num_turns += len(played.exchanges)
    assert NUM_CONVERSATIONS < num_sequences <= num_turns


async def test_later_prompts_lack_dropped_thinking_and_unchanged_turns_merge():
    tokenizer = tokenizer_of("thinking_chatml")
    thought = "<think>\nth0ught\n</think>\n\nthe answer"

    def script(request: GenerateRequest) -> list[int]:
        return [*tokenizer(thought)["input_ids"], tokenizer.eos_token_id]

    async def sequences_after(*roles: str) -> list[str]:
        row = {
            "prompt": [{"role": "user", "content": "?"}],
            "observations": [[{"role": role, "content": "go on"}] for role in roles],
            "heard": [],
        }
        played = await play("thinking_chatml", row, script, step_wise=True, params=SamplingParams(max_tokens=200))
        batch, _ = merged(collate([played.trajectory]))
        return [tokenizer.decode(tokens) for tokens in batch["tokens"].split(batch.lengths.tolist())]

    user = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    tool = "\n" + user("\n<tool_response>\ngo on\n</tool_response>").replace("user\n\n", "user\n")
    end = "<|im_end|>"
    assert await sequences_after("user") == [
        user("?") + thought + end,
        user("?") + "the answer" + end + "\n" + user("go on") + thought + end,
    ]
    # A tool's result belongs to the same query, and the template keeps the thinking of the current query.
    assert await sequences_after("tool", "tool") == [user("?") + thought + end + 2 * (tool + thought + end)]
    assert await sequences_after("tool", "user") == [
        user("?") + thought + end + tool + thought + end,
        user("?") + "the answer" + end + tool + "the answer" + end + "\n" + user("go on") + thought + end,
    ]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("thinking_chatml", {}, "drops the thinking of earlier turns"),
        ("thinking_chatml", {"enable_thinking": False}, "renders earlier turns differently once later turns follow"),
        ("reasoning", {}, "renders earlier turns differently once later turns follow"),
    ],
)
async def test_a_template_that_changes_turns_is_refused_unless_trajectories_are_step_wise(
    name: str, settings: Any, reason: str
):
    rng = random.Random(0)
    row = random_row(name, rng, 2) | {"observations": [[{"role": "user", "content": "again"}]]}
    with pytest.raises(ConfigError, match=f"rows:1: the model's chat template {reason}.*step_wise_trajectories=true"):
        await play(name, row, random_script(tokenizer_of(name), rng), template_kwargs=settings)


async def test_tool_turns_of_a_thinking_template_need_no_step_wise_trajectories():
    rng = random.Random(0)
    row = random_row("thinking_chatml", rng, 3) | {"observations": [[{"role": "tool", "content": "42"}]] * 2}
    played = await play("thinking_chatml", row, random_script(tokenizer_of("thinking_chatml"), rng))
    require_exact(played)
    assert len(played.trajectory.steps) == 1


# --- parts, routes, versions ----------------------------------------------------------------------------------------


async def test_aborted_samples_are_continued():
    tokenizer, num_parts = tokenizer_of("chatml"), 0
    for seed in range(100):
        rng = random.Random(seed)
        row, drawn = random_row("chatml", rng, 3), {}

        def script(request: GenerateRequest, rng: random.Random = rng, drawn: dict[str, Any] = drawn) -> list[int]:
            """What is left of the turn's response after the parts that earlier requests returned."""
            name, _, part = request.sample_id.partition(".")
            if not part:
                drawn[name] = (random_script(tokenizer, rng)(request), len(request.prompt_tokens))
            tokens, start = drawn[name]
            return tokens[len(request.prompt_tokens) - start :]

        def abort_after(request: GenerateRequest, rng: random.Random = rng) -> int | None:
            return rng.choice([None, 0, 1, 5])

        played = await play("chatml", row, script, abort_after=abort_after, route_layers=2)
        require_exact(played)
        turns: dict[str, list[Exchange]] = {}
        for exchange in played.exchanges:
            turns.setdefault(exchange.request.sample_id.partition(".")[0], []).append(exchange)
        num_parts += len(played.exchanges) - len(turns)
        assert len(turns) == 3
        for name, parts in turns.items():
            tokens = [token for part in parts for token in part.completion.tokens]
            assert tokens == drawn[name][0][:MAX_TOKENS]
            assert [part.request.sample_id for part in parts[1:]] == [f"{name}.{i}" for i in range(1, len(parts))]
            assert len({part.request.seed for part in parts}) == len(parts)
            for part in parts:
                given = len(part.request.prompt_tokens) - drawn[name][1]
                assert part.request.params.max_tokens == MAX_TOKENS - given
        assert [turn.stop_reason for turn in played.trajectory.turns].count("abort") == 0
        (step,) = played.trajectory.steps
        assert step.routed_experts is not None
        assert np.array_equal(step.routed_experts, expected_routes(step.tokens[:-1], 2, 0))
    assert num_parts > 100


async def test_a_request_that_the_engine_aborts_forever_fails():
    rng = random.Random(0)
    with pytest.raises(AssertionError, match=r"GenerationError: request '.*-0' was aborted 100 times without a token"):
        await play("chatml", random_row("chatml", rng, 1), lambda request: [5, 6], abort_after=lambda request: 0)


async def test_a_response_ends_where_a_stop_string_across_two_parts_ends():
    tokenizer = tokenizer_of("chatml")
    said = tokenizer("it is <answer>7</answer> and so on")["input_ids"]
    inside = next(i for i in range(len(said)) if "</answer>" in tokenizer.decode(said[:i])) - 2
    assert "</" in tokenizer.decode(said[:inside])
    start = []

    def script(request: GenerateRequest) -> list[int]:
        start.append(len(request.prompt_tokens))
        return said[len(request.prompt_tokens) - start[0] :]

    row = random_row("chatml", random.Random(0), 1)
    played = await play(
        "chatml",
        row,
        script,
        params=SamplingParams(max_tokens=100, stop=("</answer>",)),
        abort_after=lambda request: None if "." in request.sample_id else inside,
        route_layers=1,
    )
    (step,), (turn,) = played.trajectory.steps, played.trajectory.turns
    assert turn.response == "it is <answer>7</answer>"
    assert turn.stop_reason == "stop"
    assert len(step.tokens) - 1 == len(step.routed_experts)  # pyright: ignore[reportArgumentType]
    assert sum(step.sampled) == len(tokenizer(turn.response)["input_ids"])


async def test_each_token_has_its_version_and_later_routes_replace_earlier_ones():
    tokenizer = tokenizer_of("chatml")
    rng = random.Random(1)
    client_of: list[ScriptedClient] = []

    def script(request: GenerateRequest) -> list[int]:
        return [*rng.choices(range(100), k=3), tokenizer.eos_token_id]

    class Publishes(Talks):
        async def step(self, action: Any) -> StepResult:
            client_of[0].version += 1
            return await super().step(action)

    client = ScriptedClient(script, end_tokens=[tokenizer.eos_token_id], route_layers=3)
    client_of.append(client)
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: Publishes, limits=Limits(max_turns=8)),
    )
    row = random_row("chatml", rng, 3)
    request = GroupRequest(
        group_id=0, row=row, row_place="", num_samples=1, params=SamplingParams(), seed=0, start_version=0
    )
    (trajectory,) = await generator.generate(request)
    batch = collate([trajectory])
    assert batch["policy_version"][batch["sampled"]].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    tokens = batch["tokens"].tolist()
    assert np.array_equal(batch["routed_experts"][:-1].numpy(), expected_routes(tokens[:-1], 3, 2))
    assert batch["routed"].tolist() == [True] * (len(tokens) - 1) + [False]
    assert batch["rewards"][batch["rewards"] != 0].tolist() == [1.0, 2.0, 3.0]
    assert batch["sampled"][batch["rewards"] != 0].all()
