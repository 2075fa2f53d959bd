"""Trains policy and critic on a batch: computes scores and advantages, and takes the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_core.algorithms.kl import adaptive_kl_coef
from rl_core.batch import Batch
from rl_core.columns import INPUT_COLUMNS, KEPT_COLUMNS, ROUTE_COLUMNS
from rl_core.errors import GenerationError
from rl_core.interfaces import Metrics
from rl_core.tasks import all_of
from rl_core.trainer.update.batch_advantages import (
    Estimator,
    chosen_tokens,
    with_advantages,
    with_kl_in_reward,
    with_normalized_advantages,
    with_off_policy_correction,
    with_rewards_of_chosen,
)
from rl_core.trainer.update.model_update import ModelUpdate, ModelUpdateSettings, mini_batch_sequences
from rl_core.trainer.update.models import Models
from rl_core.trainer.update.scoring_pass import ScoringPass
from rl_core.trainer.update.served_reference import ServedReference
from rl_core.workers import MicroBatchLimits, WorkerGroup


@attrs.frozen(kw_only=True)
class UpdateSettings:
    """Settings of training on a batch, which `update_settings` builds from the configuration."""

    policy: ModelUpdateSettings
    critic: ModelUpdateSettings | None
    """Settings of training the critic; None: there is no critic, because the estimator reads no values."""
    scoring: ScoringPass = attrs.field(factory=ScoringPass)
    """Which scores the policy computes before training on a batch."""
    estimator: Estimator | None
    """The advantage estimator; None: the loss reads no advantages."""
    estimator_params: Mapping[str, Any]
    correction_params: Mapping[str, Any] | None
    """Keyword arguments of the off-policy correction; None: there is no correction."""
    kl_in_reward: str | None
    """KL estimator of the penalty in the reward; None: no penalty."""
    adaptive_kl: Mapping[str, float] | None
    """`kl_target` and `horizon` of the penalty's adaptive coefficient; None: the coefficient is fixed."""
    normalize_advantages: bool
    temperature: float
    is_truncated: bool = False
    """Whether responses are sampled with top-p, top-k or min-p, so that scores need the kept tokens."""
    forward_limits: MicroBatchLimits


class BatchUpdate:
    """Turns batches into optimizer steps. Between training steps, its only state is the KL coefficient and, per model,
    the number of optimizer steps skipped in a row."""

    def __init__(
        self,
        settings: UpdateSettings,
        models: Models,
        *,
        kl_coef: float,
        nonfinite_steps: int = 0,
        critic_nonfinite_steps: int = 0,
    ):
        self._settings = settings
        self._models = models
        self._policy = ModelUpdate(
            settings.policy,
            models.policy,
            first_is_own=settings.scoring.first_is_own,
            keeps_first=settings.scoring.keeps_first,
            nonfinite_steps=nonfinite_steps,
        )
        self._critic: ModelUpdate | None = None
        if settings.critic is not None and models.critic is not None:
            self._critic = ModelUpdate(settings.critic, models.critic, nonfinite_steps=critic_nonfinite_steps)
        self.kl_coef = kl_coef

    @property
    def nonfinite_steps(self) -> int:
        """Number of optimizer steps of the policy that were skipped in a row; 0 if the last step was not skipped."""
        return self._policy.nonfinite_steps

    @property
    def critic_nonfinite_steps(self) -> int:
        """The same number for the critic; 0 without a critic."""
        return self._critic.nonfinite_steps if self._critic else 0

    async def score(self, batch: Batch, *, judges: bool = False) -> Batch:
        """Adds the scores that later computations read: the policy's `old_logprobs` and `old_entropies`, or its
        `values` if it has a value head; the reference's `ref_logprobs`; the critic's `values`. Also adds the policy's
        expert routes if its backend records them.

        Only the policy follows the batch's expert routes; reference and critic choose experts with their own routers.
        Policy and reference score every token among the kept tokens, if the batch has any.

        Args:
            judges: compute all scores of the policy, even those that training does not need before its first optimizer
                step.

        Raises:
            GenerationError: sampling was truncated, but the batch does not have the kept tokens.
        """
        if self._settings.is_truncated and "kept_counts" not in batch:
            raise GenerationError(
                "the samples lack kept_tokens, without which the trainer cannot score samples that were truncated by "
                "generator.sampling_params (top_p, top_k, min_p). Start external servers with the same "
                "generator.sampling_params; a generator of your own must pass on Completion.kept_tokens"
            )
        models, limits, temperature = self._models, self._settings.forward_limits, self._settings.temperature
        others = batch.without_columns(*ROUTE_COLUMNS)
        calls = {"policy": self._policy_columns(batch, judges=judges)}
        if models.reference is not None:
            calls["reference"] = self._reference_columns(models.reference, others)
        if models.critic is not None:
            calls["critic"] = models.critic.forward(_without_choices(batch), limits, temperature=temperature)
        scored = dict(zip(calls, await all_of(calls.values()), strict=True))
        columns = {**scored["policy"], **scored.get("reference", {})}
        if models.critic is not None:
            columns["values"] = scored["critic"]["values"]
        return batch.with_columns(**columns)

    async def _reference_columns(self, reference: WorkerGroup | ServedReference, batch: Batch) -> dict[str, Tensor]:
        if isinstance(reference, ServedReference):
            return {"ref_logprobs": await reference.logprobs(batch)}
        limits, temperature = self._settings.forward_limits, self._settings.temperature
        scored = await reference.forward(batch, limits, temperature=temperature, returns=("logprobs",))
        return {"ref_logprobs": scored["logprobs"]}

    async def _policy_columns(self, batch: Batch, *, judges: bool) -> dict[str, Tensor]:
        """The policy's scores that training needs beforehand, or all scores if `judges`. If the first optimizer step
        computes its old log-probs itself, `old_logprobs` has NaN for the first mini-batch, or is missing if there is
        only one mini-batch."""
        scoring, limits, temperature = self._settings.scoring, self._settings.forward_limits, self._settings.temperature
        forward = self._models.policy.forward
        if judges or scoring.covers_batch:
            scores = None if judges else scoring.scores
            scored = await forward(batch, limits, temperature=temperature, returns=scores)
            return {name: scored[of] for name, of in _POLICY_SCORES.items() if of in scored}
        later = mini_batch_sequences(batch, self._settings.policy.groups_per_mini_batch)[1:]
        if not scoring.first_is_own or not later:
            return {}
        later_M = torch.cat(later).sort().values
        inputs = batch.without_columns(*(name for name in batch if name not in INPUT_COLUMNS))
        scored = await forward(inputs.select(later_M), limits, temperature=temperature, returns=scoring.scores)
        old_logprobs_T = torch.full((batch.num_tokens,), float("nan"))
        old_logprobs_T[batch.token_index(later_M)] = scored["logprobs"]
        return {"old_logprobs": old_logprobs_T}

    def prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Prepares a scored batch for the loss (see `prepared`) with the current KL coefficient."""
        return prepared(batch, self._settings, kl_coef=self.kl_coef)

    async def judged(self, batch: Batch, step: int) -> dict[str, float]:
        """Computes the loss of held-out rows, taken as one mini-batch, without training. Returns the loss and its
        metrics as `eval/…`."""
        scored = await self.score(batch, judges=True)
        batch, _ = self.prepare(scored)
        return {f"eval/{name}": value for name, value in self._policy.judged(batch, step).items()}

    async def train(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Takes all optimizer steps of the batch. Policy and critic take their steps concurrently, or in turn if they
        share devices. Returns the batch and metrics. If the first optimizer step returns log-probs
        (`ScoringPass.keeps_first`), the returned batch has them in `old_logprobs`."""
        policy, critic = self._models.policy, self._models.critic
        if self._critic is None or critic is None:
            return await self._policy.train(batch, step)
        others = _without_choices(batch)
        if critic.shares_devices_with(policy):
            _, of_critic = await self._critic.train(others, step)
            batch, of_policy = await self._policy.train(batch, step)
        else:
            calls = [self._policy.train(batch, step), self._critic.train(others, step)]
            (batch, of_policy), (_, of_critic) = await all_of(calls)
        return batch, {**of_policy, **of_critic}

    async def add(self, batch: Batch, step: int) -> Batch:
        """Adds the gradients of policy and critic for a part of the step's batch. Returns the part, with `old_logprobs`
        as in `train`."""
        if self._critic is None:
            return await self._policy.add(batch, step)
        others = _without_choices(batch)
        batch, _ = await all_of([self._policy.add(batch, step), self._critic.add(others, step)])
        return batch

    async def finish(self, step: int) -> Metrics:
        """Takes the optimizer step of each model over all added parts."""
        of_models = await all_of([model.finish(step) for model in (self._policy, self._critic) if model is not None])
        return {name: value for metrics in of_models for name, value in metrics.items()}

    def observed(self, batch: Batch, metrics: Metrics) -> Metrics:
        """Adapts the KL coefficient, which the next step uses, to the KL observed in this step. Returns the metrics
        that need the whole batch.

        Args:
            batch: all parts of the step's batch, prepared.
            metrics: the metrics that `prepare` returned, summed over the parts.
        """
        adaptive = self._settings.adaptive_kl
        if adaptive is not None and "policy/kl" in metrics:
            total, weight = metrics["policy/kl"]
            observed = total / max(weight, 1.0)
            num_samples = int(batch["is_last_step"].sum())
            self.kl_coef = adaptive_kl_coef(self.kl_coef, observed, num_samples=num_samples, **adaptive)
        return {} if self._critic is None else explained_variance(batch)

    def agreement(self, batch: Batch, version: int) -> Metrics:
        """Returns `rollout_agreement` of a batch that was trained on. Compares only tokens whose log-probs were
        computed with the weights at the start of the update."""
        scoring = self._settings.scoring
        if scoring.covers_batch:
            return rollout_agreement(batch, version)
        first_M = mini_batch_sequences(batch, self._settings.policy.groups_per_mini_batch)[0]
        is_first_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
        is_first_T[batch.token_index(first_M)] = True
        # The first optimizer step returned log-probs of trained tokens only. Other mini-batches were scored if the loss
        # reads old log-probs.
        is_known_T = torch.where(is_first_T, batch["loss_mask"], scoring.first_is_own)
        return rollout_agreement(batch, version, among=is_known_T)


def _without_choices(batch: Batch) -> Batch:
    """The batch for a critic, which follows no routes and scores no tokens."""
    return batch.without_columns(*ROUTE_COLUMNS, *KEPT_COLUMNS)


def prepared(batch: Batch, settings: UpdateSettings, *, kl_coef: float) -> tuple[Batch, Metrics]:
    """Prepares a scored batch for the loss. Applies KL in the reward, computes advantages, normalises them, and applies
    the off-policy correction, each if the settings enable it. Without an estimator, only applies KL in the reward, and
    moves the rewards of forced tokens. Returns the batch and metrics."""
    metrics: dict[str, tuple[float, float]] = {}
    if settings.kl_in_reward is not None:
        batch, kl = with_kl_in_reward(batch, coef=kl_coef, estimator=settings.kl_in_reward)
        metrics |= {**kl, "policy/kl_coef": (kl_coef, 1.0)}
    if settings.estimator is None:
        return with_rewards_of_chosen(batch), metrics
    batch = with_advantages(batch, settings.estimator, settings.estimator_params)
    if settings.normalize_advantages:
        batch = with_normalized_advantages(batch)
    if settings.correction_params is not None:
        batch, correction = with_off_policy_correction(batch, settings.correction_params)
        metrics |= {**correction}
    return batch, metrics


_POLICY_SCORES = {
    "old_logprobs": "logprobs",
    "old_entropies": "entropies",
    "values": "values",
    **{name: name for name in ROUTE_COLUMNS},
}
"""Column of a batch → key of this column's values in the result of the policy's `forward`."""


def explained_variance(batch: Batch) -> Metrics:
    """Computes `critic/explained_variance`: 1 − Var(returns − values) / Var(returns) over the trained tokens.

    The metric is 1 if the values equal the returns up to a constant, 0 if a constant would predict the returns equally
    well, and negative if a constant would predict them better. Returns no metric if the returns do not vary.
    """
    mask_T = batch["loss_mask"]
    returns_T, values_T = batch["returns"][mask_T].double(), batch["values"][mask_T].double()
    variance = float(returns_T.var(correction=0)) if len(returns_T) else 0.0
    if variance == 0.0:
        return {}
    return {"critic/explained_variance": (1.0 - float((returns_T - values_T).var(correction=0)) / variance, 1.0)}


def rollout_agreement(batch: Batch, version: int, *, among: Tensor | None = None) -> Metrics:
    """Measures how much the log-probs of engine and trainer differ on sampled tokens.

    `rollout/logprob_diff_max` and `_mean` are the largest and the mean |rollout_logprobs − old_logprobs| in nats over
    tokens sampled with `version`. `rollout/stale_logprob_diff_max` and `_mean` are the same over tokens sampled with
    other versions. `rollout/stale_tokens` is the fraction of sampled tokens that come from other versions. Tokens of
    forced responses have no rollout log-probs and are left out.

    Args:
        batch: has `old_logprobs`.
        version: the trainer's version at the start of the step.
        among: bool [T], the tokens whose log-probs are compared; None: all sampled tokens.
    """
    difference_T = (batch["rollout_logprobs"] - batch["old_logprobs"]).abs()
    sampled_T = chosen_tokens(batch)
    current_T = sampled_T & (batch["policy_version"] == version)
    stale_T = sampled_T & (batch["policy_version"] != version)
    metrics = {"rollout/stale_tokens": (float(stale_T.sum()), float(sampled_T.sum()))}
    for name, of_version_T in (("rollout/logprob_diff", current_T), ("rollout/stale_logprob_diff", stale_T)):
        mask_T = of_version_T if among is None else of_version_T & among
        if mask_T.any():
            metrics[f"{name}_max"] = (float(difference_T[mask_T].max()), 1.0)
            metrics[f"{name}_mean"] = (float(difference_T[mask_T].mean()), 1.0)
    return metrics
