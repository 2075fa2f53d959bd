"""The environment generator: trajectories contain exactly what the engine sampled, and a sample's failure is recorded,
not raised.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import ClassVar

import pytest

from rl_core.config import from_mapping, generator_spec
from rl_core.errors import ConfigError, DataError, GenerationError
from rl_core.interfaces import Completion, Environment, GroupRequest, SamplingParams, StepResult
from rl_rollout.chat import TokenCodec, load_tokenizer
from rl_rollout.generator import EnvironmentGenerator, Episodes, context_window, sample_seed
from rl_transformers.testing.models import character_tokenizer, make_checkpoint

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% if think %}think{% endif %}{% endif %}"
)


class EchoClient:
    """Answers `4` and the end of sequence; records all requests, and the largest number in flight at once. Answers no
    request until `meeting` requests are in flight at once.
    """

    def __init__(self, tokenizer, stop_reason="stop", meeting=1):
        self.answer = (*tokenizer("4")["input_ids"], tokenizer.eos_token_id)
        self.stop_reason = stop_reason
        self.requests = []
        self.running = self.most_running = 0
        self.meeting, self.have_met = meeting, asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        if self.running >= self.meeting:
            self.have_met.set()
        await asyncio.wait_for(self.have_met.wait(), 60)
        await asyncio.sleep(0.001)
        self.running -= 1
        return (
            Completion(
                tokens=self.answer, logprobs=(-0.5, -0.25), policy_versions=(7, 8), stop_reason=self.stop_reason
            ),
        )


class Sums(Environment):
    """Rewards a response that equals the row's answer, and records the calls of its methods."""

    calls: ClassVar[list[str]] = []
    """A list, because threads can append to it at the same time; counters would lose calls."""

    def __init__(self, row, options):
        self.row, self.options = row, options

    async def reset(self):
        self.calls.append("reset")
        return self.row["prompt"]

    async def step(self, action):
        self.calls.append("step")
        return StepResult(
            reward=float(action.text == self.row["answer"]), done=True, metrics={"length": len(action.text)}
        )

    async def close(self):
        self.calls.append("close")


@pytest.fixture
def tokenizer():
    Sums.calls.clear()
    return character_tokenizer()


def generator_of(tokenizer, client, environment=Sums, **settings):
    codec = TokenCodec(tokenizer, chat_template_kwargs={"think": True})
    return EnvironmentGenerator(client, codec, Episodes(environment_of=lambda row: environment, **settings))


def request_of(num_samples=3, **row):
    return GroupRequest(
        group_id=5,
        row={"prompt": "2+2=", "answer": "4", **row},
        row_place="train.parquet:12",
        num_samples=num_samples,
        params=SamplingParams(max_tokens=4),
        seed=1,
        start_version=7,
    )


async def test_a_trajectory_holds_the_prompt_and_exactly_what_the_engine_returned(tokenizer):
    client = EchoClient(tokenizer)
    trajectories = await generator_of(tokenizer, client).generate(request_of())
    assert [(t.group_id, t.sample_index, t.start_version) for t in trajectories] == [(5, i, 7) for i in range(3)]
    (step,) = trajectories[0].steps
    assert list(step.tokens) == tokenizer("2+2=")["input_ids"] + list(client.answer)
    assert list(step.sampled) == [False] * 4 + [True] * 2
    assert list(step.rollout_logprobs) == [0, 0, 0, 0, -0.5, -0.25]
    assert list(step.policy_version) == [-1, -1, -1, -1, 7, 8]
    assert (step.reward, step.stop_reason) == (1.0, "stop")
    assert (trajectories[0].prompt_text, trajectories[0].response_text) == ("2+2=", "4")
    assert trajectories[0].metrics == {"length": 1}
    assert Counter(Sums.calls) == {"reset": 3, "step": 3, "close": 3}


async def test_every_sample_has_its_own_seed_and_id(tokenizer):
    """Environments run in threads, so the requests of a group arrive in any order."""
    client = EchoClient(tokenizer)
    generator = generator_of(tokenizer, client)
    await generator.generate(request_of())
    await generator.generate(request_of())
    assert sorted(r.seed for r in client.requests) == sorted(2 * [sample_seed(1, 5, i) for i in range(3)])
    assert len({r.sample_id for r in client.requests}) == 6


def test_sample_seeds_never_change_between_versions_and_machines():
    assert sample_seed(0, 0, 0) == 759540517790923586
    assert len({sample_seed(s, g, i) for s in range(5) for g in range(12) for i in range(12)}) == 5 * 12 * 12


async def test_a_prompt_is_rendered_and_encoded_once_for_its_group(tokenizer):
    calls = []

    class RecordingCodec(TokenCodec):
        def prompt_text(self, prompt):
            calls.append("prompt_text")
            return super().prompt_text(prompt)

        def encode_text(self, text):
            calls.append("encode_text")
            return super().encode_text(text)

    codec = RecordingCodec(tokenizer, chat_template_kwargs={})
    episodes = Episodes(environment_of=lambda row: Sums)
    await EnvironmentGenerator(EchoClient(tokenizer), codec, episodes).generate(request_of(num_samples=16))
    assert calls == ["prompt_text", "encode_text"]


async def test_no_more_episodes_run_than_allowed(tokenizer):
    client = EchoClient(tokenizer, meeting=4)
    generator = generator_of(tokenizer, client, max_concurrency=4)
    await asyncio.gather(*[generator.generate(request_of(num_samples=8)) for _ in range(3)])
    assert client.most_running == 4


class Raises(Sums):
    async def step(self, action):
        raise KeyError("no such answer")


class NoNumber(Sums):
    async def step(self, action):
        return StepResult(reward=float("nan"), done=True)


class NoResult(Sums):
    async def step(self, action):
        return 1.0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Raises, "train.parquet:12: KeyError: 'no such answer'"),
        (NoNumber, "train.parquet:12: DataError: the environment's reward is nan"),
        (NoResult, "train.parquet:12: DataError: the environment's step returned float"),
    ],
)
async def test_a_broken_environment_is_a_failure_on_the_trajectory_and_is_closed(tokenizer, environment, message):
    trajectories = await generator_of(tokenizer, EchoClient(tokenizer), environment).generate(request_of())
    assert all(t.failure.startswith(message) and not t.steps for t in trajectories), trajectories
    assert Sums.calls.count("close") == 3


async def test_one_failing_sample_leaves_the_others_alone(tokenizer):
    class FailsOnce(Sums):
        placement = "in_process"  # samples take their steps in order

        async def step(self, action):
            if self.calls.count("step") == 1:
                self.calls.append("step")
                raise OSError("the judge did not answer")
            return await super().step(action)

    trajectories = await generator_of(tokenizer, EchoClient(tokenizer), FailsOnce).generate(request_of())
    line = FailsOnce.step.__code__.co_firstlineno + 3
    failure = f"train.parquet:12: OSError: the judge did not answer (test_generator.py:{line})"
    assert [t.failure for t in trajectories] == [None, failure, None]


async def test_a_refused_prompt_is_a_failure(tokenizer):
    class Refuses(EchoClient):
        async def generate(self, request):
            raise GenerationError("4 prompt tokens exceed the model's 3 positions")

    (trajectory,) = await generator_of(tokenizer, Refuses(tokenizer)).generate(request_of(num_samples=1))
    assert trajectory.failure == "train.parquet:12: GenerationError: 4 prompt tokens exceed the model's 3 positions"


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()], ids=["SystemExit", "CancelledError"])
async def test_an_engine_client_that_gives_up_is_named_and_its_samples_fail(tokenizer, error):
    class GivesUp(EchoClient):
        async def generate(self, request):
            raise error

    trajectories = await generator_of(tokenizer, GivesUp(tokenizer)).generate(request_of())
    assert [one.failure_kind for one in trajectories] == 3 * ["ForeignCodeError"]
    assert f"the engine client GivesUp raised {error!r} (test_generator.py:" in trajectories[0].failure


async def test_the_cancellation_of_a_group_is_raised_and_closes_its_environments(tokenizer):
    all_asked = asyncio.Event()

    class Hangs(EchoClient):
        async def generate(self, request):
            self.requests.append(request)
            if len(self.requests) == 3:
                all_asked.set()
            await asyncio.sleep(1000)

    task = asyncio.ensure_future(generator_of(tokenizer, Hangs(tokenizer)).generate(request_of()))
    await asyncio.wait_for(all_asked.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Sums.calls.count("close") == 3


@pytest.mark.parametrize(("stop_reason", "reward"), [("stop", 1.0), ("length", 0.0)])
async def test_a_response_that_did_not_end_by_itself_can_get_reward_zero(tokenizer, stop_reason, reward):
    client = EchoClient(tokenizer, stop_reason)
    (trajectory,) = await generator_of(tokenizer, client, zero_reward_on_non_stop=True).generate(request_of(1))
    assert trajectory.reward == reward


# --- prompts --------------------------------------------------------------------------------------------------------


async def test_chat_messages_go_through_the_template_with_its_settings(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    client = EchoClient(tokenizer)
    messages = [{"role": "user", "content": "2+2="}]
    (trajectory,) = await generator_of(tokenizer, client).generate(request_of(1, prompt=messages))
    text = "u:2+2=\na:think"
    assert list(client.requests[0].prompt_tokens) == tokenizer(text.replace(":", "<unk>"))["input_ids"]
    assert trajectory.failure is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2="}, "no column 'prompt'; it has question"),
        ({"prompt": ""}, "has no tokens"),
        ({"prompt": None}, "text or a list of messages"),
        ({"prompt": [{"content": "2+2="}]}, "text or a list of messages"),
        ({"prompt": [{"role": "user", "content": "2"}]}, "no chat template"),
    ],
)
def test_a_row_without_a_usable_prompt_is_a_data_error(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        generator_of(tokenizer, EchoClient(tokenizer)).prompt_length(row)


def test_a_template_that_refuses_a_conversation_is_a_data_error(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses the messages: TemplateError: roles must alternate"):
        TokenCodec(tokenizer, chat_template_kwargs={}).encode([{"role": "user", "content": "2"}])


def test_the_length_of_a_prompt_is_counted_in_tokens(tokenizer):
    assert generator_of(tokenizer, EchoClient(tokenizer)).prompt_length({"prompt": "12+34="}) == 6


def test_a_model_directory_without_a_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="contains no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_the_context_window_comes_from_the_engine_or_the_model(tmp_path):
    make_checkpoint(tmp_path / "model")
    values = {"trainer.policy.model.path": str(tmp_path / "model")}
    assert context_window(generator_spec(from_mapping(values))[1]) == 256
    limit = {"generator.inference_engine.engine_init_kwargs": {"max_model_len": 100}}
    assert context_window(generator_spec(from_mapping(values | limit))[1]) == 100
    # With −1, vLLM chooses the limit.
    chosen = {"generator.inference_engine.engine_init_kwargs": {"max_model_len": -1}}
    assert context_window(generator_spec(from_mapping(values | chosen))[1]) == 256
