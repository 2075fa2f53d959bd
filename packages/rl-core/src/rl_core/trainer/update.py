"""One training step: scores, advantages, and the optimizer steps of every mini-batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from rl_core.algorithms.kl import adaptive_kl_coef
from rl_core.batch import Batch
from rl_core.errors import NonFiniteError
from rl_core.interfaces import LossSpec, Metrics, OptimizerStep
from rl_core.trainer.advantages import (
    Estimator,
    with_advantages,
    with_kl_in_reward,
    with_loss_weights,
    with_normalized_advantages,
    with_off_policy_correction,
)
from rl_core.workers import MicroBatchLimits, WorkerGroup, objective_from_spec
from rl_core.workers.group import INPUT_COLUMNS, add_metrics


@attrs.frozen(kw_only=True)
class UpdateSettings:
    """What a step does with a batch; read from `trainer.algorithm` and the batch sizes."""

    loss: LossSpec
    estimator: Estimator
    estimator_params: Mapping[str, Any]
    reduction: str
    reduction_params: Mapping[str, Any]
    correction_params: Mapping[str, Any] | None
    """None: no off-policy correction."""
    kl_in_reward: str | None
    """KL estimator of the penalty in the reward; None: no penalty."""
    adaptive_kl: Mapping[str, float] | None
    """`kl_target` and `horizon` of the penalty's coefficient; None keeps it fixed."""
    normalize_advantages: bool
    groups_per_mini_batch: int
    epochs: int
    temperature: float
    train_limits: MicroBatchLimits
    forward_limits: MicroBatchLimits
    max_nonfinite_steps: int
    seed: int


class PolicyUpdate:
    """Turns batches into optimizer steps; holds what moves between them: the KL coefficient and the skipped steps in
    a row."""

    def __init__(
        self,
        settings: UpdateSettings,
        policy: WorkerGroup,
        reference: WorkerGroup | None,
        *,
        kl_coef: float,
        nonfinite_steps: int = 0,
    ):
        self._settings = settings
        self._policy = policy
        self._reference = reference
        self._objective = objective_from_spec(settings.loss)
        self.kl_coef = kl_coef
        self.nonfinite_steps = nonfinite_steps

    async def score(self, batch: Batch) -> Batch:
        """Adds `old_logprobs`, `old_entropies`, and `ref_logprobs` where a KL term needs them."""
        limits, temperature = self._settings.forward_limits, self._settings.temperature
        scores = [self._policy.forward(batch, limits, temperature=temperature)]
        if self._reference is not None:
            scores.append(self._reference.forward(batch, limits, temperature=temperature))
        policy, *reference = await asyncio.gather(*scores)
        batch = batch.with_columns(old_logprobs=policy["logprobs"], old_entropies=policy["entropies"])
        return batch.with_columns(ref_logprobs=reference[0]["logprobs"]) if reference else batch

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
        batch = with_advantages(batch, settings.estimator, settings.estimator_params)
        if settings.normalize_advantages:
            batch = with_normalized_advantages(batch)
        if settings.correction_params is not None:
            batch, correction = with_off_policy_correction(batch, settings.correction_params)
            metrics |= {**correction}
        return batch, metrics

    async def train(self, batch: Batch, step: int) -> Metrics:
        """One optimizer step per mini-batch and epoch."""
        settings = self._settings
        parts: list[Metrics] = []
        for epoch in range(settings.epochs):
            for number, mini_batch in enumerate(mini_batches(batch, settings.groups_per_mini_batch)):
                mini_batch = with_loss_weights(mini_batch, settings.reduction, settings.reduction_params)
                mini_batch = self._for_workers(mini_batch, seed=hash((settings.seed, step, epoch, number)) & 0x7FFFFFFF)
                metrics = await self._policy.forward_backward(
                    mini_batch, settings.train_limits, settings.loss, temperature=settings.temperature
                )
                parts.append({f"policy/{name}": value for name, value in metrics.items()})
                parts.append(self._checked(await self._policy.optim_step(), step))
        return add_metrics(parts)

    def _for_workers(self, mini_batch: Batch, seed: int) -> Batch:
        """The columns that the loss reads, those it prepares from the whole mini-batch included; nothing else is
        sent."""
        made = self._objective.prepare(mini_batch.columns, mini_batch.sequence_index, seed=seed)
        mini_batch = mini_batch.with_columns(**made)
        needed = {*INPUT_COLUMNS, *self._objective.call_columns}
        return mini_batch.without_columns(*(name for name in mini_batch if name not in needed))

    def _checked(self, result: OptimizerStep, step: int) -> Metrics:
        limit = self._settings.max_nonfinite_steps
        self.nonfinite_steps = self.nonfinite_steps + 1 if result.skipped else 0
        if self.nonfinite_steps >= limit:
            raise NonFiniteError(
                f"step {step}: {self.nonfinite_steps} optimizer steps in a row had a loss or gradient that is not "
                f"finite "
                "(trainer.max_consecutive_nonfinite_steps) and were skipped. Lower the learning rate, or look at "
                "rollout/logprob_diff_max and the rewards of the last steps"
            )
        metrics = {
            "policy/skipped_steps": (float(result.skipped), 1.0),
            "policy/learning_rate": (result.learning_rate, 1.0),
        }
        return metrics if result.skipped else {**metrics, "policy/grad_norm": (result.grad_norm, 1.0)}


def mini_batches(batch: Batch, groups_per_mini_batch: int) -> list[Batch]:
    """The batch cut into mini-batches of whole groups, in the batch's order of groups."""
    groups = list(dict.fromkeys(batch["group_id"].tolist()))
    if len(groups) <= groups_per_mini_batch:
        return [batch]
    number = {group: index // groups_per_mini_batch for index, group in enumerate(groups)}
    mini_batch_N = torch.tensor([number[group] for group in batch["group_id"].tolist()])
    return [batch.select(torch.nonzero(mini_batch_N == index).squeeze(1)) for index in range(max(number.values()) + 1)]


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
