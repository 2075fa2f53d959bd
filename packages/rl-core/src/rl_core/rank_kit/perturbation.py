"""Temporary noise on the trained parameters, which proves that every tensor reaches the engines. `restore` removes it
bit for bit.

The noise of an element is computed from the seed, the parameter's name in the whole model, and the element's index in
the parameter (`noise.py`). The noise therefore does not depend on the mesh: each rank computes the noise of its part,
and ranks that hold copies of a part add the same noise.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.rank_kit.noise import element_index, normal_noise
from rl_core.seeds import seed_of

_BLOCK_ELEMENTS = 1 << 20
"""Number of elements hashed at a time."""


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """One rank's part of a trained parameter."""

    tensor: Tensor
    """This rank's elements, which are changed in place. Not empty, with at least one axis."""
    name: str
    """Name of the parameter in the whole model."""
    offset: tuple[int, ...]
    """Offset of the piece in the parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """A key that is equal on ranks that hold the same piece."""
        return self.name, self.offset


class Perturbation:
    """Keeps the values that the parameters had before `perturb` added noise; `restore` writes them back."""

    def __init__(self, kept: dict[tuple[str, tuple[int, ...]], Tensor]):
        self._kept = kept

    @classmethod
    @torch.no_grad()
    def perturb(cls, pieces: Sequence[Piece], *, seed: int, scale: float) -> Perturbation:
        """Adds the noise. Collective, because the noise's scale depends on whole parameters. Keeps a copy of this
        rank's pieces on the CPU.

        Args:
            pieces: this rank's pieces of all trained parameters; no two overlap.
            seed: seed of the noise.
            scale: see `rl_core.interfaces.Worker.perturb`.
        """
        mean_squares = _mean_squares(pieces)
        kept = {piece.place: piece.tensor.to("cpu", copy=True) for piece in pieces}
        for piece in pieces:
            deviation = scale * max(math.sqrt(mean_squares[piece.name]), piece.shape[-1] ** -0.5)
            piece_seed = seed_of(seed, zlib.crc32(piece.name.encode()))
            for first in range(0, len(piece.tensor), rows := _rows_of_block(piece.tensor)):
                part = piece.tensor[first : first + rows]
                index = element_index(part.shape, (piece.offset[0] + first, *piece.offset[1:]), piece.shape)
                noise = normal_noise(index.to(part.device), piece_seed)
                part.add_((deviation * noise).to(part.dtype))
        return cls(kept)

    @torch.no_grad()
    def restore(self, pieces: Iterable[Piece]) -> None:
        """Restores this rank's pieces; not collective. `pieces`: the same as for `perturb`, possibly moved to other
        memory."""
        for piece in pieces:
            piece.tensor.copy_(self._kept[piece.place])


def _mean_squares(pieces: Sequence[Piece]) -> dict[str, float]:
    """Mean square of each whole parameter, by name. Collective."""
    own = {
        piece.place: (
            float(torch.linalg.vector_norm(piece.tensor, dtype=torch.float64)) ** 2,
            piece.tensor.numel(),
        )
        for piece in pieces
    }
    of_ranks: list[Any] = [own]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
    of_pieces = {place: sums for rank in of_ranks for place, sums in rank.items()}
    squares, counts = defaultdict(float), defaultdict(int)
    for (name, _), (square_sum, count) in sorted(of_pieces.items()):
        squares[name] += square_sum
        counts[name] += count
    return {name: squares[name] / counts[name] for name in counts}


def _rows_of_block(tensor: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, tensor[0].numel()))
