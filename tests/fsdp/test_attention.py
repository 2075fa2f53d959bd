"""Attention over a packed stream equals attention over each sequence separately."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_core.errors import ConfigError
from rl_core.rank_kit.row_moves import gather_rows, scatter_rows
from rl_transformers.rank.attention import packed_attention
from rl_transformers.rank.packed_sequences import PackedSequences
from rl_transformers.rank.shared_attention import flash_precision, half_precision

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=12)


def slow_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float, window: int | None):
    """Softmax attention with an explicit mask, one sequence at a time. Inputs: [1, heads, T, D]; output: [1, T, heads,
    D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (distance < 0) | (distance >= (window or q.shape[2]))
        outputs.append(((q @ k.transpose(2, 3)) * scaling).masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return torch.cat(outputs, 2).transpose(1, 2)


@settings(max_examples=40)
@given(lengths=LENGTHS, kv_heads=st.sampled_from([1, 2, 4]), window=st.sampled_from([None, 1, 7, 40, 1000]))
def test_output_and_gradients_are_those_of_each_sequence_alone(lengths: list[int], kv_heads: int, window: int | None):
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    packed = PackedSequences.of_lengths(np.array(lengths), CPU)
    fast, _ = packed_attention(nn.Module(), *inputs, None, scaling=0.3, sliding_window=window, packed_sequences=packed)
    slow = slow_attention(*inputs, lengths, 0.3, window)
    upstream = torch.randn(slow.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-13)
    for actual, expected in zip(
        torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(slow, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_every_token_has_a_cell_of_its_own_and_padding_is_bounded(lengths: list[int]):
    packed = PackedSequences.of_lengths(np.array(lengths), CPU)
    cell_T = torch.arange(sum(lengths)) if packed.cell_T is None else packed.cell_T
    assert cell_T.unique().numel() == sum(lengths)
    assert int(cell_T.max()) < packed.num_cells == sum(rows * width for rows, width in packed.rectangles)
    assert packed.num_cells <= sum(1.25 * length + 32 for length in lengths)
    assert len(packed.rectangles) <= 24


def test_the_tokens_of_a_sequence_are_a_row_of_its_rectangle():
    packed = PackedSequences.of_lengths(np.array([2, 40, 3, 39]), CPU)
    assert packed.rectangles == ((2, 3), (2, 40))
    assert packed.cell_T is not None
    assert packed.cell_T.tolist() == [0, 1, *range(6, 46), 3, 4, 5, *range(46, 85)]


def test_sequences_of_one_length_need_no_copy():
    assert PackedSequences.of_lengths(np.array([50, 50, 50]), CPU).cell_T is None


def test_scatter_and_gather_pass_gradcheck():
    index = torch.tensor([4, 0, 2])
    source = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scatter_rows(x, index, 6), source)
    wide = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), wide)


@pytest.mark.parametrize("others", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_a_term_that_is_not_implemented_is_refused(others):
    tensor = torch.zeros(1, 1, 3, 8)
    packed = PackedSequences.of_lengths(np.array([3]), CPU)
    with pytest.raises(ConfigError, match="use_sample_packing=false"):
        packed_attention(nn.Module(), tensor, tensor, tensor, None, packed_sequences=packed, **others)


def test_a_model_that_does_not_forward_the_sequence_bounds_is_refused():
    tensor = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ConfigError, match="does not pass on the bounds of the sequences"):
        packed_attention(nn.Module(), tensor, tensor, tensor, None)


def test_a_model_that_makes_its_own_attention_mask_is_refused():
    tensor, mask = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    packed = PackedSequences.of_lengths(np.array([3]), CPU)
    with pytest.raises(ConfigError, match="passes an attention mask, which attention over packed sequences does not"):
        packed_attention(nn.Module(), tensor, tensor, tensor, mask, packed_sequences=packed)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "expected"),
    [
        ("cuda", torch.bfloat16, (64, 64, 64), torch.bfloat16),
        ("cuda", torch.float16, (256, 256, 256), torch.float16),
        ("cuda", torch.float32, (64, 64, 64), None),
        ("cuda", torch.bfloat16, (192, 192, 128), None),  # MLA
        ("cuda", torch.bfloat16, (12, 12, 12), None),
        ("cuda", torch.bfloat16, (512, 512, 512), None),
        ("cpu", torch.bfloat16, (64, 64, 64), None),
    ],
)
def test_the_flash_kernel_gets_only_vectors_that_it_supports(device, dtype, sizes, expected):
    with FakeTensorMode():  # makes tensors of a GPU that this machine need not have
        query, key, value = (torch.empty(3, 4, size, dtype=dtype, device=device) for size in sizes)
        assert flash_precision(query, key, value) == expected


def test_under_autocast_attention_uses_the_dtype_of_autocast():
    vectors = torch.zeros(3, 4, 8)
    assert half_precision(vectors) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert half_precision(vectors) == torch.bfloat16
