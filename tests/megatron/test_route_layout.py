"""Which rows routers see, and where padding goes: properties, from lengths alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.layout import Mesh, packed_layout, padded_layout
from rl_megatron.route_layout import deal_padding, router_positions

MESHES = st.builds(
    lambda tensor, context, data: Mesh(world_size=tensor * context * data, tensor=tensor, context=context),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def layout_of(lengths, mesh, *, is_packed):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if is_packed:
        return packed_layout(offsets, range(len(lengths)), sequence_multiple=mesh.sequence_multiple)
    return padded_layout(offsets, range(len(lengths)), width_multiple=mesh.sequence_multiple)


@given(LENGTHS, MESHES, st.booleans())
def test_the_ranks_of_a_stage_see_every_token_once(lengths, mesh, is_packed):
    layout = layout_of(lengths, mesh, is_packed=is_packed)
    ranks = [mesh.rank(tensor=t, context=c) for c in range(mesh.context) for t in range(mesh.tensor)]
    parts = [router_positions(layout, mesh, rank, is_packed=is_packed) for rank in ranks]
    assert len({len(part) for part in parts}) == 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(layout.index)))


def test_rows_side_by_side_are_seen_token_by_token():
    mesh = Mesh(world_size=2, tensor=2)
    layout = layout_of([3, 4], mesh, is_packed=False)
    seen = [router_positions(layout, mesh, rank, is_packed=False).tolist() for rank in (0, 1)]
    assert seen == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert layout.index[seen[1]].tolist() == [2, 5, -1, 6]


@given(st.integers(0, 50), st.integers(0, 20), st.sampled_from([(8, 2), (8, 4), (6, 3), (16, 1)]), st.integers(1, 4))
def test_dealt_padding_is_even_and_distinct(num_padding, first, experts_and_ranks, experts_per_token):
    num_experts, expert_ranks = experts_and_ranks
    dealt_PK = deal_padding(
        num_padding,
        first=first,
        num_experts=num_experts,
        expert_ranks=expert_ranks,
        experts_per_token=experts_per_token,
    )
    assert dealt_PK.shape == (num_padding, experts_per_token)
    assert all(len(set(row)) == experts_per_token for row in dealt_PK.tolist())
    loads_E = np.bincount(dealt_PK.ravel(), minlength=num_experts)
    assert loads_E.max() - loads_E.min() <= 1
    loads_R = loads_E.reshape(expert_ranks, -1).sum(1)
    assert loads_R.max() - loads_R.min() <= 1


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(ConfigError, match="3 experts per token, but a layer has 2"):
        deal_padding(1, first=0, num_experts=2, expert_ranks=1, experts_per_token=3)
