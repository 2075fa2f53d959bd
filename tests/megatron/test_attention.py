"""Which queries are attended together with which keys."""

from __future__ import annotations

import numpy as np
import pytest

from rl_core.layout.slices import context_positions
from rl_megatron.model.attention import _pieces


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_of_a_rank_is_one_query_that_sees_its_segment_up_to_itself(size: int):
    lengths = np.random.default_rng(0).integers(1, 5, 12) * 2 * size
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.repeat(boundaries[:-1], lengths)
    for rank in range(size):
        held = context_positions(boundaries, rank, size)
        sees: dict[int, tuple[int, int]] = {}
        for first_query, first_key, num_queries, num_keys in _pieces(boundaries, rank, size).tolist():
            for number in range(num_queries):
                assert first_query + number not in sees
                sees[first_query + number] = (first_key, first_key + num_keys - num_queries + number)
        assert sees == {place: (starts[token], token) for place, token in enumerate(held.tolist())}
