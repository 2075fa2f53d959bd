"""Which tokens a rank's routers see, in which order, and which experts padding gets. Pure index functions, no torch."""

from __future__ import annotations

import numpy as np

from rl_core.errors import ConfigError
from rl_core.layout.balancing import IntArray
from rl_core.layout.slices import even_slice


def router_order(index_BS: IntArray, rank: int, size: int) -> IntArray:
    """Reorders the input of a context rank's model to the order in which one tensor rank's routers see it.

    Megatron interleaves rows (the first tokens of all rows, then all second tokens, …), and tensor ranks take
    contiguous parts of the result (sequence parallelism).

    Args:
        index_BS: token indices of a rank's B rows (one, when packed) of S positions.
        rank: tensor rank.
        size: number of tensor ranks; divides S.

    Returns:
        int64 [B · S / size].
    """
    return np.ascontiguousarray(index_BS.T[even_slice(index_BS.shape[1], rank, size)]).ravel()


def deal_padding(
    num_padding: int, *, first: int, num_experts: int, expert_ranks: int, experts_per_token: int
) -> IntArray:
    """Experts for padding tokens: round-robin over expert ranks, then over each one's experts.

    The router would send all padding to the same experts. With round-robin, the experts' numbers of padding tokens
    differ by at most one.

    Args:
        num_padding: P, number of padding tokens that one rank's routers see.
        first: index at which the round-robin starts; different on each rank.
        num_experts: experts of a layer.
        expert_ranks: ranks that split the experts, consecutive experts on each.
        experts_per_token: K.

    Returns:
        int64 [P, K], K different experts each.

    Raises:
        ConfigError: a token cannot have K different experts.
    """
    if experts_per_token > num_experts:
        raise ConfigError(f"got {experts_per_token} experts per token, but a layer has {num_experts}")
    numbers = first + np.arange(num_padding)
    slots = (numbers[:, None] * experts_per_token + np.arange(experts_per_token)) % num_experts
    return (slots % expert_ranks) * (num_experts // expert_ranks) + slots // expert_ranks
