"""Calls that a grammar forces, with a real server and a random model, which makes no calls of its own accord."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.batch import Batch
from rl_core.errors import GenerationError
from rl_core.interfaces import GroupRequest, SamplingParams, Trajectory
from rl_core.testing.scripted_engine import Exchange
from rl_core.trainer.update.batch_update import rollout_agreement
from rl_core.trainer.update.collate import collate, merged
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.transports.files import files
from tests.rollout.forcing_environments import CALL, Forces
from tests.rollout.vllm.servers import RunningServer, connect, paused_under_way, publish, request, weights_of
from tests.rollout.vllm.test_multi_turn import TOLERANCE, RecordingClient, load, own_scores

pytestmark = pytest.mark.slow

NUM_EPISODES = 40
DIGITS = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{200}"}}'


class ForcesNothing(Forces):
    async def structural_tag(self, example_call: str | None) -> str | None:
        return None


async def play(
    running: RunningServer, environment: Any, *, step_wise: bool = False
) -> tuple[list[Trajectory], list[Exchange]]:
    client = await connect(running)
    try:
        version = (await client.health()).version + 1
        await publish(client, files, weights_of(load(running)), version)
        watched = RecordingClient(client)
        generator = EnvironmentGenerator(
            watched,  # pyright: ignore[reportArgumentType]
            TokenCodec(AutoTokenizer.from_pretrained(running.model_path), chat_template_kwargs={}),
            Episodes(environment_of=lambda row: environment, limits=Limits(max_turns=4), step_wise=step_wise),
        )
        asked = GroupRequest(
            group_id=0,
            row={"prompt": ""},
            row_place="rows:1",
            num_samples=NUM_EPISODES,
            params=SamplingParams(max_tokens=16),
            seed=5,
            start_version=version,
        )
        trajectories = list(await generator.generate(asked))
        await generator.aclose()
    finally:
        await client.close()
    assert [trajectory.failure for trajectory in trajectories] == [None] * NUM_EPISODES
    return trajectories, watched.exchanges


def scored(running: RunningServer, batch: Batch) -> Batch:
    """The batch with the model's own log-probs as `old_logprobs`."""
    model, offsets = load(running), batch.offsets.tolist()
    own = [own_scores(model, batch["tokens"][a:b].tolist())[0] for a, b in itertools.pairwise(offsets)]
    return batch.with_columns(old_logprobs=torch.cat([torch.cat([torch.zeros(1), one_T]) for one_T in own]).float())


@pytest.mark.parametrize("step_wise", [False, True])
async def test_a_forced_call_is_always_readable_and_only_other_turns_are_trained_on(
    dense_server: RunningServer, step_wise: bool
):
    trajectories, exchanges = await play(dense_server, Forces, step_wise=step_wise)
    said = [[turn.response for turn in trajectory.turns] for trajectory in trajectories]
    assert all(re.fullmatch(CALL, forced) for _, forced, _ in said)
    assert len({forced for _, forced, _ in said}) > NUM_EPISODES // 2, "the model must choose the arguments"
    batch = scored(dense_server, merged(collate(trajectories))[0] if step_wise else collate(trajectories))
    forced_T, free_T = batch["sampled"] & ~batch["loss_mask"], batch["loss_mask"]
    by_kind = {True: 0, False: 0}
    for exchange in exchanges:
        by_kind[exchange.request.params.structural_tag is not None] += len(exchange.completion.tokens)
    assert (int(forced_T.sum()), int(free_T.sum())) == (by_kind[True], by_kind[False])
    assert batch["rollout_logprobs"].isnan().equal(forced_T)
    # The turns after a forced one are free again: the engine's log-probs equal the model's.
    version = trajectories[0].start_version
    assert rollout_agreement(batch, version)["rollout/logprob_diff_max"][0] < TOLERANCE
    # The engine's log-probs of forced tokens are those under the grammar. Compared with the trainer's, they would look
    # like drift.
    engines = [logprob for e in exchanges if e.request.params.structural_tag for logprob in e.completion.logprobs]
    assert 0.0 in engines, "if the grammar allows only one token, its log-prob must be 0"
    assert float(batch["old_logprobs"][forced_T].max()) < -0.1


async def test_without_a_grammar_the_same_model_never_makes_a_call(dense_server: RunningServer):
    trajectories, _ = await play(dense_server, ForcesNothing)
    assert not any(re.fullmatch(CALL, turn.response) for trajectory in trajectories for turn in trajectory.turns)
    batch = collate(trajectories)
    assert batch["loss_mask"].equal(batch["sampled"])


async def test_weights_that_arrive_during_a_forced_response_do_not_break_it(dense_server: RunningServer):
    client = await connect(dense_server)
    try:
        version = (await client.health()).version + 1
        weights = weights_of(AutoModelForCausalLM.from_pretrained(dense_server.model_path, dtype=torch.float32))
        await publish(client, files, weights, version)

        def ask(number: int) -> Any:
            return client.generate(request(f"digits-{number}", max_tokens=300, structural_tag=DIGITS))

        waiting = await paused_under_way(client, ask)
        await publish(client, files, weights, version + 1)
        (completion,) = await waiting
        assert set(completion.policy_versions) == {version, version + 1}
    finally:
        await client.close()
    codec = TokenCodec(AutoTokenizer.from_pretrained(dense_server.model_path), chat_template_kwargs={})
    assert re.fullmatch("[0-9]{200}", codec.response_text(completion.tokens))
    assert completion.stop_reason == "stop"


@pytest.mark.parametrize("tag", ["no JSON", '{"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}'])
async def test_a_grammar_that_cannot_be_read_is_refused_and_the_server_goes_on(dense_server: RunningServer, tag: str):
    client = await connect(dense_server)
    try:
        with pytest.raises(
            GenerationError,
            match=r"vLLM refuses it: Invalid grammar specification.*xgrammar\.Grammar\.from_structural_tag",
        ):
            await client.generate(request(f"bad-{len(tag)}", max_tokens=4, structural_tag=tag))
        (completion,) = await client.generate(request(f"good-{len(tag)}", max_tokens=4, ignore_eos=True))
        assert len(completion.tokens) == 4
    finally:
        await client.close()
