"""The conformance suites are tested too: a right implementation passes, a wrong one fails the check that is named."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import attrs
import pytest
import torch
from _pytest.outcomes import Failed

from rl_core.errors import GenerationError
from rl_core.interfaces import CONTRACT_VERSION, StepResult
from rl_core.testing import reference_transport
from rl_core.testing.environments import EnvironmentConformance
from rl_core.testing.generators import GeneratorConformance
from rl_core.testing.inference import InferenceClientConformance, make_bench
from rl_core.testing.models import make_checkpoint
from rl_core.testing.reference_engine import ReferenceEngine
from rl_core.testing.reference_transport import MemoryReceiver, MemorySender, MemoryTransport
from rl_core.testing.transports import WeightTransportConformance
from rl_core.weights import pack_buckets, unpack_bucket

REJECTED = (AssertionError, Failed)
"""What a failing check raises; `Failed` comes from `pytest.raises` that saw nothing."""
HERE = __name__

# --- inference ------------------------------------------------------------------------------------------------------


class TestReferenceEngine(InferenceClientConformance):
    transport = MemoryTransport()

    async def create_client(self, model_path):
        return ReferenceEngine.from_checkpoint(model_path)


class FaultyEngine(ReferenceEngine):
    """Right but for what a subclass spoils in `spoil` (one completion) or overrides."""

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
    """Reports the model's log-probs whatever the temperature and filters were."""

    def spoil(self, completion, request):
        tokens = torch.tensor([request.prompt_tokens + completion.tokens])
        with torch.no_grad():
            logits_RV = self.model(input_ids=tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
        own_R = logits_RV.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        return attrs.evolve(completion, logprobs=tuple(own_R.tolist()))


class LostSample(FaultyEngine):
    async def generate(self, request):
        return (await super().generate(request))[: max(1, request.num_samples - 1)]


class SwappedRequests(FaultyEngine):
    """Two requests at the same time get each other's samples."""

    _other = None

    async def generate(self, request):
        if request.num_samples == 1 and request.params.max_tokens == 1:
            request = attrs.evolve(request, prompt_tokens=(*request.prompt_tokens[::-1], 1))
        return await super().generate(request)


class SeedOfTheMoment(FaultyEngine):
    """The sample depends on what was asked before."""

    _count = 0

    async def generate(self, request):
        self._count += 1
        return await super().generate(attrs.evolve(request, seed=request.seed + 1000 * self._count))


class SameSeedForAll(FaultyEngine):
    async def generate(self, request):
        one = attrs.evolve(request, num_samples=1)
        return (await super().generate(one)) * request.num_samples


class Flattened(FaultyEngine):
    """Samples at a higher temperature than it was told."""

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
    """Receives everything, reports it, serves the old weights."""

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


WRONG_ENGINES = [
    (SlightlyWrongLogprobs, "test_logprobs_are_the_models_own"),
    (ShiftedLogprobs, "test_logprobs_are_the_models_own"),
    (UnscaledLogprobs, "test_logprobs_are_those_of_the_distribution_sampled_from"),
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


@pytest.mark.parametrize(("engine", "check"), WRONG_ENGINES, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_engine_is_rejected(engine, check, checkpoint):
    suite = TestReferenceEngine()
    with asyncio.Runner() as runner:
        client = engine.from_checkpoint(checkpoint)
        bench = make_bench(client, suite.transport, checkpoint, runner)
        with pytest.raises(REJECTED):
            run_check(suite, check, bench)
        runner.run(client.close())


def run_check(suite, check, bench):
    """Runs a test of a suite, with each of its parameters if it has some."""
    test = getattr(suite, check)
    parameters = [value for mark in getattr(test, "pytestmark", []) for value in mark.args[1]]
    for arguments in [[value] for value in parameters] or [[]]:
        test(bench, *arguments)


@pytest.mark.parametrize(
    ("suite", "begin"),
    [
        (InferenceClientConformance, lambda suite: asyncio.run(suite.create_client(""))),
        (GeneratorConformance, lambda suite: suite.create_generator(None, None)),
    ],
)
def test_a_suite_that_was_not_told_what_to_test_fails_and_is_not_passed_over(suite, begin, request):
    class TestNothing(suite):
        row: ClassVar = {}

    module = request.node.getparent(pytest.Module)
    assert module.istestclass(TestNothing, "TestNothing"), "pytest would not collect it"
    with pytest.raises(NotImplementedError, match="TestNothing has"):
        begin(TestNothing())


# --- weight transports ----------------------------------------------------------------------------------------------


class TestMemoryTransport(WeightTransportConformance):
    transport = MemoryTransport()

    def damage(self, rendezvous):
        return False


class FaultySender(MemorySender):
    def send(self, buckets, version):
        kept = list(buckets)
        manifest = reference_transport.manifest_of(kept, version)
        super().send(iter(self.spoil(kept)), self.spoil_version(version))
        return manifest

    def spoil(self, buckets):
        return buckets

    def spoil_version(self, version):
        return version


class LosesABucket(FaultySender):
    def spoil(self, buckets):
        return buckets[:-1]


class SwapsNames(FaultySender):
    """Two tensors of one shape arrive under each other's name: sizes and counts are right."""

    def spoil(self, buckets):
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        if "second.weight" in tensors:
            tensors["first.weight"], tensors["second.weight"] = tensors["second.weight"], tensors["first.weight"]
        return list(pack_buckets(tensors.items(), 64))


class SendsHalfPrecision(FaultySender):
    def spoil(self, buckets):
        tensors = dict(pair for bucket in buckets for pair in unpack_bucket(bucket))
        return list(pack_buckets(((name, t.to(torch.float16)) for name, t in tensors.items()), 64))


class ReadsOneBucket(FaultySender):
    def send(self, buckets, version):
        return super().send(iter([bucket for bucket, _ in zip(buckets, range(1), strict=False)]), version)


class ClaimsTheExpectedVersion(FaultySender):
    """Stale weights under a new number."""

    def spoil_version(self, version):
        return 5


class AcceptsAnyVersion(MemoryReceiver):
    def receive(self, version):
        sync = reference_transport.SYNCS[self._number]
        with sync.changed:
            sync.changed.wait_for(lambda: sync.is_closed or len(sync.sent) == sync.num_ranks, self._timeout_s)
        for _, buckets in sync.sent.values():
            yield from buckets


class WaitsForOneRankOnly(MemoryReceiver):
    def receive(self, version):
        sync = reference_transport.SYNCS[self._number]
        with sync.changed:
            sync.changed.wait_for(lambda: sync.sent, self._timeout_s)
        for _, buckets in list(sync.sent.values()):
            yield from buckets


@attrs.frozen
class FaultyTransport(MemoryTransport):
    faulty_sender: type = MemorySender

    def sender(self, rendezvous, rank, world_size):
        return self.faulty_sender(reference_transport.SYNCS[rendezvous.data["sync"]], rank)


class NotPlainData(MemoryTransport):
    def open(self, *, num_ranks, num_engines):
        rendezvous = super().open(num_ranks=num_ranks, num_engines=num_engines)
        return attrs.evolve(rendezvous, data={**rendezvous.data, "lock": object()})


class ClosesOnlyOnce(MemoryTransport):
    def close(self, rendezvous):
        reference_transport.SYNCS.pop(rendezvous.data["sync"])


WHAT_ARRIVES = "test_what_arrives_is_what_was_sent"
WRONG_TRANSPORTS = [
    (FaultyTransport(faulty_sender=LosesABucket), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=SwapsNames), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=SendsHalfPrecision), WHAT_ARRIVES),
    (FaultyTransport(faulty_sender=ReadsOneBucket), "test_every_rank_drains_its_weights_also_one_that_sends_nothing"),
    (FaultyTransport(faulty_sender=ClaimsTheExpectedVersion), "test_another_version_is_refused"),
    (MemoryTransport(receiver=f"{HERE}:AcceptsAnyVersion"), "test_another_version_is_refused"),
    (
        MemoryTransport(receiver=f"{HERE}:WaitsForOneRankOnly"),
        "test_a_sync_that_is_closed_ends_an_engine_that_waits_for_a_missing_rank",
    ),
    (MemoryTransport(contract_version=CONTRACT_VERSION + 1), "test_it_follows_this_version_of_the_contract"),
    (NotPlainData(), "test_the_rendezvous_is_plain_data"),
    (ClosesOnlyOnce(), "test_syncs_follow_each_other_also_after_one_that_failed"),
]


@pytest.mark.parametrize(
    ("wrong", "check"), WRONG_TRANSPORTS, ids=[f"{i}-{c[1]}" for i, c in enumerate(WRONG_TRANSPORTS)]
)
def test_a_wrong_transport_is_rejected(wrong, check):
    class Suite(WeightTransportConformance):
        transport = wrong

    arguments = [1] if check == WHAT_ARRIVES else []
    with pytest.raises((*REJECTED, KeyError, TypeError)):
        getattr(Suite(), check)(*arguments)


# --- environments ---------------------------------------------------------------------------------------------------


class Guess:
    """A right environment: three turns at most to say the row's answer."""

    def __init__(self, row, options):
        self.answer, self.turns_left = row["answer"], options.get("turns", 3)

    async def reset(self):
        return [{"role": "user", "content": "guess"}]

    async def step(self, action):
        self.turns_left -= 1
        is_right = action.text == self.answer
        is_done = is_right or not self.turns_left
        return StepResult(
            reward=float(is_right),
            done=is_done,
            observation=None if is_done else "no",
            metrics={"right": float(is_right)},
        )

    async def close(self):
        pass


class TestGuess(EnvironmentConformance):
    factory = Guess
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {"4": 1.0, "5": 0.0}


class TestGuessOfSeveralTurns(EnvironmentConformance):
    factory = Guess
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {("1", "2", "4"): 1.0, ("1", "2"): 0.0, ("4", "9"): 1.0}


class RewardsEverything(Guess):
    async def step(self, action):
        return StepResult(reward=1.0, done=True)


class NeverDone(Guess):
    async def step(self, action):
        return StepResult(reward=0.0, done=False, observation="go on")


class NoObservation(Guess):
    async def step(self, action):
        return attrs.evolve(await super().step(action), observation=None)


class NotANumber(Guess):
    async def step(self, action):
        return attrs.evolve(await super().step(action), metrics={"right": float("nan")})


class ShowsMessagesAfterText(Guess):
    async def reset(self):
        return "guess"

    async def step(self, action):
        result = await super().step(action)
        return result if result.done else attrs.evolve(result, observation=[{"role": "user", "content": "again"}])


class SpeaksForThePolicy(Guess):
    async def step(self, action):
        result = await super().step(action)
        return result if result.done else attrs.evolve(result, observation=[{"role": "assistant", "content": "4"}])


class EmptyPrompt(Guess):
    async def reset(self):
        return ""


class RefusesCutOff(Guess):
    async def step(self, action):
        assert action.stop_reason == "stop"
        return await super().step(action)


class RemembersOtherEpisodes(Guess):
    seen = 0

    async def step(self, action):
        RemembersOtherEpisodes.seen += 1
        return attrs.evolve(await super().step(action), metrics={"right": float(RemembersOtherEpisodes.seen)})


class MetricsOnSuccessOnly(Guess):
    async def step(self, action):
        result = await super().step(action)
        return result if result.reward else attrs.evolve(result, metrics={})


class ChangesItsRow(Guess):
    def __init__(self, row, options):
        super().__init__(row, options)
        row["visits"] = row.get("visits", 0) + 1


class ClosesOnce(Guess):
    is_closed = False

    async def close(self):
        assert not self.is_closed
        self.is_closed = True


WRONG_ENVIRONMENTS = [
    (RewardsEverything, "test_responses_get_the_rewards_they_deserve"),
    (NeverDone, "test_responses_get_the_rewards_they_deserve"),
    (NoObservation, "test_every_answer_of_an_episode_is_whole"),
    (NotANumber, "test_every_answer_of_an_episode_is_whole"),
    (MetricsOnSuccessOnly, "test_every_answer_of_an_episode_is_whole"),
    (ShowsMessagesAfterText, "test_observations_go_on_as_the_episode_began"),
    (SpeaksForThePolicy, "test_observations_go_on_as_the_episode_began"),
    (EmptyPrompt, "test_the_first_observation_is_a_prompt"),
    (RefusesCutOff, "test_a_response_that_is_empty_or_cut_off_is_judged"),
    (RemembersOtherEpisodes, "test_the_same_response_gets_the_same_reward_again"),
    (RemembersOtherEpisodes, "test_episodes_side_by_side_do_not_touch_each_other"),
    (ChangesItsRow, "test_it_does_not_change_its_row"),
    (ClosesOnce, "test_it_can_be_closed_before_it_is_done_and_twice"),
]


@pytest.mark.parametrize(("wrong", "check"), WRONG_ENVIRONMENTS)
def test_a_wrong_environment_is_rejected(wrong, check):
    class Suite(TestGuess):
        factory = wrong
        row: ClassVar = {"answer": "4"}

    with pytest.raises(REJECTED):
        getattr(Suite(), check)()
