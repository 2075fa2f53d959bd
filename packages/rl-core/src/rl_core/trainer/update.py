"""One training step: scores, advantages, and the optimizer steps of policy and critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rl_core.algorithms.kl import adaptive_kl_coef
from rl_core.batch import Batch
from rl_core.columns import ROUTE_COLUMNS
from rl_core.interfaces import Metrics
from rl_core.tasks import all_of
from rl_core.trainer.batch_advantages import (
    Estimator,
    with_advantages,
    with_kl_in_reward,
    with_normalized_advantages,
    with_off_policy_correction,
)
from rl_core.trainer.model_update import ModelUpdate, ModelUpdateSettings
from rl_core.trainer.models import Models
from rl_core.workers import MicroBatchLimits


@attrs.frozen(kw_only=True)
class UpdateSettings:
    """What a step does with a batch; read from `trainer.algorithm` and the batch sizes."""

    policy: ModelUpdateSettings
    critic: ModelUpdateSettings | None
    """None: the estimator reads no values."""
    scores_policy: bool = True
    """Something reads what the policy gives a batch before it is trained on it."""
    estimator: Estimator | None
    """None: the loss reads no advantages."""
    estimator_params: Mapping[str, Any]
    correction_params: Mapping[str, Any] | None
    """None: no off-policy correction."""
    kl_in_reward: str | None
    """KL estimator of the penalty in the reward; None: no penalty."""
    adaptive_kl: Mapping[str, float] | None
    """`kl_target` and `horizon` of the penalty's coefficient; None keeps it fixed."""
    normalize_advantages: bool
    temperature: float
    forward_limits: MicroBatchLimits


class BatchUpdate:
    """Turns batches into optimizer steps; holds what moves between them: the KL coefficient and, per model, the
    skipped steps in a row."""

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
        self._policy = ModelUpdate(settings.policy, models.policy, nonfinite_steps=nonfinite_steps)
        self._critic: ModelUpdate | None = None
        if settings.critic is not None and models.critic is not None:
            self._critic = ModelUpdate(settings.critic, models.critic, nonfinite_steps=critic_nonfinite_steps)
        self.kl_coef = kl_coef

    @property
    def nonfinite_steps(self) -> int:
        """Skipped optimizer steps of the policy in a row."""
        return self._policy.nonfinite_steps

    @property
    def critic_nonfinite_steps(self) -> int:
        """Skipped optimizer steps of the critic in a row; 0 without one."""
        return self._critic.nonfinite_steps if self._critic else 0

    async def score(self, batch: Batch, *, judges: bool = False) -> Batch:
        """Adds, as far as anything reads them, the policy's `old_logprobs` and `old_entropies`, or the `values` of a
        policy that has a value head, the reference's `ref_logprobs` and the critic's `values`.

        Routes are the policy's: reference and critic choose experts by themselves.

        Args:
            judges: the policy's scores are wanted in any case.
        """
        models, limits, temperature = self._models, self._settings.forward_limits, self._settings.temperature
        policy = models.policy if judges or self._settings.scores_policy else None
        groups = [group for group in (policy, models.reference, models.critic) if group is not None]
        others = batch.without_columns(*ROUTE_COLUMNS)
        scores = await all_of(
            group.forward(batch if group is models.policy else others, limits, temperature=temperature)
            for group in groups
        )
        by_group = dict(zip(groups, scores, strict=True))
        scored = by_group.get(models.policy, {})
        columns = {name: scored[of] for name, of in _POLICY_SCORES.items() if of in scored}
        if models.reference is not None:
            columns["ref_logprobs"] = by_group[models.reference]["logprobs"]
        if models.critic is not None:
            columns["values"] = by_group[models.critic]["values"]
        return batch.with_columns(**columns)

    def prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Adds advantages; applies KL in the reward, normalisation and off-policy correction."""
        settings = self._settings
        metrics: dict[str, tuple[float, float]] = {}
        if settings.kl_in_reward is not None:
            batch, kl = with_kl_in_reward(batch, coef=self.kl_coef, estimator=settings.kl_in_reward)
            metrics |= {**kl, "policy/kl_coef": (self.kl_coef, 1.0)}
            if settings.adaptive_kl is not None:
                total, weight = kl["policy/kl"]
                observed = total / max(weight, 1.0)
                self.kl_coef = adaptive_kl_coef(
                    self.kl_coef, observed, num_samples=batch.num_sequences, **settings.adaptive_kl
                )
        if settings.estimator is None:
            return batch, metrics
        batch = with_advantages(batch, settings.estimator, settings.estimator_params)
        if self._critic is not None:
            metrics |= explained_variance(batch)
        if settings.normalize_advantages:
            batch = with_normalized_advantages(batch)
        if settings.correction_params is not None:
            batch, correction = with_off_policy_correction(batch, settings.correction_params)
            metrics |= {**correction}
        return batch, metrics

    async def judged(self, batch: Batch, step: int) -> dict[str, float]:
        """The training loss of held-out rows and its metrics, `eval/…`, all rows as one mini-batch; nothing is
        trained."""
        scored = await self.score(batch, judges=True)
        prepared, _ = self.prepare(scored)
        return {f"eval/{name}": value for name, value in self._policy.judged(prepared, step).items()}

    async def train(self, batch: Batch, step: int) -> Metrics:
        """All optimizer steps of the batch: policy and critic at the same time, one after the other where they share
        devices."""
        policy, critic = self._models.policy, self._models.critic
        if self._critic is None or critic is None:
            return await self._policy.train(batch, step)
        own = {self._policy: batch, self._critic: batch.without_columns(*ROUTE_COLUMNS)}
        if critic.shares_devices_with(policy):
            return {**await self._critic.train(own[self._critic], step), **await self._policy.train(batch, step)}
        metrics = await all_of(update.train(its_batch, step) for update, its_batch in own.items())
        return {name: value for its_metrics in metrics for name, value in its_metrics.items()}


_POLICY_SCORES = {
    "old_logprobs": "logprobs",
    "old_entropies": "entropies",
    "values": "values",
    **{name: name for name in ROUTE_COLUMNS},
}
"""Column of a batch → the policy's score that goes there."""


def explained_variance(batch: Batch) -> Metrics:
    """`critic/explained_variance`: 1 − Var(returns − values) / Var(returns) over the trained tokens.

    1 is a perfect critic, 0 one that knows no more than the mean; nothing where the returns do not vary.
    """
    mask_T = batch["loss_mask"]
    returns_T, values_T = batch["returns"][mask_T].double(), batch["values"][mask_T].double()
    variance = float(returns_T.var(correction=0)) if len(returns_T) else 0.0
    if variance == 0.0:
        return {}
    return {"critic/explained_variance": (1.0 - float((returns_T - values_T).var(correction=0)) / variance, 1.0)}


def rollout_agreement(batch: Batch, version: int) -> Metrics:
    """How far engine and trainer are apart on sampled tokens: those of the trainer's own version, and the others apart.

    `rollout/logprob_diff_max` is the largest |rollout_logprobs − old_logprobs| in nats over tokens of `version`.
    """
    difference_T = (batch["rollout_logprobs"] - batch["old_logprobs"]).abs()
    current_T = batch["sampled"] & (batch["policy_version"] == version)
    stale_T = batch["sampled"] & (batch["policy_version"] != version)
    metrics = {"rollout/stale_tokens": (float(stale_T.sum()), float(batch["sampled"].sum()))}
    for name, mask_T in (("rollout/logprob_diff", current_T), ("rollout/stale_logprob_diff", stale_T)):
        if mask_T.any():
            metrics[f"{name}_max"] = (float(difference_T[mask_T].max()), 1.0)
            metrics[f"{name}_mean"] = (float(difference_T[mask_T].mean()), 1.0)
    return metrics
