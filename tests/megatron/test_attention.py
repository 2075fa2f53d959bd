"""Attention over packed sequences: which queries see which keys, on each context rank."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_core.errors import WorkerError
from rl_core.layout.slices import context_positions
from rl_megatron import MegatronOptions
from rl_megatron.model.attention import CoreAttention, Segments, _pieces
from rl_transformers.testing.cases import TEMPERATURE, Variant, open_case
from tests.megatron.changed import ChangedBackend
from tests.megatron.test_needed import DENSE, LIMITS, backward_error, start


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_token_of_a_rank_attends_to_its_segment_up_to_itself(size: int):
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


class FakeContextGroup:
    """A process group that reports one context rank and the group's size."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


def attention(rank: int, size: int) -> CoreAttention:
    groups = SimpleNamespace(cp=FakeContextGroup(rank, size))
    return CoreAttention(None, 1, None, "self", softmax_scale=0.3, pg_collection=groups)


def slow_attention(query: Tensor, key: Tensor, value: Tensor, boundaries: np.ndarray) -> Tensor:
    """Softmax attention with an explicit mask over the whole stream: [tokens, heads · size]."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    segment = torch.from_numpy(np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries)))
    seen = (segment[:, None] == segment).tril()
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_outputs_and_gradients_equal_masked_attention_over_the_stream(size, kv_heads, monkeypatch):
    generator = torch.Generator().manual_seed(size)
    lengths = np.random.default_rng(size).integers(1, 40, 9) * 2 * size
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    shapes = [(boundaries[-1], heads, width) for heads, width in ((4, 8), (kv_heads, 8), (kv_heads, 6))]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    expected = slow_attention(*inputs, boundaries)
    held = [torch.from_numpy(context_positions(boundaries, rank, size)) for rank in range(size)]
    outputs = torch.zeros_like(expected)
    for rank, own in enumerate(held):
        # Gathering from all ranks gives the whole tensor, ordered by rank.
        by_rank = iter([tensor[torch.cat(held)] for tensor in inputs[1:]])
        monkeypatch.setattr("rl_megatron.model.attention._gather", lambda _tensor, _group, whole=by_rank: next(whole))
        segments = Segments.of(boundaries, torch.device("cpu"))
        query, key, value = (tensor[own] for tensor in inputs)
        outputs = outputs.index_put((own,), attention(rank, size)(query, key, value, None, packed_seq_params=segments))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for found, right in zip(
        torch.autograd.grad(outputs, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_layers_of_one_micro_batch_share_the_attention_plan():
    boundaries = np.array([0, 4, 10, 90])
    segments = Segments.of(boundaries, torch.device("cpu"))
    inputs = [torch.randn(90, 2, 8) for _ in range(3)]
    attention(0, 1)(*inputs, None, packed_seq_params=segments)
    plan = segments.plan
    assert plan is not None
    assert [part.shapes for part in plan.parts] == [((2, 6, 6), (1, 80, 80))]
    attention(0, 1)(*inputs, None, packed_seq_params=segments)
    assert segments.plan is plan


@pytest.mark.parametrize("checkpoint", [DENSE, DENSE | {"family": "deepseek_v3"}], ids=["qwen3", "deepseek_v3"])
def test_packed_float32_needs_no_kernel_of_transformer_engine(tmp_path, request, checkpoint):
    case, group = start("use_transformer_engines_attention", tmp_path, request, checkpoint)
    assert backward_error(case, group) < 1e-5


@pytest.mark.parametrize("changes", [{"bf16": True}, {"use_sample_packing": False}], ids=str)
def test_bfloat16_and_unpacked_attention_use_transformer_engine(tmp_path, changes):
    backend, variant = ChangedBackend(change="use_transformer_engines_attention"), Variant(spec=changes)
    with open_case(backend, MegatronOptions(), variant, tmp_path, timeout_s=120.0) as case:
        group = case.start()
        with pytest.raises(WorkerError, match="no kernel of Transformer Engine"):
            group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
