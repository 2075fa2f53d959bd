"""Trains one model, policy or critic, on a batch, with one optimizer step per mini-batch and epoch. A batch that comes
in parts (streaming) gets a single optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.columns import INPUT_COLUMNS
from rl_core.errors import NonFiniteError
from rl_core.interfaces import LossSpec, Metrics, OptimizerStep, OptimizerUpdate
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.seeds import seed_of
from rl_core.trainer.update.batch_advantages import with_loss_weights, with_prepared, with_summed_loss_weights
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_core.workers.group import add_metrics


@attrs.frozen(kw_only=True)
class ModelUpdateSettings:
    """Settings of training one model on a batch."""

    name: str
    """`policy` or `critic`; also the prefix of the model's metrics."""
    loss: LossSpec
    reduction: str
    reduction_params: Mapping[str, Any]
    groups_per_mini_batch: int
    epochs: int
    temperature: float
    entropy_interval: int = 0
    """In step 1 and in every step divisible by this number, the metric `entropy` is computed even if the loss reads no
    entropies; 0: only if the loss reads them."""
    limits: MicroBatchLimits
    max_nonfinite_steps: int
    seed: int


class ModelUpdate:
    """Turns batches into optimizer steps of one model. Between training steps, its only state is the number of
    optimizer steps skipped in a row."""

    def __init__(
        self,
        settings: ModelUpdateSettings,
        group: WorkerGroup,
        *,
        first_is_own: bool = False,
        keeps_first: bool = False,
        nonfinite_steps: int = 0,
    ):
        """
        Args:
            settings: loss, batch sizes and limits.
            group: the model's ranks.
            first_is_own, keeps_first: as in `ScoringPass`.
            nonfinite_steps: number of optimizer steps skipped in a row so far.
        """
        self._settings = settings
        self._group = group
        self._objective = objective_from_spec(settings.loss)
        self._first_is_own = first_is_own
        self._keeps_first = keeps_first
        self._added: list[Metrics] = []
        self._divisor = 0.0
        """Sum of the loss reduction's divisors over the parts added so far."""
        self.nonfinite_steps = nonfinite_steps

    async def train(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        """Takes one optimizer step per mini-batch and epoch. Returns the batch and metrics. If `keeps_first`, the
        returned batch has, as `old_logprobs` of the first mini-batch, the log-probs of its first training pass."""
        settings = self._settings
        parts: list[Metrics] = []
        for epoch in range(settings.epochs):
            for number, sequences_M in enumerate(mini_batch_sequences(batch, settings.groups_per_mini_batch)):
                mini_batch = with_loss_weights(batch.select(sequences_M), settings.reduction, settings.reduction_params)
                seed = seed_of(settings.seed, step, epoch, number)
                scores, metrics = await self._accumulated(mini_batch, step, seed, is_first=epoch == number == 0)
                if scores:
                    batch = with_trained_logprobs(batch, sequences_M, scores["logprobs"])
                parts += [metrics, self._checked(await self._group.optim_step(), step)]
        return batch, self._named(parts)

    async def add(self, batch: Batch, step: int) -> Batch:
        """Adds the gradient of a part of the step's batch. The part consists of whole groups, and the batch is a single
        mini-batch, for which `finish` takes the optimizer step. Returns the part; if `keeps_first`, its `old_logprobs`
        are those that the training pass computed."""
        settings = self._settings
        part, divisor = with_summed_loss_weights(batch, settings.reduction, settings.reduction_params)
        scores, metrics = await self._accumulated(part, step, seed_of(settings.seed, step, 0, 0), is_first=True)
        self._divisor += divisor
        self._added.append(metrics)
        if scores:
            batch = with_trained_logprobs(batch, torch.arange(batch.num_sequences), scores["logprobs"])
        return batch

    async def finish(self, step: int) -> Metrics:
        """Takes the optimizer step over all added parts. Gradient and loss equal those of the undivided batch."""
        scale, added = 1.0 / max(self._divisor, 1.0), add_metrics(self._added)
        self._added, self._divisor = [], 0.0
        loss = {"loss": (added["loss"][0] * scale, 1.0)}
        result = await self._group.optim_step(OptimizerUpdate(gradient_scale=scale))
        return self._named([{**added, **loss}, self._checked(result, step)])

    async def _accumulated(
        self, weighted: Batch, step: int, seed: int, *, is_first: bool
    ) -> tuple[dict[str, Tensor], Metrics]:
        """Adds the gradient of a batch that has loss weights. Returns the scores to keep, and metrics."""
        settings, interval = self._settings, self._settings.entropy_interval
        loss = attrs.evolve(
            settings.loss,
            old_is_current=is_first and self._first_is_own,
            measures_entropy=interval > 0 and (step == 1 or step % interval == 0),
        )
        returns = ("logprobs",) if is_first and self._keeps_first else ()
        metrics = await self._group.forward_backward(
            self._for_workers(weighted, loss, seed),
            settings.limits,
            loss,
            temperature=settings.temperature,
            returns=returns,
        )
        scores = {name: metrics.pop(name) for name in returns}
        return scores, metrics

    def _named(self, parts: Iterable[Metrics]) -> Metrics:
        return {f"{self._settings.name}/{name}": value for name, value in add_metrics(parts).items()}

    def judged(self, batch: Batch, step: int) -> dict[str, float]:
        """Computes the loss of a scored batch, taken as one mini-batch, without training. Returns the loss's metrics,
        and `perplexity` = exp(mean negative log-prob of the trained tokens) if the loss reads log-probs."""
        settings, objective = self._settings, self._objective
        batch = with_loss_weights(batch, settings.reduction, settings.reduction_params)
        batch = with_prepared(batch, objective, seed_of(settings.seed, step))
        current = {f"{name}_T": batch[_SCORE_OF[name]] for name in objective.reads}
        _, sums = objective(batch.columns, sequence_T=batch.sequence_index, **current)
        metrics = {name: float(total) / float(weight) for name, (total, weight) in sums.items() if weight}
        if "logprobs" in objective.reads:
            logprobs_M = batch["old_logprobs"][batch["loss_mask"]].double()
            metrics["perplexity"] = float((-logprobs_M.mean()).exp())
        return metrics

    def _for_workers(self, mini_batch: Batch, loss: LossSpec, seed: int) -> Batch:
        """Reduces the mini-batch to the model's inputs and the columns that the loss reads, and adds the columns that
        the loss prepares from the whole mini-batch."""
        mini_batch = with_prepared(mini_batch, self._objective, seed)
        needed = {*INPUT_COLUMNS, *self._objective.call_columns}
        needed -= {"old_logprobs"} if loss.old_is_current else set()
        return mini_batch.without_columns(*(name for name in mini_batch if name not in needed))

    def _checked(self, result: OptimizerStep, step: int) -> Metrics:
        limit, name = self._settings.max_nonfinite_steps, self._settings.name
        self.nonfinite_steps = self.nonfinite_steps + 1 if result.skipped else 0
        if self.nonfinite_steps >= limit:
            raise NonFiniteError(
                f"step {step}: {self.nonfinite_steps} optimizer steps of the {name} in a row were skipped because "
                f"loss or gradient was not finite; trainer.max_consecutive_nonfinite_steps is {limit}. Lower the "
                "learning rate; if an engine samples, also look at rollout/logprob_diff_max and the last steps' rewards"
            )
        metrics = {"skipped_steps": (float(result.skipped), 1.0), "learning_rate": (result.learning_rate, 1.0)}
        return metrics if result.skipped else {**metrics, "grad_norm": (result.grad_norm, 1.0)}


_SCORE_OF = {"logprobs": "old_logprobs", "entropies": "old_entropies", "predicted_values": "values"}
"""Score of the current model that a loss reads → column with this score in a batch. `judged` reads these columns,
because the model does not change between scoring and loss."""


def mini_batch_sequences(batch: Batch, groups_per_mini_batch: int) -> list[Tensor]:
    """Indices [M] of the sequences of each mini-batch. A mini-batch consists of whole groups, in the batch's order."""
    groups = list(dict.fromkeys(batch["group_id"].tolist()))
    number = {group: index // groups_per_mini_batch for index, group in enumerate(groups)}
    mini_batch_N = torch.tensor([number[group] for group in batch["group_id"].tolist()])
    return [torch.nonzero(mini_batch_N == index).squeeze(1) for index in range(max(number.values()) + 1)]


def with_trained_logprobs(batch: Batch, sequences_M: Tensor, logprobs_T: Tensor) -> Batch:
    """Sets `old_logprobs` of some sequences of a batch to the log-probs that a training pass returned.

    Untrained tokens of these sequences get NaN. If the batch had no such column, all tokens of other sequences get NaN
    too.

    Args:
        batch: the whole batch.
        sequences_M: indices of the trained sequences.
        logprobs_T: log-probs of the tokens of these sequences, in the order of `sequences_M`.
    """
    unknown_T = torch.full((batch.num_tokens,), float("nan"))
    old_logprobs_T = batch["old_logprobs"].clone() if "old_logprobs" in batch else unknown_T
    index_T = batch.token_index(sequences_M)
    old_logprobs_T[index_T] = torch.where(batch["loss_mask"][index_T], logprobs_T, float("nan"))
    return batch.with_columns(old_logprobs=old_logprobs_T)
