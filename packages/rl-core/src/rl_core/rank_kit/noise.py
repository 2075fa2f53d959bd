"""Random numbers that depend only on seed and element index, so any part of a tensor can be generated on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = (
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # torch's integers are signed


def element_index(shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Returns the row-major indices of a piece's elements in the whole tensor, int64, with the shape `shape`.

    Args:
        shape: shape of the piece.
        offset: position of its first element in the whole tensor.
        whole: shape of the whole tensor.
    """
    index = torch.zeros((), dtype=torch.int64)
    for size, first, whole_size in zip(shape, offset, whole, strict=True):
        index = index[..., None] * whole_size + torch.arange(first, first + size)
    return index


def normal_noise(index: Tensor, seed: int) -> Tensor:
    """Standard normal float32 numbers, one per index (int64). Each depends only on seed and index.

    Two halves of a hash are uniform numbers u, v in (0, 1]; sqrt(−2 ln u) cos(2πv) is normal (Box & Muller 1958).
    """
    hashed = hash_of(index, seed)
    first, second = (((half & 0xFFFFFFFF).double() + 1.0) / 2**32 for half in (hashed >> 32, hashed))
    return (torch.sqrt(-2.0 * torch.log(first)) * torch.cos(2.0 * math.pi * second)).float()


def hash_of(index: Tensor, seed: int) -> Tensor:
    """int64: element `index` of the SplitMix64 sequence with the given seed, its 64 bits read as signed.

    Source: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators, figure 17.
    """
    mixed = (index + 1) * _GOLDEN + seed
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    return mixed ^ _shifted(mixed, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right, filled with zeros. torch's `>>` fills with the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
