"""Selects the groups and tokens that a step trains on, and counts those that are left out.

This module applies the rules in `rl_core.algorithms.selection` to the groups that the loop took from the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from rl_core.algorithms.selection import (
    dynamic_sampling_replace,
    overlong_mask,
    zero_variance_groups,
    zero_variance_mask,
)
from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.errors import GenerationError
from rl_core.interfaces import Metrics, Trajectory
from rl_core.seeds import seed_of
from rl_core.trainer.groups import FinishedGroup
from rl_core.workers.group import add_metrics


class Selection:
    """Replaces groups whose samples all have the same reward, and masks tokens, as the configuration requires."""

    def __init__(
        self,
        *,
        min_replace_ratio: float | None,
        max_rejected_batches: int,
        mask_zero_variance: bool,
        mask_overlong: bool,
        seed: int,
    ):
        """
        Args:
            min_replace_ratio: smallest fraction of a batch's groups that must have a signal (differing rewards). If
                enough groups have a signal, copies of them replace the other groups; otherwise the batch is rejected.
                None: no replacement.
            max_rejected_batches: the run stops after this many rejected batches in a row.
            mask_zero_variance: do not train on groups whose samples all have the same reward.
            mask_overlong: do not train on samples whose last response was cut off at the length limit, or that had no
                room for another response. Their rewards still count in the baseline.
            seed: the run's seed. With the number of the batch's first group, it determines which copies are drawn.
        """
        self._min_replace_ratio = min_replace_ratio
        self._max_rejected_batches = max_rejected_batches
        self._mask_zero_variance = mask_zero_variance
        self._mask_overlong = mask_overlong
        self._seed = seed
        self._rejected_in_a_row = 0
        self._metrics: dict[str, tuple[float, float]] = {}
        self._masked: list[Metrics] = []

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Creates the selection from the configuration's `trainer.algorithm` and `generator`."""
        algorithm = config.trainer.algorithm
        dynamic = algorithm.dynamic_sampling
        return cls(
            min_replace_ratio=dynamic.min_replace_ratio if dynamic.type == "replace" else None,
            max_rejected_batches=dynamic.max_sample_batches,
            mask_zero_variance=algorithm.zero_variance_filter,
            mask_overlong=config.generator.apply_overlong_filtering,
            seed=config.trainer.seed,
        )

    @property
    def replaces_groups(self) -> bool:
        """Whether groups without a signal are replaced (by `chosen`)."""
        return self._min_replace_ratio is not None

    def chosen(self, groups: list[FinishedGroup]) -> list[FinishedGroup] | None:
        """Replaces groups without a signal, and returns the groups to train on. If too few groups have a signal,
        rejects the batch and returns None. Raises GenerationError if too many batches in a row were rejected."""
        assert self._min_replace_ratio is not None
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        seed = seed_of(self._seed, groups[0].group_id)
        result = dynamic_sampling_replace(
            *_scores_and_groups(trajectories), seed=seed, min_replace_ratio=self._min_replace_ratio
        )
        self._metrics |= result.metrics
        if not result.is_complete:
            self._reject(len(groups))
            return None
        self._rejected_in_a_row = 0
        version = {group.group_id: group.start_version for group in groups}
        members: dict[int, list[Trajectory]] = {}
        for row, group_id in zip(result.rows_R.tolist(), result.group_R.tolist(), strict=True):
            members.setdefault(group_id, []).append(trajectories[row])
        return [
            FinishedGroup(
                group_id=group_id,
                start_version=version[samples[0].group_id],
                trajectories=tuple(attrs.evolve(sample, group_id=group_id) for sample in samples),
            )
            for group_id, samples in members.items()
        ]

    def masked(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        """Clears `loss_mask` at the tokens that are not trained on, in a batch or in a part of a batch. Does not change
        `sampled`.

        Args:
            trajectories: the trajectories of `batch`, which its column `trajectory_id` indexes.
        """
        trajectory_N, sequence_T = batch["trajectory_id"], batch.sequence_index
        if self._mask_overlong:
            overlong = torch.tensor([trajectory.is_cut for trajectory in trajectories])
            result = overlong_mask(batch["loss_mask"], sequence_T, overlong[trajectory_N])
            batch = batch.with_columns(loss_mask=result.loss_mask_T)
            self._masked.append(result.metrics)
        if self._mask_zero_variance:
            rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
            result = zero_variance_mask(batch["loss_mask"], sequence_T, rewards[trajectory_N], batch["group_id"])
            batch = batch.with_columns(loss_mask=result.loss_mask_T)
            self._masked.append(result.metrics)
        return batch

    def lap(self) -> Metrics:
        """Returns the metrics `selection/…` of the enabled rules since the last call, and forgets them."""
        metrics, masked, self._metrics, self._masked = self._metrics, self._masked, {}, []
        return {**metrics, **add_metrics(masked)}

    def _reject(self, num_groups: int) -> None:
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row >= self._max_rejected_batches:
            raise GenerationError(
                f"{self._rejected_in_a_row} batches of {num_groups} groups in a row: rewards differ in fewer than "
                f"{self._min_replace_ratio:.0%} of the groups (trainer.algorithm.dynamic_sampling). The prompts are "
                "too easy or too hard, or the reward is constant: change them, or lower min_replace_ratio"
            )


def has_zero_variance(trajectories: Sequence[Trajectory]) -> bool:
    """Whether all samples of one prompt have (almost) the same reward. If so, estimators that compare the samples of a
    prompt give all of them an advantage of about 0."""
    return bool(zero_variance_groups(*_scores_and_groups(trajectories)).all())


def _scores_and_groups(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    scores_N = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
    return scores_N, torch.tensor([trajectory.group_id for trajectory in trajectories])
