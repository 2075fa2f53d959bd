"""Defines negative controls, with which a run must not learn."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.advantages import grpo_advantages


def permuted_grpo_advantages(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Returns GRPO advantages from the rewards of another prompt: the k-th sample of each group gets the advantage of
    the k-th sample of the next group.

    Args:
        scores_N: outcome reward of each sample; all groups must have the same size.
        group_N: int64 group of each sample, equal for the samples of one prompt.
    """
    order_N = torch.argsort(group_N, stable=True)
    group_size = int((group_N == group_N[0]).sum())
    permuted_N = torch.empty_like(scores_N)
    permuted_N[order_N] = scores_N[order_N].roll(-group_size)
    return grpo_advantages(permuted_N, group_N)
