"""Which runs score a batch before they train on it, and which use the training pass's own log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_core.config import from_mapping
from rl_core.trainer.before.settings import update_settings
from rl_core.trainer.update.scoring_pass import ScoringPass
from rl_megatron import megatron
from tests.core.test_update import FakeGroup, make_batch, policy_settings, update_with

ALGORITHM = "trainer.algorithm"
BASE = {
    "trainer.policy.model.path": "nowhere",
    "data.train_data": ["nothing.jsonl"],
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 4,
    "generator.n_samples_per_prompt": 2,
    f"{ALGORITHM}.advantage_estimator": "grpo",
}
ONE_STEP = {"trainer.policy_mini_batch_size": 8}


def scoring_of(changes: dict[str, Any]) -> ScoringPass:
    return update_settings(from_mapping(BASE | changes)).scoring


@pytest.mark.parametrize("loss", ["regular", "dual_clip", "gspo", "cispo", "sapo", "decoupled_ppo", "dro"])
def test_only_mini_batches_after_the_first_are_scored_before_the_update(loss: str):
    scoring = scoring_of({f"{ALGORITHM}.policy_loss_type": loss})
    assert (scoring.covers_batch, scoring.first_is_own, scoring.keeps_first) == (False, True, True)
    assert scoring.extent == "mini-batches from the second of 2"
    assert scoring.reason == f"the first optimizer step computes its own old log-probs (policy_loss_type={loss})"


def test_one_optimizer_step_per_batch_needs_no_scoring_pass():
    text = "none: the first optimizer step computes its own old log-probs (policy_loss_type=regular)"
    assert str(scoring_of(ONE_STEP)) == text
    several = scoring_of(ONE_STEP | {"trainer.update_epochs_per_batch": 2})
    assert several.reason.endswith("its own old log-probs, kept for later epochs (policy_loss_type=regular)")


def test_the_off_policy_correction_needs_the_scoring_pass_but_staleness_does_not():
    stale = {"trainer.max_staleness": 2, "trainer.placement.colocate_all": False}
    assert "off-policy correction" in scoring_of(stale).reason
    assert scoring_of(stale | {f"{ALGORITHM}.off_policy_correction.tis_ratio_type": "off"}).first_is_own


@pytest.mark.parametrize("loss", ["reinforce", "rollout_is", "dppo"])
def test_losses_without_old_logprobs_need_no_scoring_pass(loss: str):
    scoring = scoring_of({f"{ALGORITHM}.policy_loss_type": loss})
    assert (scoring.covers_batch, scoring.first_is_own, scoring.keeps_first) == (False, False, True)


@pytest.mark.parametrize(
    ("changes", "reader"),
    [
        ({f"{ALGORITHM}.use_kl_in_reward": True}, "use_kl_in_reward"),
        ({f"{ALGORITHM}.off_policy_correction.tis_ratio_type": "sequence"}, "off_policy_correction"),
        ({f"{ALGORITHM}.advantage_estimator": "distillation"}, "advantage_estimator=distillation"),
        ({f"{ALGORITHM}.policy_loss_type": "clip_cov"}, "policy_loss_type=clip_cov"),
        ({f"{ALGORITHM}.policy_loss_type": "kl_cov"}, "policy_loss_type=kl_cov"),
        ({f"{ALGORITHM}.policy_loss_type": "top_entropy"}, "policy_loss_type=top_entropy"),
        ({"trainer.log_sample_logprobs": True}, "log_sample_logprobs"),
    ],
)
def test_settings_that_read_scores_before_the_update_need_the_scoring_pass(changes: dict[str, Any], reader: str):
    scoring = scoring_of(ONE_STEP | changes)
    assert scoring.covers_batch
    assert scoring.extent == "every batch"
    assert reader in scoring.reason
    assert scoring.scores == (("logprobs", "entropies") if reader.endswith("top_entropy") else ("logprobs",))


def test_a_critic_does_not_require_the_policys_scoring_pass():
    assert scoring_of(ONE_STEP | {f"{ALGORITHM}.advantage_estimator": "gae"}).first_is_own


def test_a_kl_term_of_the_loss_needs_no_scoring_pass():
    kl = {f"{ALGORITHM}.use_kl_loss": True, f"{ALGORITHM}.kl_estimator_type": "k3_unbiased"}
    assert scoring_of(ONE_STEP | kl).first_is_own
    assert scoring_of(ONE_STEP | kl | {f"{ALGORITHM}.policy_loss_type": "reinforce"}).first_is_own


def test_replaying_routes_of_the_scoring_pass_requires_it():
    replay = {"moe_enable_routing_replay": True}
    key = "trainer.policy.megatron_config"
    changes = {"trainer.strategy": "megatron", f"{key}.moe_enable_routing_replay": True}
    scored = scoring_of(ONE_STEP | changes | {f"{key}.moe_routing_replay_source": "scoring"})
    assert "replays the routes of the scoring pass (trainer.policy.megatron_config)" in scored.reason
    assert scoring_of(ONE_STEP | changes).first_is_own
    options = megatron.options_class(moe_routing_replay_source="scoring", **replay)
    assert megatron.records_routes(options)
    assert not megatron.records_routes(megatron.options_class(**replay))


async def test_later_mini_batches_are_scored_and_the_first_gives_its_own_log_probs():
    group = FakeGroup(logprob=-1.5)
    scoring = ScoringPass(covers_batch=False, first_is_own=True, keeps_first=True, scores=("logprobs",))
    update = update_with(group, scoring=scoring, policy=policy_settings(epochs=2))
    batch, _ = update.prepare(await update.score(make_batch([1.0, 0.0, 1.0, 0.0], [1, 1, 2, 3])))
    assert [part.num_sequences for part in group.scored] == [1]
    assert batch["old_logprobs"].isnan().tolist() == [True] * 9 + [False] * 3
    mask_T = batch["loss_mask"].clone()
    mask_T[1] = False
    batch, _ = await update.train(batch.with_columns(loss_mask=mask_T), step=2)
    assert ["old_logprobs" in part for part in group.trained] == [False, True, True, True]
    assert [loss.old_is_current for loss in group.losses] == [True, False, False, False]
    assert not any(loss.measures_entropy for loss in group.losses)
    trained_T = batch["loss_mask"]
    assert (batch["old_logprobs"][trained_T] == -1.5).all()
    assert batch["old_logprobs"][1].isnan()
    # All compared log-probs differ by 0.5. Token 1 is not trained on, so it has no log-prob and is not compared.
    agreement = update.agreement(batch, version=4)
    assert agreement["rollout/logprob_diff_mean"] == (0.5, 1.0)
    later = batch.with_columns(old_logprobs=torch.where(torch.arange(12) == 1, 100.0, batch["old_logprobs"]))
    assert update.agreement(later, version=4) == agreement


async def test_entropies_are_measured_in_step_one_and_at_the_interval():
    group = FakeGroup()
    update = update_with(group, policy=policy_settings(entropy_interval=3, groups_per_mini_batch=9))
    batch, _ = update.prepare(await update.score(make_batch([1.0, 0.0], [1, 1])))
    for step in range(1, 8):
        await update.train(batch, step)
    assert [loss.measures_entropy for loss in group.losses] == [True, False, True, False, False, True, False]
