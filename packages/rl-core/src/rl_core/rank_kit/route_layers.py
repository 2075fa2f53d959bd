"""Selects the routes that a rank receives, and reads the routes of given layers.

Engines return `routed_experts` [T, L, K] of all L layers of the model. For a rank that reads only some of them,
`routed_experts` has only these, and the column `route_layers` [N, L] (bool, all rows equal) says which.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_core.batch import Batch


def with_routes_of(batch: Batch, layers: Sequence[int] | None) -> Batch:
    """Returns the batch with the routes of only these layers of the model; None: of all layers. Layers without routes
    in the batch are left out: `require_routes` reports them on the rank. A batch with `route_layers` is returned
    unchanged."""
    if layers is None or "routed_experts" not in batch or "route_layers" in batch:
        return batch
    num_layers = batch["routed_experts"].shape[1]
    is_read_L = torch.zeros(num_layers, dtype=torch.bool)
    is_read_L[[layer for layer in layers if layer < num_layers]] = True
    return batch.with_columns(
        routed_experts=_at(batch["routed_experts"], is_read_L.nonzero().flatten().tolist()),
        route_layers=is_read_L.expand(batch.num_sequences, -1),
    )


def routes_of(batch: Batch, layers: Sequence[int]) -> Tensor:
    """`routed_experts` of these layers of the model, [T, M, K]; a view if they are adjacent in the batch."""
    place_of = {layer: place for place, layer in enumerate(layers_of_routes(batch))}
    return _at(batch["routed_experts"], [place_of[layer] for layer in layers])


def layers_of_routes(batch: Batch) -> list[int]:
    """For each position along the L axis of `routed_experts`, the index of its layer in the model."""
    if "route_layers" not in batch:
        return list(range(batch["routed_experts"].shape[1]))
    return batch["route_layers"][0].nonzero().flatten().tolist()


def _at(routes_TLK: Tensor, places: Sequence[int]) -> Tensor:
    first = places[0] if places else 0
    neighbours = slice(first, first + len(places))
    is_run = list(places) == list(range(neighbours.start, neighbours.stop))
    return routes_TLK[:, neighbours] if is_run else routes_TLK[:, list(places)]
