"""Which tokens the routers of each tensor rank see, and to which experts padding is routed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_megatron.rank.route_layout import deal_padding, router_order


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_tensor_ranks_see_every_position_once_in_contiguous_parts(num_rows, per_rank, size):
    index_BS = np.arange(num_rows * per_rank * size).reshape(num_rows, -1)
    parts = [router_order(index_BS, rank, size) for rank in range(size)]
    assert np.concatenate(parts).tolist() == index_BS.T.ravel().tolist()
    assert {len(part) for part in parts} == {num_rows * per_rank}


def test_rows_side_by_side_are_seen_token_by_token():
    index_BS = np.array([[0, 1, 2, -1], [3, 4, 5, 6]])
    assert [router_order(index_BS, rank, 2).tolist() for rank in (0, 1)] == [[0, 3, 1, 4], [2, 5, -1, 6]]


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
