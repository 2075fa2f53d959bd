"""Conformance suite of generators. It checks that training gets exactly the tokens that the engine sampled.

A plug-in's author writes

    class TestMyGenerator(GeneratorConformance):
        row = {"prompt": "2+2=", "answer": "4"}

        def create_generator(self, client, tokenizer):
            return MyGenerator(client, tokenizer)

and runs pytest. The engine answers with arbitrary tokens of `tokenizer` (one token per character, no chat template).
The generator may send any number of requests.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.errors import DataError, GenerationError
from rl_core.interfaces import (
    Completion,
    GenerateRequest,
    Generator,
    GroupRequest,
    Sampler,
    SamplingParams,
    Trajectory,
    TrajectoryStep,
)
from rl_core.testing.scripted_engine import Exchange, ScriptedClient
from rl_transformers.testing.models import character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WAIT_S = 240.0
_NUM_SAMPLES = 6
_MAX_TOKENS = 12


class GeneratorConformance:
    """Base class of the suite. A subclass sets `row` and implements `create_generator`; pytest runs the tests on it."""

    row: ClassVar[Mapping[str, Any]]

    def create_generator(self, client: Sampler, tokenizer: PreTrainedTokenizerBase) -> Generator:
        """Creates a generator that samples from `client`. The tests play `row` with it."""
        # Not an abstract method: pytest silently skips abstract classes with all their tests.
        raise NotImplementedError(f"{type(self).__name__}: got no `create_generator`; implement it")

    def test_the_length_of_a_prompt_is_that_of_the_first_request(self) -> None:
        client = self._client()
        generator = self.create_generator(client, self._tokenizer)
        _ask(generator, self._request())
        assert generator.prompt_length(self.row) == len(client.exchanges[0].request.prompt_tokens)

    def test_a_row_without_a_prompt_is_a_data_error(self) -> None:
        generator = self.create_generator(self._client(), self._tokenizer)
        try:
            generator.prompt_length({"not_a_prompt": 1})
        except DataError:
            return
        raise AssertionError("prompt_length accepted a row that has no prompt; it must raise DataError")

    def test_what_the_engine_sampled_is_what_is_trained_on(self) -> None:
        client = self._client()
        _require_the_engines_tokens(self._play(client), client.exchanges)

    def test_a_sample_that_is_given_back_unfinished_is_continued(self) -> None:
        client = self._client(abort_after=_after_some_tokens(random.Random(1)))
        trajectories = self._play(client)
        assert any(exchange.completion.stop_reason == "abort" for exchange in client.exchanges)
        for trajectory in trajectories:
            assert all(step.stop_reason != "abort" for step in trajectory.steps), (
                "a sample that the engine aborted was not continued"
            )
        _require_the_engines_tokens(trajectories, client.exchanges)

    def test_every_request_has_an_id_of_its_own(self) -> None:
        client = self._client()
        generator = self.create_generator(client, self._tokenizer)
        for group_id in (4, 5):
            _ask(generator, self._request(group_id))
        names = [exchange.request.sample_id for exchange in client.exchanges]
        assert len(set(names)) == len(names)

    def test_samples_differ_in_their_seeds_and_repeat_with_the_runs_seed(self) -> None:
        seeds = []
        for _ in range(2):
            client = self._client()
            self._play(client)
            seeds.append(sorted(exchange.request.seed for exchange in client.exchanges))
        assert seeds[0] == seeds[1]
        assert len(set(seeds[0])) == len(seeds[0])

    def test_sampling_is_as_asked(self) -> None:
        client = self._client()
        self._play(client)
        for exchange in client.exchanges:
            params = exchange.request.params
            assert params.max_tokens <= _MAX_TOKENS
            assert (params.temperature, params.top_p) == (0.7, 0.9)

    def test_a_failing_request_is_its_own_samples_failure(self) -> None:
        client = _FailsAtTimes(self._script(), end_tokens=[self._eos])
        trajectories = self._play(client)
        failed = [trajectory for trajectory in trajectories if trajectory.failure is not None]
        assert 0 < len(failed) < len(trajectories)
        for trajectory in failed:
            assert "the engine is gone" in (trajectory.failure or ""), "a failure must contain the engine's error"
            assert "file:12" in (trajectory.failure or ""), "a failure must name the row"

    # --- what the tests share -----------------------------------------------------------------------------------------

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return character_tokenizer()

    @property
    def _eos(self) -> int:
        return int(self._tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]

    def _script(self) -> Callable[[GenerateRequest], Sequence[int]]:
        """Returns a script in which the response depends only on the request's seed."""
        others = [token for token in range(len(self._tokenizer)) if token != self._eos]

        def script(request: GenerateRequest) -> list[int]:
            rng = random.Random(request.seed)
            return [*rng.choices(others, k=rng.randint(1, 2 * _MAX_TOKENS)), self._eos]

        return script

    def _client(self, **settings: Any) -> ScriptedClient:
        return ScriptedClient(self._script(), end_tokens=[self._eos], **settings)

    def _request(self, group_id: int = 4) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            row=self.row,
            row_place="file:12",
            num_samples=_NUM_SAMPLES,
            params=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.7, top_p=0.9),
            seed=3,
            start_version=2,
        )

    def _play(self, client: Sampler) -> tuple[Trajectory, ...]:
        generator = self.create_generator(client, self._tokenizer)
        trajectories = _ask(generator, self._request())
        assert all(trajectory.start_version == 2 for trajectory in trajectories)
        return trajectories


class _FailsAtTimes(ScriptedClient):
    num_asked = 0

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.num_asked += 1
        if self.num_asked % 3 == 2:
            await super().generate(request)
            raise GenerationError("the engine is gone")
        return await super().generate(request)


def _after_some_tokens(rng: random.Random) -> Callable[[GenerateRequest], int | None]:
    return lambda request: rng.choice([None, 0, 1, 4])


def _require_the_engines_tokens(trajectories: Sequence[Trajectory], exchanges: Sequence[Exchange]) -> None:
    """Requires that every step consists of the tokens of a request and its completion, and that all tokens marked as
    sampled have the engine's ids, log-probs and versions."""
    # Two samples may begin with the same tokens, but all log-probs differ, so a log-prob identifies its completion.
    origins = {
        logprob: (number, offset)
        for number, exchange in enumerate(exchanges)
        for offset, logprob in enumerate(exchange.completion.logprobs)
    }
    num_trained: Counter[int] = Counter()
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    for trajectory in trajectories:
        assert trajectory.failure is None, trajectory.failure
    for step in steps:
        num_trained += _trained_tokens(step, exchanges, origins)
    for number, exchange in enumerate(exchanges):
        tokens = _tokens_of(exchange)
        # A generator may discard a completion. If a step contains it, each of its tokens must be trained on once.
        if any(tokens == tuple(step.tokens[: len(tokens)]) for step in steps):
            assert num_trained[number] == len(exchange.completion.tokens), "each sampled token must be trained on once"


def _trained_tokens(
    step: TrajectoryStep, exchanges: Sequence[Exchange], origins: Mapping[float, tuple[int, int]]
) -> Counter[int]:
    """Returns how many sampled tokens of each exchange the step trains on, by index of the exchange."""
    num_trained: Counter[int] = Counter()
    assert step.sampled[-1], "a step must end with a sampled token"
    for position, is_sampled in enumerate(step.sampled):
        logprob, version = step.rollout_logprobs[position], step.policy_version[position]
        if not is_sampled:
            assert (logprob, version) == (0.0, -1), "a token that was not sampled must have log-prob 0 and version -1"
            continue
        assert logprob in origins, "the log-prob of a sampled token is not the engine's"
        number, offset = origins[logprob]
        exchange = exchanges[number]
        assert position == len(exchange.request.prompt_tokens) + offset, "the log-prob belongs to another token"
        assert version == exchange.completion.policy_versions[offset], "the version belongs to another token"
        num_trained[number] += 1
    for number in num_trained:
        tokens = _tokens_of(exchanges[number])
        assert tokens == tuple(step.tokens[: len(tokens)]), (
            "the step does not begin with the tokens of the request and its answer"
        )
    last = exchanges[origins[step.rollout_logprobs[-1]][0]]
    assert tuple(step.tokens) == _tokens_of(last), (
        "a step must consist of the tokens of its last request and the answer"
    )
    return num_trained


def _tokens_of(exchange: Exchange) -> tuple[int, ...]:
    return (*exchange.request.prompt_tokens, *exchange.completion.tokens)


def _ask(generator: Generator, request: GroupRequest) -> tuple[Trajectory, ...]:
    """Sends the request. Requires one trajectory per sample, in order, each with steps or a failure."""
    trajectories = asyncio.run(asyncio.wait_for(generator.generate(request), _WAIT_S))
    names = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    assert names == [(request.group_id, index) for index in range(request.num_samples)]
    for trajectory in trajectories:
        assert bool(trajectory.steps) == (trajectory.failure is None), trajectory.failure
    return trajectories
