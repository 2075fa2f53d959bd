"""Which tokens a rank's routers see, in which order, and where padding goes. Pure index functions, no torch."""

from __future__ import annotations

import numpy as np

from rl_core.errors import ConfigError
from rl_core.layout.balancing import IntArray
from rl_core.layout.mesh import Mesh
from rl_core.layout.slices import Layout, context_positions, even_slice


def router_positions(layout: Layout, mesh: Mesh, rank: int, *, is_packed: bool) -> IntArray:
    """Positions of a micro-batch's layout that the routers of `rank` see, in the order of their rows.

    Context ranks hold two chunks of every sequence; of what they hold, tensor ranks take contiguous parts of the token
    axis (sequence parallelism). Padded rows lie side by side: all rows' first tokens come first.

    Args:
        layout: of the whole micro-batch.
        mesh: whose tensor ranks split the tokens between matrices.
        rank: of the model.
        is_packed: the layout is one stream; else rows of one width.
    """
    place = mesh.coordinates(rank)
    positions = context_positions(layout.boundaries, place.context, mesh.context)
    if is_packed:
        return positions[even_slice(len(positions), place.tensor, mesh.tensor)]
    columns = positions.reshape(len(layout.boundaries) - 1, -1).T
    return columns[even_slice(len(columns), place.tensor, mesh.tensor)].ravel()


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
