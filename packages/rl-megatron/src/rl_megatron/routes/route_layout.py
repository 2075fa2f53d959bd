"""Which tokens a rank's routers see, in which order, and where padding goes. Pure index functions, no torch."""

from __future__ import annotations

import numpy as np

from rl_core.errors import ConfigError
from rl_core.layout.balancing import IntArray
from rl_core.layout.slices import even_slice


def router_order(index_BS: IntArray, rank: int, size: int) -> IntArray:
    """What enters a context rank's model, as the routers of one of its tensor ranks see it.

    Megatron lays rows side by side, all first tokens before all second ones, and tensor ranks take contiguous parts of
    the tokens (sequence parallelism).

    Args:
        index_BS: of a rank's B rows (one, when packed) of S positions.
        rank: tensor rank.
        size: tensor ranks; divides S.

    Returns:
        int64 [B · S / size].
    """
    return np.ascontiguousarray(index_BS.T[even_slice(index_BS.shape[1], rank, size)]).ravel()


def deal_padding(
    num_padding: int, *, first: int, num_experts: int, expert_ranks: int, experts_per_token: int
) -> IntArray:
    """Experts for padding tokens: round-robin over expert ranks, then over each one's experts.

    Left to the router, all padding would take the same experts. Dealt, no expert has more than one padding token above
    any other.

    Args:
        num_padding: P, the padding tokens that one rank's routers see.
        first: number of the first of them; ranks begin at different ones.
        num_experts: of a layer.
        expert_ranks: ranks that split them, consecutive experts on each.
        experts_per_token: K.

    Returns:
        int64 [P, K], K different experts each.

    Raises:
        ConfigError: a token cannot have K different experts.
    """
    if experts_per_token > num_experts:
        raise ConfigError(f"{experts_per_token} experts per token, but a layer has {num_experts}")
    numbers = first + np.arange(num_padding)
    slots = (numbers[:, None] * experts_per_token + np.arange(experts_per_token)) % num_experts
    return (slots % expert_ranks) * (num_experts // expert_ranks) + slots // expert_ranks
