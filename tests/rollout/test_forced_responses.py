"""A response that a grammar forces is recorded but not trained on; the policy's free responses around it are trained
on.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from rl_core.interfaces import GenerateRequest, GroupRequest, PlacementKind, SamplingParams, Trajectory
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.update.batch_update import rollout_agreement
from rl_core.trainer.update.collate import collate, merged
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer
from tests.rollout.forcing_environments import Forces, ForcesByAMapping, ForcesEveryTurn

TOKENIZER = character_tokenizer()
EOS = int(TOKENIZER.eos_token_id)  # pyright: ignore[reportArgumentType]


def saying(free: str, forced: str, **settings: Any) -> ScriptedClient:
    """An engine that answers `forced` to requests with a grammar and `free` to all others."""

    def script(request: GenerateRequest) -> list[int]:
        said = free if request.params.structural_tag is None else forced
        return [*TOKENIZER(said)["input_ids"], EOS]  # pyright: ignore[reportGeneralTypeIssues]

    return ScriptedClient(script, end_tokens=[EOS], **settings)


async def play(
    client: ScriptedClient,
    environment: Any = Forces,
    *,
    step_wise: bool = False,
    placement: PlacementKind = "in_process",
) -> Trajectory:
    generator = EnvironmentGenerator(
        client,
        TokenCodec(TOKENIZER, chat_template_kwargs={}),
        Episodes(
            environment_of=lambda row: environment,
            limits=Limits(max_turns=4),
            step_wise=step_wise,
            environment_placement=placement,
        ),
    )
    params = SamplingParams(max_tokens=8)
    request = GroupRequest(
        group_id=0, row={"prompt": ""}, row_place="rows:1", num_samples=1, params=params, seed=0, start_version=0
    )
    try:
        (trajectory,) = await generator.generate(request)
    finally:
        await generator.aclose()
    return trajectory


def marked(batch: Any) -> list[str]:
    """Each sequence as text: trained tokens in capital letters, the end of sequence as `$`."""
    letters = [str(TOKENIZER.decode([token])).replace("<eos>", "$") for token in batch["tokens"].tolist()]
    shown = [t.upper() if is_trained else t for t, is_trained in zip(letters, batch["loss_mask"].tolist(), strict=True)]
    offsets = batch.offsets.tolist()
    return ["".join(shown[a:b]) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("placement", ["in_process", "thread", "process"])
async def test_a_forced_response_is_recorded_and_not_trained_on(placement: PlacementKind):
    client = saying("a", "bcd")
    trajectory = await play(client, placement=placement)
    assert trajectory.failure is None
    assert [exchange.request.params.structural_tag is None for exchange in client.exchanges] == [True, False, True]
    batch = collate([trajectory])
    assert marked(batch) == ["count= A$1,bcd$2,A$"]
    forced_T = batch["sampled"] & ~batch["loss_mask"]
    assert TOKENIZER.decode(batch["tokens"][forced_T]) == "bcd<eos>"
    assert batch["loss_mask"].sum() == 4, "the two free responses and their ends must be trained on"
    assert batch["rollout_logprobs"].isnan().tolist() == forced_T.tolist()
    assert (batch["policy_version"][forced_T] == 0).all()
    assert batch["rewards"].sum() == 7.0


async def test_the_mask_is_right_in_steps_and_in_their_merged_sequence():
    trajectory = await play(saying("a", "bcd"), step_wise=True)
    batch = collate([trajectory])
    assert marked(batch) == ["count= A$", "count= a$1,bcd$", "count= a$1,bcd$2,A$"]
    assert [step.reward for step in trajectory.steps] == [1.0, 2.0, 4.0]
    whole, _ = merged(batch)
    assert marked(whole) == ["count= A$1,bcd$2,A$"]
    assert whole["rollout_logprobs"].isnan().sum() == 4


async def test_an_episode_of_forced_responses_alone_trains_nothing():
    batch = collate([await play(saying("a", "1"), ForcesEveryTurn)])
    assert not batch["loss_mask"].any()
    assert batch["sampled"].sum() == 6


async def test_forced_tokens_are_left_out_of_the_logprob_difference():
    batch = collate([await play(saying("a", "bcd"))])
    forced_T = batch["sampled"] & ~batch["loss_mask"]
    # The trainer's log-probs equal the engine's for free tokens. For forced tokens, the engine's are NaN.
    old_T = torch.where(forced_T, -9.0, batch["rollout_logprobs"])
    metrics = rollout_agreement(batch.with_columns(old_logprobs=old_T), version=0)
    assert metrics["rollout/logprob_diff_max"] == (0.0, 1.0)
    assert metrics["rollout/stale_tokens"] == (0.0, 4.0)
    # A NaN at a free token is an error, and must reach the metric.
    spoiled_T = batch["rollout_logprobs"].index_fill(0, batch["loss_mask"].nonzero()[0], math.nan)
    spoiled = batch.with_columns(old_logprobs=old_T, rollout_logprobs=spoiled_T)
    assert math.isnan(rollout_agreement(spoiled, version=0)["rollout/logprob_diff_max"][0])


async def test_an_aborted_forced_response_starts_again():
    def abort_after(request: GenerateRequest) -> int | None:
        return 2 if request.params.structural_tag and "." not in request.sample_id else None

    client = saying("a", "bcd", abort_after=abort_after)
    trajectory = await play(client)
    assert marked(collate([trajectory])) == ["count= A$1,bcd$2,A$"]
    first, again = (exchange.request for exchange in client.exchanges if exchange.request.params.structural_tag)
    assert first.prompt_tokens == again.prompt_tokens
    assert first.params.max_tokens == again.params.max_tokens
    assert first.seed != again.seed


async def test_a_grammar_that_is_not_text_fails_its_sample():
    trajectory = await play(saying("a", "bcd"), ForcesByAMapping)
    assert "`structural_tag` returned dict, expected JSON text or None" in str(trajectory.failure)
