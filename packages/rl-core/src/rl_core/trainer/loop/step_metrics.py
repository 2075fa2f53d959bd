"""Computes the metrics of a step from its groups, its batch and the buffer, and means from summed metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.batch import Batch
from rl_core.interfaces import Metrics, Trajectory
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.evaluation import trajectory_means


def divided(metrics: Metrics) -> dict[str, float]:
    """Divides each metric's sum by its weight. Leaves out metrics with weight 0."""
    return {name: total / weight for name, (total, weight) in metrics.items() if weight}


def data_metrics(batch: Batch) -> dict[str, float]:
    """The metrics `rollout/…` of a batch whose responses come from the data. Nothing was sampled, so there are no
    metrics of rewards and staleness."""
    return {
        "rollout/tokens": float(batch.num_tokens),
        "rollout/sampled_tokens": float(batch["sampled"].sum()),
        "rollout/response_length": float(batch["sampled"].sum()) / float(batch["is_last_step"].sum()),
    }


_MOST_AGES = 32
"""`rollout/staleness/<k>` is written for k up to this number, although `max_staleness` may be larger."""


def rollout_metrics(groups: Sequence[FinishedGroup], batch: Batch, *, version: int, bound: int) -> dict[str, float]:
    """The metrics `reward/…`, `rollout/…` and `environment/…` of a step's groups.

    Args:
        groups: the groups that the step trained on.
        batch: their batch.
        version: the policy's version at the start of the step.
        bound: the staleness bound; no group is more than `bound` versions old.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    means = trajectory_means(trajectories)
    mean = means.pop("reward")
    greedy = [group.trajectories[0].greedy_reward for group in groups]
    known = [reward for reward in greedy if reward is not None]
    ages = [version - group.start_version for group in groups]
    spread = (sum((trajectory.reward - mean) ** 2 for trajectory in trajectories) / len(trajectories)) ** 0.5
    return {
        "reward/mean": mean,
        "reward/std": spread,
        "rollout/tokens": float(batch.num_tokens),
        "rollout/sampled_tokens": float(batch["sampled"].sum()),
        **_forced(trajectories, float(batch["sampled"].sum())),
        "rollout/response_length": means.pop("response_length"),
        "rollout/turns": sum(len(trajectory.turns) or len(trajectory.steps) for trajectory in trajectories)
        / len(trajectories),
        "rollout/cut": sum(trajectory.is_cut for trajectory in trajectories) / len(trajectories),
        "rollout/max_turns": sum(trajectory.end == "max_turns" for trajectory in trajectories) / len(trajectories),
        "rollout/staleness_max": float(max(ages)),
        "rollout/staleness_mean": sum(ages) / len(ages),
        **{f"rollout/staleness/{age}": ages.count(age) / len(ages) for age in range(min(bound, _MOST_AGES) + 1)},
        **({"rollout/greedy_reward": sum(known) / len(known)} if known else {}),
        **{f"environment/{name}": value for name, value in means.items()},
    }


def cut_episodes_warning(groups: Sequence[FinishedGroup]) -> str | None:
    """A warning if more than half of a step's episodes ended because there was no room for their next turn, else None.
    Such episodes are easily overlooked: they are no failures, and keep the rewards of their earlier turns."""
    ends = [trajectory.end for group in groups for trajectory in group.trajectories]
    num_cut = ends.count("context")
    if num_cut * 2 <= len(ends):
        return None
    return (
        f"{num_cut} of {len(ends)} episodes of this step ended before their environment ended them, because the next "
        "turn's prompt was longer than generator.max_input_length (by default, trainer.max_prompt_length) or left no "
        "room in the engine's context; raise these limits, or make the observations shorter (this is said once; "
        "rollout/cut in metrics.jsonl has the share of each step)"
    )


def _forced(trajectories: Sequence[Trajectory], num_sampled: float) -> dict[str, float]:
    """The share of the sampled tokens that the generator excluded from training, as it does with forced responses; no
    metric if no step has a `loss_mask`."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    excluded = [sum(step.sampled) - sum(step.loss_mask) for step in steps if step.loss_mask is not None]
    return {"rollout/forced_tokens": sum(excluded) / num_sampled} if excluded else {}


def queue_metrics(buffer: GroupBuffer) -> dict[str, float]:
    """The number of finished groups that wait for training, and the number of groups that are being played."""
    queued, under_way = len(buffer.finished), buffer.num_under_way
    return {"rollout/queued_groups": float(queued), "rollout/groups_under_way": float(under_way)}
