"""Shared prefixes are computed once and give the same results: attention over prefix forests, and models trained on
them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from rl_core.batch import Batch
from rl_core.layout.prefixes import input_cells, prefix_forest, separate_sequences
from rl_transformers.rank import shared_attention
from rl_transformers.rank.attention import PACKED_ATTENTION, packed_attention
from rl_transformers.rank.micro_batch import model_input, predicted_tokens
from rl_transformers.rank.packed_sequences import PackedSequences
from rl_transformers.rank.token_scorer import TokenScorer

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Sequences, some of which start with all or some tokens of an earlier one."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 10))):
        start: list[int] = []
        if sequences and draw(st.booleans()):
            other = draw(st.sampled_from(sequences))
            start = other[: draw(st.integers(0, len(other)))]
        sequences.append([*start, *draw(st.lists(st.integers(0, 49), min_size=0 if start else 1, max_size=50))])
    return sequences


@settings(max_examples=60, deadline=None)
@given(sequences=forests(), kv_heads=st.sampled_from([1, 2, 4]), window=st.sampled_from([None, 1, 7, 1000]))
def test_attention_over_a_forest_is_attention_in_each_sequence(
    sequences: list[list[int]], kv_heads: int, window: int | None
):
    offsets = np.cumsum([0, *map(len, sequences)])
    tokens_T = np.array([token for tokens in sequences for token in tokens])
    cells = input_cells(prefix_forest(offsets, tokens_T, least_saved=1), offsets, total_multiple=3)
    apart = input_cells(separate_sequences(offsets), offsets)
    generator = torch.Generator().manual_seed(len(tokens_T))
    shapes = [(1, heads, len(cells.index_C), 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    # The tokens that both layouts contain. A layout leaves out tokens that predict nothing, but keeps at least one.
    row_S = torch.from_numpy(cells.cell_T[apart.index_C[cells.cell_T[apart.index_C] >= 0]])

    def attend(tensors: list[Tensor], packed: PackedSequences) -> Tensor:
        output, _ = packed_attention(
            nn.Module(), *tensors, None, scaling=0.3, sliding_window=window, packed_sequences=packed
        )
        return output[0]

    shared_SHD = attend(inputs, PackedSequences.of_nodes(cells, CPU))[row_S]
    separate_SHD = attend([tensor[:, :, row_S] for tensor in inputs], PackedSequences.of_nodes(apart, CPU))
    torch.testing.assert_close(shared_SHD, separate_SHD, rtol=0, atol=1e-13)
    upstream = torch.randn(shared_SHD.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad(shared_SHD, inputs, upstream),
        torch.autograd.grad(separate_SHD, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def samples_of_prompts(generator: torch.Generator) -> Batch:
    """Three prompts with six responses each; one response of each prompt continues another. Copies of two sequences
    follow, one of them cut short."""
    sequences: list[Tensor] = []
    for length in (40, 7, 33):
        prompt = torch.randint(50, (length,), generator=generator)
        for sample in range(6):
            num_tokens = int(torch.randint(1, 30, (1,), generator=generator))
            start = sequences[-1] if sample == 3 else prompt
            sequences.append(torch.cat([start, torch.randint(50, (num_tokens,), generator=generator)]))
    sequences += [sequences[0], sequences[7][:9]]
    return Batch.from_sequences([{"tokens": tokens} for tokens in sequences])


def scored(model: PreTrainedModel, batch: Batch, *, share_prefixes: bool) -> tuple[list[Tensor], int]:
    """Log-probs, entropies and the gradient of a weighted sum of both; and the number of the model's input tokens."""
    model.zero_grad()
    scorer = TokenScorer(model, chunk_tokens=64, compute_dtype=torch.float32)
    index_S = predicted_tokens(batch)
    inputs = model_input(batch, index_S, use_sample_packing=True, share_prefixes=share_prefixes, device=CPU)
    scores = inputs.scored_by(scorer, temperature=0.8)
    weights = torch.randn(2, len(index_S), generator=torch.Generator().manual_seed(3))
    sum((w * s).sum() for w, s in zip(weights, scores, strict=True)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return [*(score.detach() for score in scores), gradient], inputs.tokens_BL.numel()


@pytest.mark.parametrize("window", [None, 9])
def test_a_model_gives_the_same_scores_and_gradient_from_fewer_tokens(window: int | None):
    torch.manual_seed(0)
    is_windowed = window is not None
    model = (
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))
        if is_windowed
        else LlamaForCausalLM(LlamaConfig(**SIZES))
    )
    model.set_attn_implementation(PACKED_ATTENTION)
    batch = samples_of_prompts(torch.Generator().manual_seed(1))
    apart, num_apart = scored(model, batch, share_prefixes=False)
    shared, num_shared = scored(model, batch, share_prefixes=True)
    assert num_apart == batch.num_tokens - batch.num_sequences, "the last token of a sequence must not be an input"
    assert num_shared < 0.5 * num_apart
    for found, expected in zip(shared, apart, strict=True):
        # float32 sums over a few hundred tokens are added in another order.
        assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("responses", [([1], [2], [3]), ([1, 2], [1, 2], [1, 2])], ids=["of one token", "equal"])
def test_the_gradient_is_the_same_if_the_shared_tokens_are_all_the_input(responses: tuple[list[int], ...]):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.set_attn_implementation(PACKED_ATTENTION)
    batch = Batch.from_sequences([{"tokens": [*range(20), *response]} for response in responses])
    apart, num_apart = scored(model, batch, share_prefixes=False)
    shared, num_shared = scored(model, batch, share_prefixes=True)
    assert num_shared == num_apart // 3
    for found, expected in zip(shared, apart, strict=True):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_merging_the_parts_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Negative control: treats each part as the whole softmax."""
    monkeypatch.setattr(shared_attention.torch, "logaddexp", lambda own, before: own)
    with pytest.raises(AssertionError):
        test_a_model_gives_the_same_scores_and_gradient_from_fewer_tokens(None)


def test_different_routes_keep_equal_tokens_apart():
    batch = Batch.from_sequences([{"tokens": [*range(20), i]} for i in range(2)])
    routes_TLK = torch.zeros((42, 1, 1), dtype=torch.uint8)
    batch = batch.with_columns(routed_experts=routes_TLK, routed=torch.ones(42, dtype=torch.bool))

    def num_cells(batch: Batch) -> int:
        inputs = model_input(batch, predicted_tokens(batch), use_sample_packing=True, share_prefixes=True, device=CPU)
        return inputs.tokens_BL.numel()

    assert num_cells(batch) == 20
    routes_TLK[21 + 10] = 1
    assert num_cells(batch) == 40


# --- the CUDA kernel --------------------------------------------------------------------------------------------------


class StandIn:
    """A stand-in for torch's flash attention on CUDA. It takes the arguments that the installed torch declares."""

    def _flash_attention_forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        a = named(torch.ops.aten._flash_attention_forward.default, args, kwargs)
        assert (a["dropout_p"], a["return_debug_mask"]) == (0.0, False)
        output, lse = torch.empty_like(a["query"]), torch.empty(a["query"].shape[1], len(a["query"]))
        for queries, keys in blocks_of(a):
            scores_HQK = scores(a, queries, keys)
            lse[:, queries] = scores_HQK.logsumexp(-1)
            value_HKD = of_heads(a["value"][keys], a)
            output[queries] = (scores_HQK.softmax(-1) @ value_HKD).transpose(0, 1)
        nothing = torch.empty(0)
        return output, lse, nothing, nothing, nothing

    def _flash_attention_backward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        a = named(torch.ops.aten._flash_attention_backward.default, args, kwargs)
        assert a["dropout_p"] == 0.0
        assert a["grad_out"].is_contiguous()
        assert a["logsumexp"].is_contiguous()
        assert a["logsumexp"].shape == (a["query"].shape[1], len(a["query"]))
        with torch.enable_grad():
            inputs = [a[name].detach().requires_grad_() for name in ("query", "key", "value")]
            a |= dict(zip(("query", "key", "value"), inputs, strict=True))
            total = torch.zeros(())
            for queries, keys in blocks_of(a):
                # The gradient of the whole softmax, of which these keys are a part: dS = P · (dP − Σ dO·O).
                scores_HQK = scores(a, queries, keys)
                weight_HQK = (scores_HQK - a["logsumexp"][:, queries, None]).exp().detach()
                grad_HQD, out_HQD = (a[name][queries].transpose(0, 1) for name in ("grad_out", "out"))
                value_HKD = of_heads(a["value"][keys], a)
                inner_HQK = grad_HQD @ value_HKD.detach().transpose(1, 2) - (grad_HQD * out_HQD).sum(-1, keepdim=True)
                total = total + torch.where(weight_HQK > 0, weight_HQK * inner_HQK * scores_HQK, 0).sum()
                total = total + (grad_HQD * (weight_HQK @ value_HKD)).sum()
            return torch.autograd.grad(total, inputs)


def named(operator: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """The arguments by their names in the operator's schema."""
    arguments = operator._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    assert len(args) == len(positional)
    assert set(kwargs) <= {argument.name for argument in arguments if argument.kwarg_only}
    return {**dict(zip(positional, args, strict=True)), **kwargs}


def blocks_of(a: dict[str, Any]) -> Iterator[tuple[slice, slice]]:
    """The query range and key range of each block."""
    bounds = [a[name].tolist() for name in ("cum_seq_q", "cum_seq_k")]
    assert all(a[name].dtype == torch.int32 for name in ("cum_seq_q", "cum_seq_k"))
    assert [max(end - start for start, end in pairwise(ends)) for ends in bounds] == [a["max_q"], a["max_k"]]
    assert [ends[-1] for ends in bounds] == [len(a["query"]), len(a["key"])]
    return ((slice(*queries), slice(*keys)) for queries, keys in zip(*map(pairwise, bounds), strict=True))


def of_heads(tensor_KHD: Tensor, a: dict[str, Any]) -> Tensor:
    """Keys or values, repeated for each query head: [query heads, K, D]."""
    return tensor_KHD.transpose(0, 1).repeat_interleave(a["query"].shape[1] // tensor_KHD.shape[1], dim=0)


def scores(a: dict[str, Any], queries: slice, keys: slice) -> Tensor:
    """Attention scores before the softmax: [heads, queries, keys]."""
    found = a["scale"] * a["query"][queries].transpose(0, 1) @ of_heads(a["key"][keys], a).transpose(1, 2)
    is_hidden = torch.ones(found.shape[1:], dtype=torch.bool).triu(1) & a["is_causal"]
    return found.masked_fill(is_hidden, -torch.inf)


def forest_attention(kernel: Any, inputs: list[Tensor], packed: PackedSequences) -> list[Tensor]:
    """The output of a kernel, and the gradients of a weighted sum of it."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = shared_attention._SharedAttention.apply(*inputs, packed.shared, 0.3, kernel)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(output))]


def forest_inputs(device: torch.device) -> tuple[list[Tensor], PackedSequences]:
    """Query, key and value of a small prefix forest; two query heads share a key head."""
    sequences = [[*range(30), *range(40, 40 + n)] for n in (3, 9, 1)] + [list(range(20)), [7, 7, 7], [*range(30), 1, 2]]
    offsets = np.cumsum([0, *map(len, sequences)])
    tokens_T = np.array([token for tokens in sequences for token in tokens])
    cells = input_cells(prefix_forest(offsets, tokens_T, least_saved=1), offsets)
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(len(cells.index_C), heads, 64, generator=generator) for heads in (4, 2, 2)]
    return [tensor.to(device) for tensor in inputs], PackedSequences.of_nodes(cells, device)


def test_the_cuda_kernel_is_called_with_the_signature_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch):
    inputs, packed = forest_inputs(CPU)
    expected = forest_attention(shared_attention._Rectangles(), inputs, packed)
    monkeypatch.setattr(shared_attention, "_aten", StandIn())
    for found, same in zip(forest_attention(shared_attention._Varlen(), inputs, packed), expected, strict=True):
        torch.testing.assert_close(found, same, rtol=0, atol=2e-5)


def test_the_cuda_kernel_returns_the_expected_shapes_and_dtypes():
    """Meta tensors give the shapes and dtypes that torch declares for the operator's results."""
    inputs, packed = forest_inputs(CPU)
    query, key, value = (tensor.to("meta", torch.bfloat16) for tensor in inputs)
    assert packed.shared is not None
    kernel, own = shared_attention._Varlen(), packed.shared.own
    output, lse = kernel.forward(query, key, value, own, True, 0.3)
    assert (output.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:2], torch.float32)
    grads = kernel.backward(output, query, key, value, output, lse, own, True, 0.3)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


@pytest.mark.gpu
def test_the_cuda_kernel_agrees_with_the_cpu_kernel():
    inputs, packed = forest_inputs(CPU)
    halves = [tensor.to(torch.bfloat16) for tensor in inputs]
    expected = forest_attention(shared_attention._Rectangles(), [tensor.float() for tensor in halves], packed)
    device = torch.device("cuda")
    on_gpu = forest_attention(
        shared_attention._Varlen(), [tensor.to(device) for tensor in halves], forest_inputs(device)[1]
    )
    for found, same in zip(on_gpu, expected, strict=True):
        # bfloat16 has a mantissa of 8 bits.
        assert (found.cpu().float() - same).norm() <= 1e-2 * same.norm()
