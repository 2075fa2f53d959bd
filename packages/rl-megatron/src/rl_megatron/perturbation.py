"""Noise on the trained parameters for a moment, taken away bit for bit: how the path of every tensor is proved.

The noise of an element is a hash of the seed, the parameter's name in the whole model and the element's place in it
(`noise.py`): no mesh changes it, each rank makes its own part alone, and copies stay equal.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from rl_megatron.checkpoint import sharded_parameters
from rl_megatron.model import is_vocabulary
from rl_megatron.noise import element_index, normal_noise

_BLOCK_ELEMENTS = 1 << 20
"""Hashes are made for so many elements at a time."""


@attrs.frozen(kw_only=True, eq=False)
class _Piece:
    """What this rank holds of one parameter."""

    tensor: Tensor
    name: str
    """Of the parameter in the whole model."""
    offset: tuple[int, ...]
    """Of the piece in the parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter; a vocabulary may have further rows of padding."""


class Perturbation:
    """Noise that is on; made by `perturb`, undone by `restore`."""

    def __init__(self, kept: list[tuple[Tensor, Tensor]]):
        self._kept = kept

    @classmethod
    @torch.no_grad()
    def perturb(cls, chunks: Sequence[Any], *, seed: int, scale: float) -> Perturbation:
        """Collective. See `rl_core.interfaces.Perturbable.perturb`; a copy of this rank's part is kept on the CPU."""
        pieces = list(_pieces(chunks))
        mean_squares = _mean_squares(pieces)
        kept = [(piece.tensor, piece.tensor.to("cpu", copy=True)) for piece in pieces]
        for piece in pieces:
            deviation = scale * max(math.sqrt(mean_squares[piece.name]), piece.shape[-1] ** -0.5)
            for first in range(0, len(piece.tensor), rows := _rows_of_block(piece.tensor)):
                part = piece.tensor[first : first + rows]
                index = element_index(part.shape, (piece.offset[0] + first, *piece.offset[1:]), piece.shape)
                noise = normal_noise(index.to(part.device), _seed_of(seed, piece.name))
                part.add_((deviation * noise).to(part.dtype))
        return cls(kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Of this rank alone."""
        for tensor, before in self._kept:
            tensor.copy_(before)


def _pieces(chunks: Sequence[Any]) -> Iterator[_Piece]:
    """Of all trained parameters of this rank, each once."""
    vocab_size = chunks[0].config.vocab_size
    shards = {id(parameter): shard for parameter, shard in sharded_parameters(chunks) if parameter.requires_grad}
    trained = {id(p) for chunk in chunks for p in chunk.parameters() if p.requires_grad}
    assert trained == shards.keys(), "a trained parameter has no place in a checkpoint"
    for shard in shards.values():
        for part in _parts(shard):
            assert part.data is not None
            num_prepended = part.prepend_axis_num  # an expert's number
            experts, offset = part.global_offset[:num_prepended], part.global_offset[num_prepended:]
            tensor = part.data.detach()
            if is_vocabulary(part.key):
                tensor = tensor[: max(0, vocab_size - offset[0])]  # the rest is padding
            if tensor.numel():
                name = ".".join(map(str, (part.key, *experts)))
                yield _Piece(tensor=tensor, name=name, offset=offset, shape=part.global_shape[num_prepended:])


def _parts(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """A fused parameter lies in several places of the whole one."""
    if isinstance(sharded, ShardedTensor):
        yield sharded
    else:
        yield from (part for part in nested_values({"": sharded.build()}) if isinstance(part, ShardedTensor))


def _mean_squares(pieces: Sequence[_Piece]) -> dict[str, float]:
    """Of whole parameters, by name. Collective."""
    own = {
        (p.name, p.offset): (float(torch.linalg.vector_norm(p.tensor, dtype=torch.float64)) ** 2, p.tensor.numel())
        for p in pieces
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    of_pieces = {place: sums for rank in of_ranks for place, sums in rank.items()}
    squares, counts = defaultdict(float), defaultdict(int)
    for (name, _), (square_sum, count) in sorted(of_pieces.items()):
        squares[name] += square_sum
        counts[name] += count
    return {name: squares[name] / counts[name] for name in counts}


def _rows_of_block(tensor: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, tensor[0].numel()))


def _seed_of(seed: int, name: str) -> int:
    numbers = (seed, zlib.crc32(name.encode()))
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
