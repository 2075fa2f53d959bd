"""Conformance suite of inference engines. It checks that log-probs match the model, that no request is lost, and that
each completion names the weight versions that generated it.

A plug-in's author writes

    class TestMyEngine(InferenceClientConformance):
        transport = my_transport

        async def create_client(self, model_path):
            return await MyEngine.start(model_path)

and runs pytest. The engine must serve `model_path` (a tiny Qwen3 with one token per character) in float32. It is
started once for the class; its log-probs are compared with the log-probs of a plain forward pass of the same weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from rl_core.errors import GenerationError, WeightSyncError
from rl_core.interfaces import (
    Completion,
    GenerateRequest,
    InferenceClient,
    Manifest,
    Rendezvous,
    SamplingParams,
    StopReason,
    WeightTransport,
)
from rl_core.rank_kit.weight_buckets import pack_buckets, require_same, tensor_record
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.reference_engine import slow_distribution

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
_WAIT_S = 240.0
_PROMPTLY_S = 60.0
_MAX_POSITIONS = 256
_LONG = SamplingParams(max_tokens=200, ignore_eos=True)
_TRUNCATED = (
    SamplingParams(max_tokens=8, top_k=3),
    SamplingParams(max_tokens=8, top_p=0.6),
    SamplingParams(max_tokens=8, min_p=0.3),
    SamplingParams(max_tokens=8, temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
)
_TRIES = 3
"""Number of tries of a check that needs a request under way. On a busy machine a request may finish before the pause or
the abort. Such a try tests nothing, so another follows."""
_METHODS_OF = {
    "can_sleep": ("sleep", "wake"),
    "can_score": ("score", "vocab_size"),
    "can_prepare_weights": ("prepare_weights",),
}


@attrs.define(eq=False)
class Bench:
    """The engine under test and the model it should serve."""

    client: InferenceClient
    transport: WeightTransport
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    runner: asyncio.Runner
    version: int = -1
    """Number of the weight version that the engine should serve; -1: the weights with which it started."""
    _ids: Iterator[int] = attrs.field(factory=itertools.count)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine and returns its result. Raises TimeoutError after the suite's deadline."""
        return self.runner.run(asyncio.wait_for(coroutine, _WAIT_S))

    def request(self, text: str, params: SamplingParams, *, seed: int = 0, num_samples: int = 1) -> GenerateRequest:
        """A request with a new id for the tokens of `text`."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
        return GenerateRequest(
            sample_id=f"sample-{next(self._ids)}",
            prompt_tokens=tuple(tokens),
            params=params,
            seed=seed,
            num_samples=num_samples,
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def generate(self, *requests: GenerateRequest) -> list[tuple[Completion, ...]]:
        """Sends all requests concurrently. Returns the completions of each request, in the order of the requests."""

        async def together() -> list[tuple[Completion, ...]]:
            return await asyncio.gather(*[self.client.generate(request) for request in requests])

        return self.run(together())

    @torch.no_grad()
    def logits_RV(self, request: GenerateRequest, completion: Completion) -> Tensor:
        """Logits that predict each response token, float64 [R, V], from one forward pass."""
        model: Any = self.model
        tokens = torch.tensor([request.prompt_tokens + completion.tokens])
        return model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt_tokens) - 1 : -1].double()

    def own_logprobs_R(self, request: GenerateRequest, completion: Completion) -> Tensor:
        """The model's log-prob of each response token at temperature 1, float64 [R]."""
        logprobs_RV = self.logits_RV(request, completion).log_softmax(-1)
        return logprobs_RV.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]

    def perturbed(self, seed: int) -> dict[str, Tensor]:
        """The model's weights plus Gaussian noise of standard deviation 0.1."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: parameter + 0.1 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in self.model.named_parameters()
        }

    async def publish(self, tensors: dict[str, Tensor], version: int) -> tuple[Manifest, Manifest]:
        """Sends the weights and updates the engine concurrently, as the trainer does. Returns the manifests of the
        sender and of the engine."""
        rendezvous = self.transport.open(num_ranks=1, num_engines=1)
        sender = self.transport.sender(rendezvous, 0, 1)
        buckets = pack_buckets(tensors.items(), 1 << 14)
        try:
            sent, arrived = await asyncio.gather(
                asyncio.to_thread(sender.send, buckets, version), self.client.update_weights(rendezvous, version)
            )
        finally:
            self.transport.close(rendezvous)
        return sent, arrived

    @torch.no_grad()
    def now_serving(self, tensors: dict[str, Tensor], version: int) -> None:
        """Copies the published weights into the model with which the engine is compared."""
        self.version = version
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])

    async def running(self, *requests: GenerateRequest) -> list[asyncio.Task[tuple[Completion, ...]]]:
        """Starts requests. Returns their tasks when the engine is working on one of them, or when all are done."""
        tasks = [asyncio.ensure_future(self.client.generate(request)) for request in requests]
        while not (await self.client.health()).num_running and not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
        return tasks


class InferenceClientConformance:
    """Base class of the suite. A subclass sets `transport` and implements `create_client`; pytest then runs the tests
    on it."""

    transport: ClassVar[WeightTransport]
    """The transport that sends new weights to the engine. Every subclass must set it."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference of a log-prob from a plain forward pass; the default is right for float32."""

    returns_kept_tokens: ClassVar[bool] = False
    """Whether the engines of `create_client` return `Completion.kept_tokens`."""

    async def create_client(self, model_path: str) -> InferenceClient:
        """Creates an engine that serves the checkpoint in the directory `model_path` in float32."""
        # Not an abstract method: pytest silently skips abstract classes with all their tests.
        raise NotImplementedError(
            f"{type(self).__name__}: got neither `create_client` nor a fixture `bench`; implement one"
        )

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        path = make_checkpoint(tmp_path_factory.mktemp("engine") / "model", max_position_embeddings=_MAX_POSITIONS)
        with asyncio.Runner() as runner:
            client = runner.run(asyncio.wait_for(cls().create_client(str(path)), _WAIT_S))
            yield make_bench(client, cls.transport, str(path), runner)
            runner.run(asyncio.wait_for(client.close(), _WAIT_S))

    # --- numbers --------------------------------------------------------------------------------------------------

    def test_logprobs_are_the_models_own(self, bench: Bench) -> None:
        params = SamplingParams(max_tokens=12)
        requests = [bench.request(text, params, seed=i) for i, text in enumerate(_prompts(24))]
        for request, (completion,) in zip(requests, bench.generate(*requests), strict=True):
            self._require_close(completion.logprobs, bench.own_logprobs_R(request, completion))

    @pytest.mark.parametrize(
        "params",
        [SamplingParams(max_tokens=8, temperature=0.7), *_TRUNCATED],
        ids=["temperature", "top_k", "top_p", "min_p", "all"],
    )
    def test_logprobs_are_those_of_the_distribution_sampled_from(self, bench: Bench, params: SamplingParams) -> None:
        requests = [bench.request(text, params, seed=i) for i, text in enumerate(_prompts(6))]
        for request, (completion,) in zip(requests, bench.generate(*requests), strict=True):
            logits_RV = bench.logits_RV(request, completion)
            distributions = [slow_distribution(logits_V, params) for logits_V in logits_RV]
            own = [distribution[token] for distribution, token in zip(distributions, completion.tokens, strict=True)]
            self._require_close(completion.logprobs, torch.stack(own))

    def test_kept_tokens_are_those_that_the_filters_keep(self, bench: Bench) -> None:
        whole = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=0.0)]
        requests = [
            bench.request(text, params, seed=i)
            for i, text in enumerate(_prompts(4))
            for params in (*whole, *_TRUNCATED)  # together, so that the engine's batches have all kinds
        ]
        requests.append(bench.request("long", attrs.evolve(_TRUNCATED[0], max_tokens=40, ignore_eos=True)))
        for request, (completion,) in zip(requests, bench.generate(*requests), strict=True):
            kept = completion.kept_tokens
            if not self.returns_kept_tokens:
                assert kept is None, "set `returns_kept_tokens` in the suite and in the plug-in"
                continue
            assert kept is not None, f"no kept_tokens of {request.params}"
            assert len(kept.counts) == len(completion.tokens)
            found = [set(ids.tolist()) for ids in np.split(kept.ids, kept.counts.cumsum()[:-1])]
            if request.params in whole:
                assert not any(found), f"kept_tokens of {request.params}, which excludes nothing"
                continue
            distributions = [
                slow_distribution(logits_V, request.params) for logits_V in bench.logits_RV(request, completion)
            ]
            expected = [(logprobs_V > -torch.inf).nonzero()[:, 0].tolist() for logprobs_V in distributions]
            assert found == [set(ids) for ids in expected], request.params
            assert all(token in ids for token, ids in zip(completion.tokens, found, strict=True))

    def test_temperature_zero_takes_the_most_likely_token(self, bench: Bench) -> None:
        params = SamplingParams(max_tokens=10, temperature=0.0)
        requests = [bench.request(text, params, seed=i) for i, text in enumerate(_prompts(8))]
        for request, (completion,) in zip(requests, bench.generate(*requests), strict=True):
            best_R = bench.logits_RV(request, completion).log_softmax(-1).max(-1).values
            self._require_close(completion.logprobs, best_R)
            self._require_close(completion.logprobs, bench.own_logprobs_R(request, completion))

    def test_samples_follow_the_models_distribution(self, bench: Bench) -> None:
        count, params = 2000, SamplingParams(max_tokens=1, temperature=0.6)
        request = bench.request("12+3", params, num_samples=count)
        (completions,) = bench.generate(request)
        probs_V = slow_distribution(bench.logits_RV(request, completions[0])[0], params).exp()
        observed_V = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=len(probs_V)).double()
        rare_V = probs_V * count < 5
        expected = torch.cat([probs_V[~rare_V], probs_V[rare_V].sum()[None]]) * count
        observed = torch.cat([observed_V[~rare_V], observed_V[rare_V].sum()[None]])
        chi_square = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
        degrees = len(expected) - 1
        # The chi-square distribution has mean `degrees` and standard deviation sqrt(2 · degrees). With 40 degrees of
        # freedom, a correct engine exceeds this limit with a probability of about 1 in 20 000.
        assert chi_square < degrees + 5 * (2 * degrees) ** 0.5, (chi_square, degrees)

    # --- seeds and identity ---------------------------------------------------------------------------------------

    def test_a_seed_fixes_the_sample_alone_and_in_a_crowd(self, bench: Bench) -> None:
        params = SamplingParams(max_tokens=12)
        (alone,) = bench.generate(bench.request("7*8=", params, seed=11))[0]
        crowd = [bench.request(text, params, seed=100 + i) for i, text in enumerate(_prompts(9))]
        (within,) = bench.generate(*crowd[:5], bench.request("7*8=", params, seed=11), *crowd[5:])[5]
        assert within.tokens == alone.tokens
        self._require_close(within.logprobs, torch.tensor(alone.logprobs))
        (other,) = bench.generate(bench.request("7*8=", params, seed=12))[0]
        assert other.tokens != alone.tokens, "another seed must give another sample"

    def test_sample_i_is_drawn_with_seed_plus_i(self, bench: Bench) -> None:
        params = SamplingParams(max_tokens=8)
        (together,) = bench.generate(bench.request("a cat", params, seed=40, num_samples=4))
        apart = bench.generate(*[bench.request("a cat", params, seed=40 + i) for i in range(4)])
        assert [completion.tokens for completion in together] == [completion.tokens for (completion,) in apart]

    def test_many_requests_at_once_all_come_back_with_their_own_samples(self, bench: Bench) -> None:
        requests = [
            bench.request(text, SamplingParams(max_tokens=1 + i % 5), seed=i, num_samples=1 + i % 3)
            for i, text in enumerate(_prompts(40))
        ]
        for request, completions in zip(requests, bench.generate(*requests), strict=True):
            assert len(completions) == request.num_samples
            for completion in completions:
                assert 1 <= len(completion.tokens) <= request.params.max_tokens
                assert len(completion.tokens) == len(completion.logprobs) == len(completion.policy_versions)
                self._require_close(completion.logprobs, bench.own_logprobs_R(request, completion))

    def test_a_retry_of_a_request_under_way_is_the_same_sample(self, bench: Bench) -> None:
        request = bench.request("retry", SamplingParams(max_tokens=20))
        first, second = bench.generate(request, request)
        assert first == second

    # --- the end of a response ------------------------------------------------------------------------------------

    def test_a_response_ends_at_max_tokens(self, bench: Bench) -> None:
        (completion,) = bench.generate(bench.request("abc", SamplingParams(max_tokens=7, ignore_eos=True)))[0]
        assert (len(completion.tokens), completion.stop_reason) == (7, "length")

    def test_a_response_ends_with_the_models_own_end_unless_told_otherwise(self, bench: Bench) -> None:
        eos = bench.tokenizer.eos_token_id
        request = bench.request("x", SamplingParams(max_tokens=60), num_samples=24)
        (completions,) = bench.generate(request)
        ended = [completion for completion in completions if eos in completion.tokens]
        assert ended, "none of 24 samples of 60 tokens ended: the end-of-sequence token is never sampled"
        for completion in ended:
            assert completion.tokens.index(eos) == len(completion.tokens) - 1
            assert completion.stop_reason == "stop"
        ignoring = attrs.evolve(request, sample_id="ignoring", params=SamplingParams(max_tokens=60, ignore_eos=True))
        assert all(len(completion.tokens) == 60 for completion in bench.generate(ignoring)[0])

    def test_a_stop_token_ends_the_response_and_belongs_to_it(self, bench: Bench) -> None:
        free = bench.request("stop", SamplingParams(max_tokens=20, ignore_eos=True), seed=3)
        (completion,) = bench.generate(free)[0]
        token = completion.tokens[9]
        first = completion.tokens.index(token)
        params = attrs.evolve(free.params, stop_token_ids=(token,))
        (stopped,) = bench.generate(attrs.evolve(free, sample_id="stop-token", params=params))[0]
        assert stopped.tokens == completion.tokens[: first + 1]
        assert stopped.stop_reason == "stop"

    def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(self, bench: Bench) -> None:
        free = bench.request("string", SamplingParams(max_tokens=30, ignore_eos=True), seed=5)
        (completion,) = bench.generate(free)[0]
        text = bench.text(completion.tokens[8:10])
        params = attrs.evolve(free.params, stop=("not in there", text))
        (stopped,) = bench.generate(attrs.evolve(free, sample_id="stop-string", params=params))[0]
        lengths = range(1, len(completion.tokens) + 1)
        expected = next(length for length in lengths if text in bench.text(completion.tokens[:length]))
        assert stopped.tokens == completion.tokens[:expected]
        assert stopped.stop_reason == "stop"

    def test_an_impossible_request_is_refused_and_the_engine_goes_on(self, bench: Bench) -> None:
        positions: Any = bench.model.config.max_position_embeddings
        too_long = bench.request("9" * 200, SamplingParams(max_tokens=positions))
        empty = attrs.evolve(too_long, prompt_tokens=(), params=SamplingParams(max_tokens=4), sample_id="empty")
        for request in (too_long, empty):
            with pytest.raises(GenerationError):
                bench.generate(request)
        self.test_logprobs_are_the_models_own(bench)

    # --- pause, abort ---------------------------------------------------------------------------------------------

    def test_abort_ends_one_request_with_what_it_has(self, bench: Bench) -> None:
        async def abort_one(aborted: GenerateRequest, kept: GenerateRequest) -> tuple[Completion, Completion]:
            tasks = await bench.running(aborted, kept)
            await bench.client.abort([aborted.sample_id])
            (first,), (second,) = await asyncio.gather(*tasks)
            return first, second

        ended: list[StopReason] = []
        while len(ended) < _TRIES and "abort" not in ended:
            aborted, kept = bench.request("one", _LONG), bench.request("two", _LONG)
            first, second = bench.run(abort_one(aborted, kept))
            ended.append(first.stop_reason)
            assert (len(first.tokens) < _LONG.max_tokens) == (first.stop_reason == "abort")
            assert second.stop_reason == "length", f"the other request ended with {second.stop_reason!r}"
            assert len(second.tokens) == _LONG.max_tokens
            self._require_close(first.logprobs, bench.own_logprobs_R(aborted, first))
            self._require_close(second.logprobs, bench.own_logprobs_R(kept, second))
        assert ended[-1] == "abort", f"abort did not end the request; got, per try: {ended}"

    def test_pause_keep_freezes_requests_until_resume(self, bench: Bench) -> None:
        async def pause_and_resume(request: GenerateRequest) -> tuple[bool, bool, Completion]:
            (task,) = await bench.running(request)
            await bench.client.pause("keep")
            late = asyncio.ensure_future(bench.client.generate(bench.request("late", SamplingParams(max_tokens=1))))
            await asyncio.sleep(0.5)
            is_done, is_late_done = task.done(), late.done()
            await bench.client.resume()
            await late
            return is_done, is_late_done, (await task)[0]

        done: list[bool] = []
        while len(done) < _TRIES and all(done):
            request = bench.request("keep", _LONG)
            is_done, is_late_done, completion = bench.run(pause_and_resume(request))
            done.append(is_done)
            assert not is_late_done, "a request that was sent while the engine was paused was finished"
            assert completion.stop_reason == "length"
            self._require_close(completion.logprobs, bench.own_logprobs_R(request, completion))
        assert not done[-1], f"a request was finished while the engine was paused, in each of {_TRIES} tries"

    def test_pause_abort_returns_what_there_is(self, bench: Bench) -> None:
        async def pause_and_resume() -> tuple[int, list[tuple[Completion, ...]]]:
            tasks = await bench.running(bench.request("one", _LONG), bench.request("two", _LONG))
            await bench.client.pause("abort")
            _, pending = await asyncio.wait(tasks, timeout=_PROMPTLY_S)
            await bench.client.resume()
            return len(pending), await asyncio.gather(*tasks)

        ended: list[set[StopReason]] = []
        while len(ended) < _TRIES and {"abort"} not in ended:
            num_pending, completions = bench.run(pause_and_resume())
            assert not num_pending, "pause('abort') left requests without an answer"
            ended.append({completion.stop_reason for (completion,) in completions})
            for (completion,) in completions:
                assert (len(completion.tokens) < _LONG.max_tokens) == (completion.stop_reason == "abort")
        assert ended[-1] == {"abort"}, f"pause('abort') did not end both requests; got, per try: {ended}"

    def test_pause_wait_finishes_what_is_running(self, bench: Bench) -> None:
        async def pause_and_resume() -> tuple[bool, Completion]:
            (task,) = await bench.running(bench.request("wait", _LONG))
            await bench.client.pause("wait")
            await asyncio.sleep(0)
            is_done = task.done()
            await bench.client.resume()
            return is_done, (await task)[0]

        is_done, completion = bench.run(pause_and_resume())
        assert is_done, "pause('wait') returned before the running request was finished"
        assert completion.stop_reason == "length"

    # --- weights --------------------------------------------------------------------------------------------------

    def test_new_weights_are_served_and_named(self, bench: Bench) -> None:
        for _ in range(2):
            version, tensors = bench.version + 1, bench.perturbed(bench.version + 50)

            async def update(version: int, tensors: dict[str, Tensor]) -> tuple[Manifest, Manifest]:
                await bench.client.pause("keep")
                manifests = await bench.publish(tensors, version)
                await bench.client.resume()
                return manifests

            require_same(*bench.run(update(version, tensors)))
            bench.now_serving(tensors, version)
            assert bench.run(bench.client.health()).version == version
            self.test_logprobs_are_the_models_own(bench)
            (completion,) = bench.generate(bench.request("version", SamplingParams(max_tokens=5)))[0]
            assert set(completion.policy_versions) == {version}

    def test_its_flags_say_which_methods_it_defines(self, bench: Bench) -> None:
        client = bench.client
        for flag, methods in _METHODS_OF.items():
            for method in methods:
                defines = getattr(type(client), method) is not getattr(InferenceClient, method)
                assert getattr(client, flag) == defines, (
                    f"{flag} is {getattr(client, flag)}, but {type(client).__name__} defines "
                    f"{'' if defines else 'no '}{method}: the run reads the flag"
                )

    def test_a_prepared_version_is_served_when_its_own_sync_says_so(self, bench: Bench) -> None:
        client = bench.client
        if not (client.can_prepare_weights and bench.transport.is_staged):
            pytest.skip("the client cannot prepare weights, or the transport is not staged")
        version, given_up, tensors = bench.version + 1, bench.perturbed(31), bench.perturbed(32)

        async def prepare(tensors: dict[str, Tensor]) -> Rendezvous:
            rendezvous = bench.transport.open(num_ranks=1, num_engines=1)
            sender = bench.transport.sender(rendezvous, 0, 1)
            await asyncio.gather(
                asyncio.to_thread(sender.send, pack_buckets(tensors.items(), 1 << 14), version),
                client.prepare_weights(rendezvous, version),
            )
            return rendezvous

        bench.transport.close(bench.run(prepare(given_up)))
        assert bench.run(client.health()).version == bench.version
        self.test_logprobs_are_the_models_own(bench)

        async def update() -> Manifest:
            rendezvous = await prepare(tensors)
            await client.pause("keep")
            arrived = await client.update_weights(rendezvous, version)
            await client.resume()
            bench.transport.close(rendezvous)
            return arrived

        expected = {name: tensor_record(tensor) for name, tensor in tensors.items()}
        require_same(Manifest(version=version, tensors=expected), bench.run(update()))
        bench.now_serving(tensors, version)
        self.test_logprobs_are_the_models_own(bench)

    def test_an_engine_that_slept_serves_what_it_is_given_when_it_wakes(self, bench: Bench) -> None:
        client = bench.client
        if not client.can_sleep:
            pytest.skip("the engine cannot sleep")
        for call in (client.sleep, client.sleep, client.wake, client.wake):
            bench.run(call())
        self.test_new_weights_are_served_and_named(bench)

    def test_a_request_that_lives_through_an_update_names_the_weights_of_each_token(self, bench: Bench) -> None:
        lived = []
        while len(lived) < _TRIES and not (lived and all(lived[-1])):
            lived.append(self._lives_through_an_update(bench))
        assert all(lived[-1]), f"expected both requests to get tokens after the update; got, per try: {lived}"

    def _lives_through_an_update(self, bench: Bench) -> list[bool]:
        """Updates the weights during two requests. Returns for each request whether the new weights generated its last
        token."""
        version, tensors = bench.version + 1, bench.perturbed(bench.version + 90)
        requests = [bench.request(text, _LONG, seed=i) for i, text in enumerate(("a longer prompt than", "these"))]

        async def update_in_flight() -> list[tuple[Completion, ...]]:
            tasks = await bench.running(*requests)
            await bench.client.pause("keep")
            await bench.publish(tensors, version)
            await bench.client.resume()
            return await asyncio.gather(*tasks)

        completions = [completion for (completion,) in bench.run(update_in_flight())]
        old = [bench.own_logprobs_R(*pair) for pair in zip(requests, completions, strict=True)]
        before = bench.version
        bench.now_serving(tensors, version)
        for request, completion, old_R in zip(requests, completions, old, strict=True):
            versions_R = torch.tensor(completion.policy_versions)
            assert set(completion.policy_versions) <= {before, version}
            assert versions_R.diff().ge(0).all(), "a request must not return to old weights after an update"
            own_R = torch.where(versions_R == version, bench.own_logprobs_R(request, completion), old_R)
            self._require_close(completion.logprobs, own_R)
        return [completion.policy_versions[-1] == version for completion in completions]

    def test_an_incomplete_version_is_refused_as_a_whole(self, bench: Bench) -> None:
        tensors = bench.perturbed(7)
        name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.dim() == 2)
        missing = {other: value for other, value in tensors.items() if other != name}
        misshapen = {**tensors, name: tensor[:-1]}
        unknown = {**tensors, "model.layers.99.weight": tensor}
        for wrong in (missing, misshapen, unknown):

            async def update(wrong: dict[str, Tensor]) -> None:
                await bench.client.pause("keep")
                with pytest.raises(WeightSyncError):
                    await bench.publish(wrong, bench.version + 1)
                await bench.client.resume()

            bench.run(update(wrong))
            try:
                assert bench.run(bench.client.health()).version == bench.version
                self.test_logprobs_are_the_models_own(bench)
            except GenerationError:
                continue  # serving nothing until a good version arrives is also correct
        self.test_new_weights_are_served_and_named(bench)

    def _require_close(self, logprobs: Sequence[float], own_R: Tensor) -> None:
        actual_R = torch.tensor(logprobs, dtype=torch.float64)
        assert actual_R.shape == own_R.shape
        difference = float((actual_R - own_R).abs().max()) if len(own_R) else 0.0
        assert difference <= self.tolerance, (
            f"log-probs differ from the model's by {difference:.2e}, allowed {self.tolerance:g}"
        )


def make_bench(client: InferenceClient, transport: WeightTransport, path: str, runner: asyncio.Runner) -> Bench:
    """A bench for a client that serves the checkpoint at `path`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return Bench(client, transport, model.eval(), AutoTokenizer.from_pretrained(path), runner)


def _prompts(count: int) -> list[str]:
    """Returns `count` distinct prompts of five kinds that differ in length."""
    return [("12+34=", "a", "what is 7*8?", "x" * 40, "7*8=")[i % 5] + str(i // 2) for i in range(count)]
