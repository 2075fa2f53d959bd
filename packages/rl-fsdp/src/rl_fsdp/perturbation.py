"""Finds this rank's part of every trained parameter, so that noise can be added to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.rank_kit.perturbation import Piece


def trained_pieces(state: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yields one piece for every parameter of which this rank holds an element. `state` is a `Shards.state` without
    optimizer."""
    for name, tensor in state.items():
        local, offset = tensor, (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if local.numel():
            # A scalar is treated as a vector of one element.
            shape = tuple(tensor.shape) or (1,)
            yield Piece(tensor=local.view(local.shape or (1,)), name=name, offset=tuple(offset) or (0,), shape=shape)
