"""Random token streams for property tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor


class Stream(NamedTuple):
    """A mask over the tokens of some sequences, and a seed for the values that a test generates."""

    lengths: list[int]
    mask_T: Tensor
    sequence_T: Tensor
    seed: int

    def normal(self, *, dtype: torch.dtype = torch.float64, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randn(self.mask_T.numel(), generator=generator, dtype=dtype)

    def scores(self, *, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randint(0, 4, (len(self.lengths),), generator=generator).float() / 3

    def groups(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 7)
        return torch.randint(0, max(1, len(self.lengths) // 3), (len(self.lengths),), generator=generator) * 11 - 5


@st.composite
def streams(draw: st.DrawFn, *, max_sequences: int = 8, max_length: int = 90) -> Stream:
    """Streams whose sequence boundaries fall anywhere relative to blocks of 64, with masks from empty to full."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=max_sequences))
    seed = draw(st.integers(0, 2**20))
    share = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    generator = torch.Generator().manual_seed(seed + 1)
    mask_T = torch.rand(sum(lengths), generator=generator) < share
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Stream(lengths, mask_T, sequence_T, seed)


def reordered(stream: Stream, values_T: Tensor, order: list[int]) -> Tensor:
    """The values of the stream after its sequences are reordered."""
    parts = values_T.split(stream.lengths)
    return torch.cat([parts[i] for i in order])
