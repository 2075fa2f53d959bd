"""Episodes of several turns: what ends them, what is recorded of them, and how faulty environments are handled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_core.interfaces import Environment, GenerateRequest, StepResult, Trajectory
from rl_core.reports.samples import sample_of
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.loop.evaluation import trajectory_means
from rl_core.trainer.loop.group_selection import Selection
from rl_core.trainer.update.collate import collate
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer
from tests.rollout.requests import one_sample_of

TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id


class Counts(Environment):
    """Its observations are `1,`, `2,` …; it is done when the response contains `b`. Each turn earns 0.5."""

    def __init__(self, row: Any, options: Any) -> None:
        self.turn = 0
        self.closed = row.setdefault("closed", [])

    async def reset(self) -> Any:
        return "count= "

    async def step(self, action: Any) -> StepResult:
        self.turn += 1
        done = "b" in action.text
        return StepResult(
            reward=0.5, done=done, observation=None if done else f"{self.turn},", metrics={"turns": float(self.turn)}
        )

    async def close(self) -> None:
        self.closed.append(self.turn)


def saying(*responses: str) -> ScriptedClient:
    """An engine that answers turn by turn with `responses`, each followed by the end of sequence."""

    def script(request: GenerateRequest) -> list[int]:
        turn = int(request.sample_id.rpartition("-")[2])
        return [*TOKENIZER(responses[turn])["input_ids"], EOS]

    return ScriptedClient(script, end_tokens=[EOS])


async def play(
    client: ScriptedClient,
    environment: Any = Counts,
    *,
    max_tokens: int = 8,
    row: Any = None,
    tokenizer: Any = TOKENIZER,
    **settings: Any,
) -> Trajectory:
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment, **{"limits": Limits(max_turns=4), **settings}),
    )
    request = one_sample_of({"prompt": ""} if row is None else row, max_tokens=max_tokens)
    (trajectory,) = await generator.generate(request)
    return trajectory


def masked(trajectory: Trajectory) -> str:
    """The sequence as text: sampled tokens in capital letters, the end of sequence as `$`."""
    (step,) = trajectory.steps
    text = [TOKENIZER.decode([token]).replace("<eos>", "$") for token in step.tokens]
    return "".join(t.upper() if is_sampled else t for t, is_sampled in zip(text, step.sampled, strict=True))


async def test_an_episode_of_text_is_one_sequence_with_observations_masked():
    client = saying("a", "aa", "b")
    trajectory = await play(client)
    assert masked(trajectory) == "count= A$1,AA$2,B$"
    assert trajectory.end == "done"
    assert trajectory.metrics == {"turns": 3.0}
    assert trajectory.reward == 1.5
    assert [(turn.response, turn.observation, turn.reward) for turn in trajectory.turns] == [
        ("a", "1,", 0.5),
        ("aa", "2,", 0.5),
        ("b", None, 0.5),
    ]
    batch = collate([trajectory])
    assert batch["rewards"].nonzero().flatten().tolist() == [8, 13, 17]
    assert trajectory_means([trajectory])["response_length"] == 2 + 3 + 2
    requests = [exchange.request for exchange in client.exchanges]
    assert len({request.session_id for request in requests}) == 1
    assert [request.sample_id for request in requests] == [f"{requests[0].session_id}-{turn}" for turn in range(3)]
    assert len({request.seed for request in requests}) == 3


async def test_steps_have_their_own_rewards_and_their_lengths_are_added_up():
    trajectory = await play(saying("a", "aa", "b"), step_wise=True)
    assert [step.reward for step in trajectory.steps] == [0.5, 0.5, 0.5]
    assert trajectory_means([trajectory])["response_length"] == 2 + 3 + 2
    batch = collate([trajectory])
    assert batch["step_index"].tolist() == [0, 1, 2]
    assert batch["is_last_step"].tolist() == [False, False, True]
    assert batch["trajectory_id"].tolist() == [0, 0, 0]


async def test_a_single_turn_records_no_token_rewards():
    trajectory = await play(saying("b"))
    assert trajectory.steps[0].token_rewards is None
    assert sample_of(trajectory, step=1, purpose="train").turns is None


async def test_max_turns_ends_an_episode_and_keeps_its_reward():
    trajectory = await play(saying("a", "a", "a", "a", "a"))
    assert masked(trajectory) == "count= A$1,A$2,A$3,A$"
    assert trajectory.end == "max_turns"
    assert trajectory.reward == 2.0
    assert not trajectory.is_cut
    assert trajectory.turns[-1].observation is None


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        # "count= a$1," has 11 tokens, "count= a$1,a$2," has 15.
        ({"max_input_length": 11}, "count= A$1,A$"),
        ({"max_input_length": 10}, "count= A$"),
        ({"context_window": 15}, "count= A$1,A$"),
        ({"context_window": 16}, "count= A$1,A$2,A"),
    ],
)
async def test_a_conversation_that_outgrows_the_context_is_cut_and_marked(limits: dict[str, int], text: str):
    trajectory = await play(saying("a", "a", "a", "a"), limits=Limits(max_turns=4, **limits))
    assert trajectory.failure is None
    assert masked(trajectory) == text
    assert trajectory.is_cut
    assert (trajectory.end, trajectory.steps[-1].stop_reason) == ("context", "stop" if text.endswith("$") else "length")
    assert sample_of(trajectory, step=1, purpose="train").end == "context"


async def test_a_cut_episode_can_get_reward_zero_and_be_left_out_of_training():
    settings = {"limits": Limits(max_turns=4, max_input_length=11)}
    trajectory = await play(saying("a", "a"), zero_reward_on_non_stop=True, **settings)
    assert trajectory.reward == 0.0
    assert not collate([trajectory])["rewards"].any()
    kept = await play(saying("b"), zero_reward_on_non_stop=True, **settings)
    assert kept.reward == 0.5
    selection = Selection(
        min_replace_ratio=None, max_rejected_batches=1, mask_zero_variance=False, mask_overlong=True, seed=0
    )
    batch = selection.masked(collate([trajectory, kept]), [trajectory, kept])
    assert batch["loss_mask"].sum() == 2
    assert batch["sampled"].sum() == 6


async def test_a_response_that_is_cut_by_its_length_does_not_end_the_episode():
    trajectory = await play(saying("aaaa", "b"), max_tokens=2)
    assert masked(trajectory) == "count= AA1,B$"
    assert [turn.stop_reason for turn in trajectory.turns] == ["length", "stop"]
    assert not trajectory.is_cut


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (None, "observations must be text; got None"),
        ([{"role": "user", "content": "x"}], "the episode began with text, so the environment's observations must be"),
    ],
)
async def test_an_observation_that_does_not_fit_is_a_failure(observation: Any, message: str):
    class Odd(Counts):
        async def step(self, action: Any) -> StepResult:
            return StepResult(reward=0.0, done=False, observation=observation)

    assert message in ((await play(saying("a", "a"), Odd)).failure or "")


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (None, "an observation must be text or a list of messages"),
        ([{"role": "assistant", "content": "x"}], "a message of the role 'assistant'"),
        ([{"role": "user"}], "an observation must be text or a list of messages"),
    ],
)
async def test_an_invalid_observation_of_a_chat_is_a_failure(observation: Any, message: str):
    class Odd(Counts):
        async def reset(self) -> Any:
            return [{"role": "user", "content": "x"}]

        async def step(self, action: Any) -> StepResult:
            return StepResult(reward=0.0, done=False, observation=observation)

    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert message in ((await play(saying("a", "a"), Odd, tokenizer=tokenizer)).failure or "")


async def test_a_text_observation_of_a_chat_is_a_users_message():
    class Chats(Counts):
        async def reset(self) -> Any:
            return [{"role": "user", "content": "x"}]

    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}.{% endfor %}a="
    )
    trajectory = await play(saying("a", "b"), Chats, tokenizer=tokenizer)
    assert masked(trajectory) == "u=x.a=A$.u=1,.a=B$"


async def test_one_turn_is_the_default_and_the_error_names_max_turns():
    trajectory = await play(saying("a"), limits=Limits())
    assert "wants another turn (done=False), but generator.max_turns is 1" in (trajectory.failure or "")


async def test_an_environment_that_does_not_answer_fails_its_sample_in_time():
    class Hangs(Counts):
        placement = "in_process"  # here only a call that waits has a deadline, so `reset` cannot miss it

        async def step(self, action: Any) -> StepResult:
            await asyncio.sleep(1000)
            raise AssertionError

    row: dict[str, Any] = {"prompt": ""}
    limits = Limits(max_turns=4, environment_timeout_s=0.05)
    trajectory = await play(saying("a"), Hangs, row=row, limits=limits)
    assert trajectory.failure == (
        "rows:1: DeadlineError: waited 0.05 s (environment.timeout_s) for the environment's `step`"
    )
    assert row["closed"] == [0]
