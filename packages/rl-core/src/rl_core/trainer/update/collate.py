"""Collates trajectories into a batch, whose token stream concatenates all sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core.batch import Batch, offsets_of
from rl_core.errors import GenerationError
from rl_core.interfaces import KeptTokens, Metrics, Trajectory, TrajectoryStep
from rl_core.trainer.update.step_merging import merge_steps


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Makes a batch with one sequence per step of every trajectory, in the given order.

    The batch has the columns tokens, sampled, loss_mask, rollout_logprobs, policy_version, rewards, group_id,
    trajectory_id (index in `trajectories`), step_index and is_last_step. If a step has no `loss_mask`, its loss_mask
    equals sampled. If a step has no `token_rewards`, its reward is at its last sampled token. The batch also has
    greedy_score if greedy answers were played, routed_experts and `routed` (whether a token's routes are known) if the
    engine returned routes, and kept_counts and kept_ids if it returned what sampling kept.

    Raises:
        GenerationError: a trajectory has no steps; a step has no sampled token, fields of different lengths, a
            loss_mask that covers a token that was not sampled, more routes than tokens, or kept tokens that do not
            include a token that was sampled; the shapes of routes differ between steps; or only some trajectories have
            a greedy_reward, or only some steps kept tokens. The message names the trajectory, except for different
            shapes.
    """
    for trajectory in trajectories:
        _require_whole(trajectory)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    offsets = offsets_of([len(step.tokens) for step in steps])
    num_tokens = int(offsets[-1])

    def stream(values: Iterable[Sequence[Any]], dtype: type) -> Tensor:
        return torch.from_numpy(np.fromiter(chain.from_iterable(values), dtype, count=num_tokens))

    sampled = stream((step.sampled for step in steps), np.bool_)
    trained = (step.sampled if step.loss_mask is None else step.loss_mask for step in steps)
    has_masks = any(step.loss_mask is not None for step in steps)
    counts = torch.tensor([len(trajectory.steps) for trajectory in trajectories])
    trajectory_id = torch.repeat_interleave(torch.arange(len(trajectories)), counts)
    step_index = torch.arange(len(steps)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return Batch(
        offsets,
        {
            "tokens": stream((step.tokens for step in steps), np.int64),
            "sampled": sampled,
            "loss_mask": stream(trained, np.bool_) if has_masks else sampled,
            "rollout_logprobs": stream((step.rollout_logprobs for step in steps), np.float32),
            "policy_version": stream((step.policy_version for step in steps), np.int32),
            "rewards": _rewards(steps, sampled, offsets),
            "group_id": torch.tensor([trajectory.group_id for trajectory in trajectories])[trajectory_id],
            "trajectory_id": trajectory_id,
            "step_index": step_index,
            "is_last_step": step_index == counts[trajectory_id] - 1,
            **_greedy_scores(trajectories, trajectory_id),
            **_routes(steps, offsets),
            **_kept_tokens(steps),
        },
    )


def merged(batch: Batch) -> tuple[Batch, Metrics]:
    """Merges consecutive steps (`merge_steps`). Returns the batch, and the fraction of tokens saved."""
    before = float(batch.num_tokens)
    batch, merge = merge_steps(batch)
    return batch, {"rollout/merged_tokens": (merge.tokens_saved * before, before)}


def _require_whole(trajectory: Trajectory) -> None:
    where = f"group {trajectory.group_id}, sample {trajectory.sample_index}"
    if not trajectory.steps:
        raise GenerationError(
            f"{where}: a trajectory without steps cannot be trained on ({trajectory.failure or 'no failure recorded'})"
        )
    for index, step in enumerate(trajectory.steps):
        num_tokens = len(step.tokens)
        if not (
            len(step.sampled) == len(step.rollout_logprobs) == len(step.policy_version) == num_tokens
            and (step.token_rewards is None or len(step.token_rewards) == num_tokens)
            and (step.loss_mask is None or len(step.loss_mask) == num_tokens)
        ):
            names = ("tokens", "sampled", "rollout_logprobs", "policy_version", "token_rewards", "loss_mask")
            lengths = {name: len(values) for name in names if (values := getattr(step, name)) is not None}
            raise GenerationError(
                f"{where}, step {index}: fields differ in length: {lengths}; expected one value per token"
            )
        if step.routed_experts is not None and len(step.routed_experts) > len(step.tokens):
            raise GenerationError(
                f"{where}, step {index}: got routed_experts for {len(step.routed_experts)} tokens, expected at most "
                f"{len(step.tokens)}"
            )
        if step.kept_tokens is not None and (reason := _misfit(step.tokens, step.kept_tokens)):
            raise GenerationError(f"{where}, step {index}: {reason}")
        if True not in step.sampled:
            raise GenerationError(f"{where}, step {index}: got no sampled token, expected at least one")
        if step.loss_mask is not None:
            pairs = zip(step.sampled, step.loss_mask, strict=True)
            wrong = next((t for t, (is_sampled, is_trained) in enumerate(pairs) if is_trained and not is_sampled), None)
            if wrong is not None:
                raise GenerationError(
                    f"{where}, step {index}: loss_mask is true at token {wrong}, which the policy did not sample; "
                    "expected a subset of `sampled`"
                )


def _misfit(tokens: Sequence[int], kept: KeptTokens) -> str | None:
    """Why the kept tokens cannot be those among which the tokens were sampled; None if they can."""
    if len(kept.counts) != len(tokens) or kept.counts.sum() != len(kept.ids):
        return (
            f"got kept_tokens of {len(kept.counts)} tokens with {len(kept.ids)} ids; expected {len(tokens)} tokens, "
            f"whose counts sum to the number of ids ({kept.counts.sum()})"
        )
    place_E = np.repeat(np.arange(len(tokens)), kept.counts)
    has_token_T = np.zeros(len(tokens), np.bool_)
    has_token_T[place_E[kept.ids == np.asarray(tokens)[place_E]]] = True
    wrong = np.flatnonzero(~has_token_T & (kept.counts > 0))
    return f"token {wrong[0]} ({tokens[wrong[0]]}) is not among its own kept_tokens" if len(wrong) else None


def _kept_tokens(steps: Sequence[TrajectoryStep]) -> dict[str, Tensor]:
    """Makes the columns `kept_counts` and `kept_ids`; empty if no step has kept tokens."""
    known = [step.kept_tokens for step in steps if step.kept_tokens is not None]
    if not known:
        return {}
    if len(known) < len(steps):
        raise GenerationError(f"{len(known)} of {len(steps)} steps have kept_tokens; expected all or none")
    kept = KeptTokens.joined(known)
    return {"kept_counts": torch.from_numpy(kept.counts), "kept_ids": torch.from_numpy(kept.ids)}


def _rewards(steps: Sequence[TrajectoryStep], sampled: Tensor, offsets: Tensor) -> Tensor:
    rewards = torch.zeros(int(offsets[-1]))
    rewards[_last_sampled(sampled, offsets)] = torch.tensor([step.reward for step in steps], dtype=torch.float32)
    for start, end, step in zip(offsets.tolist(), offsets[1:].tolist(), steps, strict=False):
        if step.token_rewards is not None:
            rewards[start:end] = torch.tensor(step.token_rewards, dtype=torch.float32)
    return rewards


def _greedy_scores(trajectories: Sequence[Trajectory], trajectory_id: Tensor) -> dict[str, Tensor]:
    scores = [trajectory.greedy_reward for trajectory in trajectories]
    known = [score for score in scores if score is not None]
    if not known:
        return {}
    if len(known) < len(scores):
        lacking = trajectories[scores.index(None)]
        where = f"group {lacking.group_id}, sample {lacking.sample_index}"
        raise GenerationError(f"{where}: has no greedy_reward, but {len(known)} other trajectories of the batch do")
    return {"greedy_score": torch.tensor(known, dtype=torch.float32)[trajectory_id]}


def _last_sampled(sampled: Tensor, offsets: Tensor) -> Tensor:
    """int64 [N], stream position of each sequence's last sampled token. Every sequence has one (`_require_whole`)."""
    positions = torch.nonzero(sampled).squeeze(1)
    return positions[torch.searchsorted(positions, offsets[1:]) - 1]


def _routes(steps: Sequence[TrajectoryStep], offsets: Tensor) -> dict[str, Tensor]:
    """Makes the columns `routed_experts` and `routed`; empty if no step has routes. A step's routes cover its first
    tokens: a last token that was never an input of the model has none. Where routes are missing, `routed` is false."""
    known = [step.routed_experts for step in steps if step.routed_experts is not None]
    if not known:
        return {}
    num_tokens = int(offsets[-1])
    if len(shapes := {routes_TLK.shape[1:] for routes_TLK in known}) > 1:
        raise GenerationError(f"routed_experts: steps differ in layers or experts per token: {sorted(shapes)}")
    routes = np.zeros((num_tokens, *known[0].shape[1:]), np.result_type(*known))
    routed = np.zeros(num_tokens, np.bool_)
    for start, step in zip(offsets.tolist(), steps, strict=False):
        if step.routed_experts is not None:
            end = start + len(step.routed_experts)
            routes[start:end] = step.routed_experts
            routed[start:end] = True
    return {"routed_experts": torch.from_numpy(routes), "routed": torch.from_numpy(routed)}
