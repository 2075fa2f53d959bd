"""Conformance suite of generators: what the engine sampled is what is trained on, and nothing is lost.

A plug-in's author writes

    class TestMyGenerator(GeneratorConformance):
        row = {"prompt": "2+2=", "answer": "4"}

        def create_generator(self, client, tokenizer):
            return MyGenerator(client, tokenizer)

and runs pytest. The engine answers with arbitrary tokens of `tokenizer` (one token per character, no chat template);
the generator may ask it as often as it likes.
"""

from __future__ import annotations

import asyncio
import random
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
)
from rl_core.testing.models import character_tokenizer
from rl_core.testing.scripted_engine import Exchange, ScriptedClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WAIT_S = 60.0
_NUM_SAMPLES = 6
_MAX_TOKENS = 12


class GeneratorConformance:
    """Subclass, set `row` and `create_generator`, run pytest."""

    row: ClassVar[Mapping[str, Any]]

    def create_generator(self, client: Sampler, tokenizer: PreTrainedTokenizerBase) -> Generator:
        """A generator that plays `row` against `client`."""
        # Not an abstract method: pytest passes over abstract classes in silence, with all their tests.
        raise NotImplementedError(f"{type(self).__name__} has no create_generator")

    def test_the_length_of_a_prompt_is_that_of_the_first_request(self) -> None:
        client = self._client()
        generator = self.create_generator(client, self._tokenizer)
        assert isinstance(generator, Generator)
        _ask(generator, self._request())
        assert generator.prompt_length(self.row) == len(client.exchanges[0].request.prompt_tokens)

    def test_a_row_without_a_prompt_is_a_data_error(self) -> None:
        generator = self.create_generator(self._client(), self._tokenizer)
        try:
            generator.prompt_length({"not_a_prompt": 1})
        except DataError:
            return
        raise AssertionError("prompt_length accepts a row that has no prompt")

    def test_what_the_engine_sampled_is_what_is_trained_on(self) -> None:
        client = self._client()
        for trajectory in self._play(client):
            _require_the_engines_tokens(trajectory, client.exchanges)

    def test_a_sample_that_is_given_back_unfinished_is_continued(self) -> None:
        client = self._client(abort_after=_after_some_tokens(random.Random(1)))
        trajectories = self._play(client)
        assert any(exchange.completion.stop_reason == "abort" for exchange in client.exchanges)
        for trajectory in trajectories:
            assert all(step.stop_reason != "abort" for step in trajectory.steps), "a part was taken for the whole"
            _require_the_engines_tokens(trajectory, client.exchanges)

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
            assert "the engine is gone" in (trajectory.failure or ""), "a failure says why"
            assert "file:12" in (trajectory.failure or ""), "a failure names the row"

    # --- what the tests share -----------------------------------------------------------------------------------------

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return character_tokenizer()

    @property
    def _eos(self) -> int:
        return int(self._tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]

    def _script(self) -> Callable[[GenerateRequest], Sequence[int]]:
        """The same for the same request, whatever comes before it."""
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
    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        if len(self.exchanges) % 3 == 1:
            await super().generate(request)
            raise GenerationError("the engine is gone")
        return await super().generate(request)


def _after_some_tokens(rng: random.Random) -> Callable[[GenerateRequest], int | None]:
    return lambda request: rng.choice([None, 0, 1, 4])


def _require_the_engines_tokens(trajectory: Trajectory, exchanges: Sequence[Exchange]) -> None:
    """Every step is a request and its answer; what is marked as sampled was sampled, in the engine's numbers."""
    assert trajectory.failure is None, trajectory.failure
    # An answer without a token would stand in the place of the part before it.
    by_tokens = {(*e.request.prompt_tokens, *e.completion.tokens): e for e in exchanges if e.completion.tokens}
    for step in trajectory.steps:
        assert tuple(step.tokens) in by_tokens, "a step's tokens are those of its last request and its answer"
        inside = [e for tokens, e in by_tokens.items() if tokens == tuple(step.tokens[: len(tokens)])]
        logprobs, versions = [0.0] * len(step.tokens), [-1] * len(step.tokens)
        known = [False] * len(step.tokens)
        for exchange in inside:
            start = len(exchange.request.prompt_tokens)
            place = slice(start, start + len(exchange.completion.tokens))
            logprobs[place], versions[place] = exchange.completion.logprobs, exchange.completion.policy_versions
            known[place] = [True] * len(exchange.completion.tokens)
        sampled = list(step.sampled)
        assert sampled[-1], "a step ends with a sampled token"
        assert all(mine <= theirs for mine, theirs in zip(sampled, known, strict=True)), "not all of it was sampled"
        # A turn may be another step's, but a turn is never trained on in part.
        for exchange in inside:
            start = len(exchange.request.prompt_tokens)
            part = sampled[start : start + len(exchange.completion.tokens)]
            assert len(set(part)) <= 1, "a part of a response is marked as sampled, another is not"
        expected = [value if flag else 0.0 for value, flag in zip(logprobs, sampled, strict=True)]
        assert list(step.rollout_logprobs) == expected
        assert list(step.policy_version) == [v if flag else -1 for v, flag in zip(versions, sampled, strict=True)]
    num_sampled = sum(len(e.completion.tokens) for e in exchanges if _is_of(e, trajectory))
    num_trained = sum(sum(step.sampled) for step in trajectory.steps)
    assert num_trained == num_sampled, "each sampled token is trained on once"


def _is_of(exchange: Exchange, trajectory: Trajectory) -> bool:
    tokens = (*exchange.request.prompt_tokens, *exchange.completion.tokens)
    return any(tokens == tuple(step.tokens[: len(tokens)]) for step in trajectory.steps)


def _ask(generator: Generator, request: GroupRequest) -> tuple[Trajectory, ...]:
    """One trajectory per sample, in order; each has steps or says why it failed."""
    trajectories = asyncio.run(asyncio.wait_for(generator.generate(request), _WAIT_S))
    names = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    assert names == [(request.group_id, index) for index in range(request.num_samples)]
    for trajectory in trajectories:
        assert bool(trajectory.steps) == (trajectory.failure is None), trajectory.failure
    return trajectories
