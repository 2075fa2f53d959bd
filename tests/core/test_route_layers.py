"""The routes of a rank's own layers: what is sent, what the rank reads of it, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import Batch
from rl_core.errors import ShapeError
from rl_core.rank_kit.route_checks import RouteShape, require_routes
from rl_core.rank_kit.route_layers import routes_of, with_routes_of

NUM_LAYERS = 6
LAYERS = st.sets(st.integers(0, NUM_LAYERS - 1)).map(sorted)


def batch_of(lengths: list[int]) -> Batch:
    """A batch in which every pair of experts occurs only once, over all tokens and layers."""
    total = sum(lengths)
    first_TL = torch.arange(total * NUM_LAYERS).reshape(total, NUM_LAYERS)
    batch = Batch.from_sequences([{"tokens": [1] * length} for length in lengths])
    return batch.with_columns(
        routed_experts=torch.stack([first_TL, first_TL + 1], -1).to(torch.int16),
        routed=torch.ones(total, dtype=torch.bool),
    )


def shape_of(layers: list[int], num_layers: int = NUM_LAYERS) -> RouteShape:
    return RouteShape(num_layers=num_layers, layers=tuple(layers), num_experts=1000, experts_per_token=2)


@given(LAYERS, st.data())
def test_a_rank_reads_the_same_routes_from_its_part_as_from_the_batch(layers, data):
    """Checks micro-batches and parts converted to arrays, the form in which they are sent to another process."""
    batch = batch_of([2, 1, 3])
    sequences = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    read = data.draw(st.sets(st.sampled_from(layers)).map(sorted)) if layers else []
    expected = batch.select(sequences)["routed_experts"][:, read]
    sent = with_routes_of(batch, layers)
    assert sent["routed_experts"].shape[1] == len(layers)
    for part in (sent.select(sequences), Batch.from_arrays(sent.to_arrays(np.array(sequences)))):
        require_routes(part, shape_of(read), key="replay")
        assert torch.equal(routes_of(part, read), expected)
    assert torch.equal(routes_of(batch.select(sequences), read), expected)


def test_routes_of_neighbouring_layers_are_not_copied():
    batch = batch_of([2, 1])
    for part in (batch, with_routes_of(batch, [2, 3, 4])):
        assert routes_of(part, [3, 4]).data_ptr() == batch["routed_experts"][0, 3].data_ptr()


def test_a_batch_is_returned_unchanged_if_no_routes_have_to_be_selected():
    batch, without = batch_of([2, 1]), batch_of([2, 1]).without_columns("routed_experts", "routed")
    part = with_routes_of(batch, [1, 2])
    assert with_routes_of(batch, None) is batch
    assert with_routes_of(without, [1, 2]) is without
    assert with_routes_of(part, [1]) is part


@pytest.mark.parametrize("sent", [[], [1, 2], [1, 3, 4], [0, 1, 2, 4, 5]])
def test_a_batch_without_the_routes_of_a_replayed_layer_is_refused(sent):
    part = with_routes_of(batch_of([2, 1]), sent)
    missing = min({1, 2, 3} - set(sent))
    message = f"no routes of layer {missing}, which this rank replays; route_layers names {sent}"
    with pytest.raises(ShapeError, match=re.escape(message)):
        require_routes(part, shape_of([1, 2, 3]), key="replay")


def test_routes_of_a_model_with_another_number_of_layers_are_refused_whichever_layers_were_selected():
    for layers in ([0, 1], [4, 5], [5, 6, 7]):
        part = with_routes_of(batch_of([2, 1]), layers)
        with pytest.raises(ShapeError, match="6 layers with 2 experts per token; the model has 8 layers"):
            require_routes(part, shape_of(layers, 8), key="replay")


def test_a_wrong_expert_is_reported_with_its_layer_in_the_whole_model():
    batch = batch_of([2, 1])
    batch["routed_experts"][2, 4, 0] = 1000
    with pytest.raises(ShapeError, match=r"token 2, layer 4: \[1000, 17\]; expected ids from 0 to 999"):
        require_routes(with_routes_of(batch, [1, 4]), shape_of([1, 4]), key="replay")
    require_routes(with_routes_of(batch, [1, 5]), shape_of([1, 5]), key="replay")


def test_route_layers_must_name_as_many_layers_as_routed_experts_has():
    part = with_routes_of(batch_of([2, 1]), [1, 4])
    wrong = part.with_columns(routed_experts=part["routed_experts"][:, :1])
    with pytest.raises(ShapeError, match=r"routed_experts: 1 layers, but route_layers names 2: \[1, 4\]"):
        require_routes(wrong, shape_of([1]), key="replay")
