"""Between buffer and batch: which groups and tokens a step trains on, and what was left out.

What selection drops is counted; what it drops before a step is full goes back to the buffer as room for other groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import attrs
import torch

from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.errors import GenerationError
from rl_core.interfaces import Trajectory
from rl_core.trainer.buffer import FinishedGroup


class Selection:
    """Repairs and masks the batches of a run; counts what it did since the last `lap`."""

    def __init__(
        self,
        *,
        min_replace_ratio: float | None,
        max_rejected_batches: int,
        mask_zero_variance: bool,
        mask_overlong: bool,
    ):
        """
        Args:
            min_replace_ratio: least share of groups with a signal that a batch needs for the others to be replaced by
                repeating them; below it the batch is given up. None: no replacement.
            max_rejected_batches: so many batches given up in a row stop the run.
            mask_zero_variance: groups whose samples all have the same reward are not trained on.
            mask_overlong: samples that were cut off by their length are not trained on; they still count in the
            baseline.
        """
        self._min_replace_ratio = min_replace_ratio
        self._max_rejected_batches = max_rejected_batches
        self._mask_zero_variance = mask_zero_variance
        self._mask_overlong = mask_overlong
        self._rejected_in_a_row = 0
        self._counts: Counter[str] = Counter()

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """As `trainer.algorithm` and `generator` say."""
        algorithm = config.trainer.algorithm
        dynamic = algorithm.dynamic_sampling
        return cls(
            min_replace_ratio=dynamic.min_replace_ratio if dynamic.type == "replace" else None,
            max_rejected_batches=dynamic.max_sample_batches,
            mask_zero_variance=algorithm.zero_variance_filter,
            mask_overlong=config.generator.apply_overlong_filtering,
        )

    def chosen(self, groups: list[FinishedGroup]) -> list[FinishedGroup] | None:
        """The groups to train on; None when the batch has too few with a signal and another one is needed.

        A group without a signal is replaced by one that has it, taken in turn (POLARIS, An et al. 2025).
        """
        if self._min_replace_ratio is None:
            return groups
        useful = [group for group in groups if not has_zero_variance(group.trajectories)]
        if not useful or len(useful) < self._min_replace_ratio * len(groups):
            self._rejected_in_a_row += 1
            self._counts["rejected_batches"] += 1
            if self._rejected_in_a_row >= self._max_rejected_batches:
                raise GenerationError(
                    f"{self._rejected_in_a_row} batches in a row had fewer than {self._min_replace_ratio:.0%} "
                    f"groups with "
                    "different rewards (trainer.algorithm.dynamic_sampling): the prompts are too easy, too hard, or "
                    "the "
                    "reward is constant"
                )
            return None
        self._rejected_in_a_row = 0
        return self._with_replacements(groups, useful)

    def masked(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        """The batch with `loss_mask` cleared where the run's rules say so; `sampled` stays as it is."""
        is_left_out = torch.zeros(len(trajectories), dtype=torch.bool)
        if self._mask_overlong:
            overlong = [trajectory.steps[-1].stop_reason == "length" for trajectory in trajectories]
            is_left_out |= torch.tensor(overlong)
            self._counts["masked_overlong"] += sum(overlong)
        if self._mask_zero_variance:
            silent = _groups_without_signal(trajectories)
            is_left_out |= torch.tensor([trajectory.group_id in silent for trajectory in trajectories])
            self._counts["masked_zero_variance"] += len(silent)
        if not is_left_out.any():
            return batch
        keeps_T = ~is_left_out[batch["trajectory_id"]][batch.sequence_index]
        return batch.with_columns(loss_mask=batch["loss_mask"] & keeps_T)

    def lap(self) -> dict[str, float]:
        """`selection/…` counts since the last call, of the rules that are switched on."""
        counts = {f"selection/{name}": float(count) for name, count in sorted(self._counts.items())}
        self._counts.clear()
        return counts

    def _with_replacements(self, groups: list[FinishedGroup], useful: list[FinishedGroup]) -> list[FinishedGroup]:
        kept = {group.group_id for group in useful}
        new_id = -1
        result = []
        for group in groups:
            if group.group_id not in kept:
                source = useful[(-new_id - 1) % len(useful)]
                # A group of its own, so that the copy does not change the baseline of the original.
                copies = tuple(attrs.evolve(trajectory, group_id=new_id) for trajectory in source.trajectories)
                group = attrs.evolve(source, group_id=new_id, trajectories=copies)
                new_id -= 1
                self._counts["replaced_groups"] += 1
            result.append(group)
        return result


def has_zero_variance(trajectories: Sequence[Trajectory]) -> bool:
    """All samples have the same reward: every group estimator gives them advantage 0."""
    return len({trajectory.reward for trajectory in trajectories}) == 1


def _groups_without_signal(trajectories: Sequence[Trajectory]) -> set[int]:
    rewards: dict[int, set[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group_id, set()).add(trajectory.reward)
    return {group for group, values in rewards.items() if len(values) == 1}
