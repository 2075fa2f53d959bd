"""How the controller transforms a batch before and between optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from rl_core.algorithms.advantages import (
    grpo_advantages,
    maxrl_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
)
from rl_core.algorithms.minibatch_losses import kl_cov_columns
from rl_core.batch import Batch
from rl_core.config import from_mapping
from rl_core.errors import NonFiniteError, PluginError
from rl_core.interfaces import LossSpec, OptimizerStep
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.trainer.before.settings import update_settings
from rl_core.trainer.update.batch_advantages import (
    load_estimator,
    with_advantages,
    with_loss_weights,
    with_off_policy_correction,
)
from rl_core.trainer.update.batch_update import BatchUpdate, UpdateSettings, prepared, rollout_agreement
from rl_core.trainer.update.model_update import ModelUpdateSettings, mini_batch_sequences
from rl_core.trainer.update.models import Models
from rl_core.workers import MicroBatchLimits


def make_batch(rewards: list[float], groups: list[int]) -> Batch:
    """One sequence per reward, with one prompt token and two sampled ones."""
    return Batch.from_sequences(
        [
            {
                "tokens": [5, 6, 7],
                "sampled": [0, 1, 1],
                "loss_mask": [0, 1, 1],
                "rollout_logprobs": [0.0, -1.0, -2.0],
                "policy_version": [-1, 4, 4],
                "rewards": [0.0, 0.0, reward],
                "group_id": group,
                "trajectory_id": number,
                "step_index": 0,
                "is_last_step": True,
            }
            for number, (reward, group) in enumerate(zip(rewards, groups, strict=True))
        ]
    )


class FakeGroup:
    """Gives every sampled token the same log-prob and records the batches it is asked to score and train on."""

    def __init__(self, *, logprob: float = -1.5, grad_norms: list[float] | None = None):
        self.logprob = logprob
        self.grad_norms = grad_norms or []
        self.trained: list[Batch] = []
        self.losses: list[LossSpec] = []
        self.scored: list[Batch] = []

    async def forward(
        self, batch: Batch, limits: MicroBatchLimits, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        self.scored.append(batch)
        scores = {"logprobs": self._logprobs(batch), "entropies": torch.ones(batch.num_tokens)}
        return {name: values_T for name, values_T in scores.items() if returns is None or name in returns}

    async def forward_backward(
        self, batch: Batch, limits: MicroBatchLimits, loss: LossSpec, *, temperature: float, returns: Sequence[str]
    ) -> dict[str, Any]:
        self.trained.append(batch)
        self.losses.append(loss)
        return {"loss": (2.0, 1.0), "entropy": (3.0, 6.0), **{name: self._logprobs(batch) for name in returns}}

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        """The prompt's only token, 5, has no log-prob."""
        return torch.where(batch["tokens"] > 5, self.logprob, 0.0)

    async def optim_step(self) -> OptimizerStep:
        norm = self.grad_norms.pop(0) if self.grad_norms else 1.0
        return OptimizerStep(grad_norm=norm, learning_rate=0.1, skipped=not math.isfinite(norm))


def settings(**changes: Any) -> UpdateSettings:
    base = UpdateSettings(
        policy=policy_settings(),
        critic=None,
        estimator=grpo_advantages,
        estimator_params={"grpo_norm_by_std": False},
        correction_params=None,
        kl_in_reward=None,
        adaptive_kl=None,
        normalize_advantages=False,
        temperature=1.0,
        forward_limits=MicroBatchLimits(max_sequences=4),
    )
    return attrs.evolve(base, **changes)


def policy_settings(**changes: Any) -> ModelUpdateSettings:
    base = ModelUpdateSettings(
        name="policy",
        loss=LossSpec(name="rl_core.algorithms.losses:ppo_clip_loss"),
        reduction="token_mean",
        reduction_params={},
        groups_per_mini_batch=2,
        epochs=1,
        temperature=1.0,
        limits=MicroBatchLimits(max_sequences=4),
        max_nonfinite_steps=2,
        seed=0,
    )
    return attrs.evolve(base, **changes)


def update_with(group: FakeGroup, reference: FakeGroup | None = None, **changes: Any) -> BatchUpdate:
    models: Any = Models(policy=group, reference=reference)  # pyright: ignore[reportArgumentType]
    return BatchUpdate(settings(**changes), models, kl_coef=0.1)


def test_an_outcome_advantage_goes_to_every_sampled_token_and_to_no_other():
    batch = with_advantages(make_batch([1.0, 0.0], [3, 3]), grpo_advantages, {"grpo_norm_by_std": False})
    assert batch["advantages"].tolist() == [0.0, 0.5, 0.5, 0.0, -0.5, -0.5]


def test_steps_of_a_trajectory_share_one_advantage_whatever_their_order():
    batch = make_batch([0.0, 1.0, 0.0], [3, 3, 3])
    steps = {"trajectory_id": [8, 2, 8], "step_index": [1, 0, 0], "is_last_step": [True, True, False]}
    columns = {name: torch.tensor(values) for name, values in steps.items()}
    batch = with_advantages(batch.with_columns(**columns), grpo_advantages, {"grpo_norm_by_std": False})
    assert batch["advantages"].tolist() == [0.0, -0.5, -0.5, 0.0, 0.5, 0.5, 0.0, -0.5, -0.5]


def test_a_token_estimator_gives_advantages_and_returns():
    batch = with_advantages(make_batch([1.0, 0.0], [3, 3]), reinforce_plus_plus_advantages, {"gamma": 0.5})
    assert batch["returns"].tolist() == [0.0, 0.5, 1.0, 0.0, 0.0, 0.0]


FORCED = [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0]]
"""Whether each token of three episodes is forced. The first token is the prompt; the last one has the reward."""


def episodes(marks: list[list[int]], *, forced: bool) -> Batch:
    """Episodes of one group. `marks` says whether each token is forced; with `forced=False`, forced tokens are left
    out."""
    sequences = []
    for number, (is_forced, reward) in enumerate(zip(marks, [1.0, 0.0, 0.5], strict=False)):
        kept = [mark for mark in is_forced if forced or not mark]
        sequences.append(
            {
                "tokens": [5] * len(kept),
                "sampled": [0] + [1] * (len(kept) - 1),
                "loss_mask": [0] + [1 - mark for mark in kept[1:]],
                "rollout_logprobs": [math.nan if mark else -1.0 for mark in kept],
                "rewards": [0.0] * (len(kept) - 1) + [reward],
                "group_id": 0,
                "trajectory_id": number,
                "step_index": 0,
                "is_last_step": True,
            }
        )
    return Batch.from_sequences(sequences)


@pytest.mark.parametrize("name", ["gae", "reinforce++", "reinforce++_baseline", "opo", "grpo"])
def test_forced_tokens_do_not_change_the_advantages_of_the_others(name: str):
    is_forced_T = torch.tensor([bool(mark) for marks in FORCED for mark in marks])
    values_T = torch.arange(len(is_forced_T)).sqrt()
    params = {"gamma": 0.9} if name in ("gae", "reinforce++") else {}
    estimator = load_estimator(name, params)
    made = with_advantages(episodes(FORCED, forced=True).with_columns(values=values_T), estimator, params)
    without = with_advantages(
        episodes(FORCED, forced=False).with_columns(values=values_T[~is_forced_T]), estimator, params
    )
    torch.testing.assert_close(made["advantages"][~is_forced_T], without["advantages"])
    assert made["advantages"].any()


def test_the_reward_of_a_fully_forced_episode_affects_no_other_episode():
    batch = episodes([[0, 0, 0], [0, 1], [0, 1, 1]], forced=True)
    made = with_advantages(batch, reinforce_plus_plus_advantages, {})
    assert made["returns"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_loss_that_reads_rewards_gets_those_of_forced_tokens():
    """The first episode of the pair ends with forced tokens, and its reward is the larger one."""
    settings = update_settings(from_mapping({"trainer.algorithm.policy_loss_type": "reward_model"}))
    batch, _ = prepared(episodes([[0, 0, 1, 1], [0, 0]], forced=True), settings, kl_coef=0.0)
    assert batch["rewards"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_an_estimator_with_an_unknown_parameter_is_refused():
    with pytest.raises(PluginError, match="parameter 'lengths_P'; an estimator reads scores_N"):
        load_estimator(f"{__name__}:needs_what_nobody_makes", {})


def needs_what_nobody_makes(scores_N: torch.Tensor, lengths_P: torch.Tensor) -> torch.Tensor:
    return scores_N + lengths_P


def test_greedy_scores_are_the_baseline_of_all_steps_of_a_trajectory():
    batch = make_batch([0.0, 1.0, 0.25], [3, 3, 4])
    steps = {"trajectory_id": [8, 2, 8], "step_index": [1, 0, 0], "is_last_step": [True, True, False]}
    columns = {name: torch.tensor(values) for name, values in steps.items()}
    batch = batch.with_columns(**columns, greedy_score=torch.tensor([0.75, 0.5, 0.75]))
    made = with_advantages(batch, load_estimator("remax", {}), {})
    # Trajectory 8 has the rewards 0 and 0.25, trajectory 2 has 1.
    assert made["advantages"].tolist() == [0.0, -0.5, -0.5, 0.0, 0.5, 0.5, 0.0, -0.5, -0.5]


def test_mini_batches_are_whole_groups_in_the_order_of_the_batch():
    batch = make_batch([0.0] * 6, [9, 9, 4, 9, 1, 4])
    assert [part.tolist() for part in mini_batch_sequences(batch, 2)] == [[0, 1, 2, 3, 5], [4]]


def test_a_truncation_scales_the_advantage_and_a_mask_clears_the_loss():
    batch = make_batch([1.0, 0.0], [3, 3]).with_columns(
        old_logprobs=torch.tensor([0.0, 2.0, -2.0, 0.0, -1.0, -2.0]), advantages=torch.ones(6)
    )
    corrected, metrics = with_off_policy_correction(
        batch, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}
    )
    assert corrected["correction_weights"].tolist() == pytest.approx([0.0, 2.0, 1.0, 0.0, 1.0, 1.0])
    assert corrected["advantages"].tolist() == [1.0] * 6
    made = objective_from_spec(LossSpec(name="regular")).prepare(corrected.columns, corrected.sequence_index, seed=0)
    assert made["advantages"].tolist() == pytest.approx([0.0, 2.0, 1.0, 0.0, 1.0, 1.0])
    masked, _ = with_off_policy_correction(batch, {"outlier_token_is_threshold_high": 5.0})
    assert masked["loss_mask"].tolist() == [False, False, False, False, True, True]
    assert all(name.startswith("correction/") for name in metrics)


def covariance_choice(batch: Batch) -> list[int]:
    """Positions of the tokens that `kl_cov` would choose with a share of 0.34."""
    columns = (batch["old_logprobs"], batch["advantages"], batch["loss_mask"])
    return kl_cov_columns(*columns, kl_cov_frac=0.34)["x_cov_top"].nonzero().squeeze(1).tolist()


def test_covariances_are_taken_over_kept_tokens_and_ignore_correction_weights():
    rollout_T = torch.tensor([0.0, -0.2, -1.0, 0.0, -2.0, -1.5, 0.0, -0.5, -3.0])
    old_T = torch.tensor([0.0, -0.1, -1.1, 0.0, -2.1, -3.5, 0.0, -0.4, -1.0])
    advantages_T = torch.tensor([0.0, 0.9, 0.9, 0.0, -1.0, -1.0, 0.0, 0.1, 0.1])
    columns = {"old_logprobs": old_T, "rollout_logprobs": rollout_T, "advantages": advantages_T}
    batch = make_batch([1.0, 0.0, 0.5], [3, 3, 3]).with_columns(**columns)
    masked, _ = with_off_policy_correction(
        batch, {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    )
    kept = masked["loss_mask"].nonzero().squeeze(1).tolist()
    assert kept == [1, 2, 4, 7]  # ratios exp(-2) of token 5 and exp(2) of token 8 are out of bounds
    mean_logprob, mean_advantage = (sum(float(v[t]) for t in kept) / len(kept) for v in (old_T, advantages_T))
    slow = {t: (float(old_T[t]) - mean_logprob) * (float(advantages_T[t]) - mean_advantage) for t in kept}
    assert covariance_choice(masked) == [max(slow, key=lambda t: slow[t])] == [4]
    weighted, _ = with_off_policy_correction(batch, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0})
    assert covariance_choice(batch) == covariance_choice(weighted) == [1, 5]
    scaled = weighted.with_columns(advantages=weighted["advantages"] * weighted["correction_weights"])
    assert covariance_choice(scaled) != covariance_choice(batch)


async def test_kl_in_the_reward_changes_the_advantages_and_steers_its_coefficient():
    update = update_with(
        FakeGroup(logprob=-1.0),
        FakeGroup(logprob=-2.0),
        kl_in_reward="k1",
        adaptive_kl={"kl_target": 0.1, "horizon": 10.0},
    )
    batch = await update.score(make_batch([1.0, 0.0], [3, 3]))
    batch, metrics = update.prepare(batch)
    assert batch["rewards"].tolist() == pytest.approx([0.0, -0.1, 0.9, 0.0, -0.1, -0.1])
    assert metrics["policy/kl"] == (4.0, 4.0)
    assert update.kl_coef == 0.1, "the coefficient must stay the same for all parts of a step"
    assert update.observed(batch, metrics) == {}
    assert update.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_the_adaptive_coefficient_counts_samples_not_steps():
    update = update_with(FakeGroup(), adaptive_kl={"kl_target": 0.1, "horizon": 10.0})
    steps = {"trajectory_id": [0, 0, 1], "step_index": [0, 1, 0], "is_last_step": [False, True, True]}
    columns = {name: torch.tensor(values) for name, values in steps.items()}
    update.observed(make_batch([0.0, 1.0, 0.0], [3, 3, 3]).with_columns(**columns), {"policy/kl": (4.0, 4.0)})
    assert update.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


@pytest.mark.parametrize(("estimator", "params"), [(maxrl_advantages, {}), (pass_at_k_advantages, {"k": 2})])
async def test_kl_in_the_reward_does_not_turn_successes_into_failures(estimator: Any, params: dict[str, Any]):
    """A KL of 10 nats per token at coefficient 0.1 makes every score negative; the same two samples stay successes."""
    changes = {"estimator": estimator, "estimator_params": params}
    update = update_with(FakeGroup(logprob=-1.0), FakeGroup(logprob=-11.0), kl_in_reward="k1", **changes)
    batch = await update.score(make_batch([1.0, 0.0, 1.0, 0.0], [3, 3, 3, 3]))
    penalised, _ = update.prepare(batch)
    assert penalised["rewards"].view(4, 3).sum(1).tolist() == pytest.approx([-1.0, -2.0, -1.0, -2.0])
    plain, _ = update_with(FakeGroup(logprob=-1.0), **changes).prepare(batch)
    assert penalised["advantages"].tolist() == pytest.approx(plain["advantages"].tolist(), abs=1e-6)
    assert plain["advantages"].view(4, 3)[:, -1].sign().tolist() == [1.0, -1.0, 1.0, -1.0]


async def test_each_mini_batch_has_its_own_weights_and_only_the_needed_columns():
    group = FakeGroup()
    update = update_with(group)
    batch, _ = update.prepare(await update.score(make_batch([1.0, 0.0, 1.0, 0.0], [1, 1, 2, 3])))
    _, metrics = await update.train(batch, step=1)
    assert [float(part["loss_weights"].sum()) for part in group.trained] == pytest.approx([1.0, 1.0])
    assert set(group.trained[0]) == {"tokens", "loss_mask", "loss_weights", "old_logprobs", "advantages"}
    assert metrics["policy/loss"] == (4.0, 2.0)
    assert metrics["policy/entropy"] == (6.0, 12.0)


async def test_skipped_steps_in_a_row_stop_the_run_and_a_good_one_resets_the_count():
    nan = float("nan")
    update = update_with(FakeGroup(grad_norms=[nan, 1.0, nan, nan]))
    batch, _ = update.prepare(await update.score(make_batch([1.0, 0.0, 1.0, 0.0], [1, 1, 2, 3])))
    _, metrics = await update.train(batch, step=1)
    assert metrics["policy/skipped_steps"] == (1.0, 2.0)
    assert metrics["policy/grad_norm"] == (1.0, 1.0)
    with pytest.raises(NonFiniteError, match="step 2: 2 optimizer steps of the policy in a row"):
        await update.train(batch, step=2)


def test_agreement_is_measured_on_tokens_of_the_trainers_own_version():
    batch = make_batch([1.0, 0.0], [3, 3])
    old = torch.tensor([0.0, -1.0, -2.5, 0.0, -1.0, -9.0])
    version = torch.tensor([-1, 4, 4, -1, 4, 3], dtype=torch.int32)
    metrics = rollout_agreement(batch.with_columns(old_logprobs=old, policy_version=version), version=4)
    assert metrics["rollout/logprob_diff_max"] == (0.5, 1.0)
    assert metrics["rollout/stale_logprob_diff_max"] == (7.0, 1.0)
    assert metrics["rollout/stale_tokens"] == (1.0, 4.0)


def test_loss_weights_of_an_empty_mask_are_zero():
    batch = make_batch([1.0], [3])
    batch = with_loss_weights(batch.with_columns(loss_mask=torch.zeros(3, dtype=torch.bool)), "prompt_mean", {})
    assert batch["loss_weights"].tolist() == [0.0, 0.0, 0.0]
