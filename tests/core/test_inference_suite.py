"""The inference suite accepts the reference engine. Each faulty engine fails the check listed with it."""

from __future__ import annotations

import asyncio

import attrs
import numpy as np
import pytest
import torch

from rl_core import plugins
from rl_core.errors import GenerationError
from rl_core.interfaces import KeptTokens
from rl_core.rank_kit.weight_buckets import unpack_bucket
from rl_core.testing import reference_transport
from rl_core.testing.reference_transport import MemoryReceiver, MemoryTransport
from rl_transformers.testing import inference
from rl_transformers.testing.inference import InferenceClientConformance, make_bench
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.reference_engine import ReferenceEngine
from tests.core.test_suites import REJECTED


@pytest.mark.slow
class TestReferenceEngine(InferenceClientConformance):
    transport = MemoryTransport()
    returns_kept_tokens = True

    async def create_client(self, model_path):
        return ReferenceEngine.from_checkpoint(model_path, return_kept_tokens=True)


class FaultyEngine(ReferenceEngine):
    """The correct engine, except for what a subclass changes in `spoil` (per completion) or overrides."""

    async def generate(self, request):
        completions = await super().generate(request)
        return tuple(self.spoil(completion, request) for completion in completions)

    def spoil(self, completion, request):
        return completion


class SlightlyWrongLogprobs(FaultyEngine):
    def spoil(self, completion, request):
        return attrs.evolve(completion, logprobs=tuple(value + 1e-4 for value in completion.logprobs))


class ShiftedLogprobs(FaultyEngine):
    def spoil(self, completion, request):
        return attrs.evolve(completion, logprobs=completion.logprobs[1:] + completion.logprobs[:1])


class UnscaledLogprobs(FaultyEngine):
    """Reports the model's log-probs without applying temperature and filters."""

    def spoil(self, completion, request):
        tokens = torch.tensor([request.prompt_tokens + completion.tokens])
        with torch.no_grad():
            logits_RV = self.model(input_ids=tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
        own_R = logits_RV.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        return attrs.evolve(completion, logprobs=tuple(own_R.tolist()))


class KeepsOneTooFew(FaultyEngine):
    """Leaves the least likely kept id out, which is nearly never the sampled one."""

    def kept_ids(self, logits_V, params):
        kept = super().kept_ids(logits_V, params)
        return sorted(kept, key=lambda token: -logits_V[token])[:-1] if len(kept) > 1 else kept


class KeepsTheNextTokens(FaultyEngine):
    """Shifts the kept ids by one token."""

    def spoil(self, completion, request):
        kept = completion.kept_tokens
        ids = np.split(kept.ids, kept.counts.cumsum()[:-1])
        return attrs.evolve(completion, kept_tokens=KeptTokens.of_each(ids[1:] + ids[:1]))


class KeepsTheWholeVocabulary(FaultyEngine):
    """Names all ids where the filters exclude none, for which an engine names none."""

    def kept_ids(self, logits_V, params):
        return super().kept_ids(logits_V, params) or list(range(len(logits_V)))


class LostSample(FaultyEngine):
    async def generate(self, request):
        return (await super().generate(request))[: max(1, request.num_samples - 1)]


class SwappedRequests(FaultyEngine):
    """Answers requests for one token with another prompt's sample, as if concurrent requests were swapped."""

    async def generate(self, request):
        if request.num_samples == 1 and request.params.max_tokens == 1:
            request = attrs.evolve(request, prompt_tokens=(*request.prompt_tokens[::-1], 1))
        return await super().generate(request)


class SeedOfTheMoment(FaultyEngine):
    """The sample depends on earlier requests."""

    _count = 0

    async def generate(self, request):
        self._count += 1
        return await super().generate(attrs.evolve(request, seed=request.seed + 1000 * self._count))


class SameSeedForAll(FaultyEngine):
    async def generate(self, request):
        one = attrs.evolve(request, num_samples=1)
        return (await super().generate(one)) * request.num_samples


class Flattened(FaultyEngine):
    """Samples at a higher temperature than requested."""

    async def generate(self, request):
        params = attrs.evolve(request.params, temperature=request.params.temperature * 1.3)
        return await super().generate(attrs.evolve(request, params=params))


class NeverStops(FaultyEngine):
    async def generate(self, request):
        params = attrs.evolve(request.params, stop=(), stop_token_ids=(), ignore_eos=True)
        return await super().generate(attrs.evolve(request, params=params))


class DropsTheStoppingToken(FaultyEngine):
    def spoil(self, completion, request):
        if completion.stop_reason != "stop":
            return completion
        columns = {name: getattr(completion, name)[:-1] for name in ("tokens", "logprobs", "policy_versions")}
        return attrs.evolve(completion, **columns)


class TakesAnything(FaultyEngine):
    async def generate(self, request):
        try:
            return await super().generate(request)
        except GenerationError:
            return ()


class DeafToAbort(FaultyEngine):
    async def abort(self, sample_ids=None):
        pass


class DeafToPause(FaultyEngine):
    async def pause(self, mode="keep"):
        pass


class PauseWaitsForNothing(FaultyEngine):
    async def pause(self, mode="keep"):
        await super().pause("keep" if mode == "wait" else mode)


class StaleWeights(FaultyEngine):
    """Receives and reports new weights, but serves the old ones."""

    def load(self, tensors):
        pass


class SkipsOneTensor(FaultyEngine):
    def load(self, tensors):
        name = next(name for name in tensors if name.endswith("o_proj.weight"))
        super().load({**tensors, name: dict(self.model.named_parameters())[name].clone()})


class SwapsTwoTensors(FaultyEngine):
    def load(self, tensors):
        first, second = (name for name in tensors if name.endswith("up_proj.weight"))
        super().load({**tensors, first: tensors[second], second: tensors[first]})


class StaleVersion(FaultyEngine):
    def spoil(self, completion, request):
        return attrs.evolve(completion, policy_versions=(0,) * len(completion.tokens))


class NamesTheLastVersionForAllTokens(FaultyEngine):
    def spoil(self, completion, request):
        last = completion.policy_versions[-1:]
        return attrs.evolve(completion, policy_versions=last * len(completion.tokens))


class LoadsIncompleteVersions(FaultyEngine):
    async def update_weights(self, rendezvous, version):
        receiver = MemoryReceiver(rendezvous)
        buckets = await asyncio.to_thread(lambda: list(receiver.receive(version)))
        parameters = dict(self.model.named_parameters())
        for name, tensor in (pair for bucket in buckets for pair in unpack_bucket(bucket)):
            if name in parameters and parameters[name].shape == tensor.shape:
                parameters[name].data.copy_(tensor)
        self._version = version
        return reference_transport.manifest_of(buckets, version)


PREPARED = "test_a_prepared_version_is_served_when_its_own_sync_says_so"


class ServesWhatIsPrepared(FaultyEngine):
    """Serves prepared weights immediately."""

    can_prepare_weights = True

    async def prepare_weights(self, rendezvous, version):
        await self.update_weights(rendezvous, version)


class LoadsWhatWasPreparedFirst(FaultyEngine):
    """Always loads the weights that it prepared first, even if a later sync of the same version replaced them."""

    can_prepare_weights = True

    async def prepare_weights(self, rendezvous, version):
        receiver = plugins.load_receiver(rendezvous.receiver)(rendezvous)
        buckets = await asyncio.to_thread(lambda: list(receiver.receive(version)))
        self.first = getattr(self, "first", buckets)

    async def update_weights(self, rendezvous, version):
        manifest = await super().update_weights(rendezvous, version)
        self.load({name: tensor for bucket in self.first for name, tensor in unpack_bucket(bucket)})
        return manifest


class HidesItsSleep(FaultyEngine):
    can_sleep = False


class ClaimsToScore(FaultyEngine):
    can_score = True


FLAGS = "test_its_flags_say_which_methods_it_defines"
WRONG_ENGINES = [
    (HidesItsSleep, FLAGS),
    (ClaimsToScore, FLAGS),
    (ServesWhatIsPrepared, PREPARED),
    (LoadsWhatWasPreparedFirst, PREPARED),
    (SlightlyWrongLogprobs, "test_logprobs_are_the_models_own"),
    (ShiftedLogprobs, "test_logprobs_are_the_models_own"),
    (UnscaledLogprobs, "test_logprobs_are_those_of_the_distribution_sampled_from"),
    (KeepsOneTooFew, "test_kept_tokens_are_those_that_the_filters_keep"),
    (KeepsTheNextTokens, "test_kept_tokens_are_those_that_the_filters_keep"),
    (KeepsTheWholeVocabulary, "test_kept_tokens_are_those_that_the_filters_keep"),
    (Flattened, "test_samples_follow_the_models_distribution"),
    (SeedOfTheMoment, "test_a_seed_fixes_the_sample_alone_and_in_a_crowd"),
    (SameSeedForAll, "test_sample_i_is_drawn_with_seed_plus_i"),
    (SameSeedForAll, "test_samples_follow_the_models_distribution"),
    (LostSample, "test_many_requests_at_once_all_come_back_with_their_own_samples"),
    (SwappedRequests, "test_many_requests_at_once_all_come_back_with_their_own_samples"),
    (NeverStops, "test_a_response_ends_with_the_models_own_end_unless_told_otherwise"),
    (NeverStops, "test_a_stop_token_ends_the_response_and_belongs_to_it"),
    (NeverStops, "test_a_stop_string_ends_the_response_with_the_token_that_completes_it"),
    (DropsTheStoppingToken, "test_a_stop_token_ends_the_response_and_belongs_to_it"),
    (DropsTheStoppingToken, "test_a_stop_string_ends_the_response_with_the_token_that_completes_it"),
    (TakesAnything, "test_an_impossible_request_is_refused_and_the_engine_goes_on"),
    (DeafToAbort, "test_abort_ends_one_request_with_what_it_has"),
    (DeafToAbort, "test_pause_abort_returns_what_there_is"),
    (DeafToPause, "test_pause_keep_freezes_requests_until_resume"),
    (PauseWaitsForNothing, "test_pause_wait_finishes_what_is_running"),
    (StaleWeights, "test_new_weights_are_served_and_named"),
    (SkipsOneTensor, "test_new_weights_are_served_and_named"),
    (SwapsTwoTensors, "test_new_weights_are_served_and_named"),
    (StaleVersion, "test_new_weights_are_served_and_named"),
    (NamesTheLastVersionForAllTokens, "test_a_request_that_lives_through_an_update_names_the_weights_of_each_token"),
    (LoadsIncompleteVersions, "test_an_incomplete_version_is_refused_as_a_whole"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("suites") / "model"))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "check"), WRONG_ENGINES, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_engine_is_rejected(engine, check, checkpoint, monkeypatch):
    monkeypatch.setattr(inference, "_PROMPTLY_S", 1.0)  # only an engine that ignores pause("abort") takes this long
    monkeypatch.setattr(inference, "_TRIES", 1)  # these engines compute in the event loop, so no request ends too early
    suite = TestReferenceEngine()
    with asyncio.Runner() as runner:
        client = engine.from_checkpoint(checkpoint, return_kept_tokens=True)
        bench = make_bench(client, suite.transport, checkpoint, runner)
        with pytest.raises(REJECTED):
            run_check(suite, check, bench)
        runner.run(client.close())


def run_check(suite, check, bench):
    """Runs a check of the suite, once per parameter if it has parameters."""
    test = getattr(suite, check)
    parameters = [value for mark in getattr(test, "pytestmark", []) for value in mark.args[1]]
    for arguments in [[value] for value in parameters] or [[]]:
        test(bench, *arguments)
