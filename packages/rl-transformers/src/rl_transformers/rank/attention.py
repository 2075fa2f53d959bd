"""Causal attention inside a packed stream: every sequence attends only to itself, without a mask over the stream.

All models use the same kernels. On CUDA in half precision, torch's variable-length flash attention is used if it
supports the size of the heads. In all other cases, SDPA over rectangles is used. A rectangle contains sequences of
similar length as right-padded rows. Under a causal mask no real token sees padding on its right, so `is_causal` is
exact and needs no mask tensor. Only a sliding window needs a mask, [width, width] for a rectangle of this width.
`shared_attention.py` has the kernels for sequences that share prefixes. With Ulysses, an all-to-all before attention
gives each rank all tokens of the sequences for a part of the heads (`ulysses.py`).
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl_core.errors import ConfigError
from rl_core.rank_kit.row_moves import gather_rows, scatter_rows
from rl_transformers.rank.packed_sequences import PackedSequences, SharedPrefixes
from rl_transformers.rank.shared_attention import flash_precision, shared_attention
from rl_transformers.rank.ulysses import heads_for_tokens, tokens_for_heads

PACKED_ATTENTION = "rl_core_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`.

    Ignores the dropout probability, because models run without dropout here.

    Args:
        module: the calling attention layer.
        query, key, value: [B, heads, L, D], the stream cut into B rows (one, if packed). Key and value may have fewer
            heads, each shared by a group of query heads.
        attention_mask: must be None. transformers passes None, because no mask function is registered for this
            attention function; a model that makes its own mask is refused.
        scaling: factor of query · key; None: D ** −0.5.
        sliding_window: number of tokens that each token sees, including itself; None: itself and all before it.
        packed_sequences: where each sequence is in the stream.
        others: further arguments that transformers passes to every attention function. Those that ask for a term that
            is not implemented here are refused, all others ignored.

    Returns:
        [B, L, heads, D].

    Raises:
        ConfigError: the model's code does not pass `packed_sequences` on, passes a mask, needs a term that is not
            implemented here, or states the layer's window or chunks only in a mask.
    """
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    unsupported += _bounds_in_masks(module, sliding_window)
    if packed_sequences is None or attention_mask is not None or unsupported:
        if unsupported:
            fault = f"uses {', '.join(unsupported)}"
        elif packed_sequences is None:
            fault = "does not pass on the bounds of the sequences"
        else:
            fault = "passes an attention mask, which attention over packed sequences does not read"
        raise ConfigError(
            f"{type(module).__name__} {fault}, so its sequences can be neither packed nor split over ranks: set "
            "trainer.use_sample_packing=false and sequence_parallel_size=1"
        )
    ulysses, num_rows = packed_sequences.ulysses, query.shape[0]
    if ulysses is not None:
        query, key, value = (heads_for_tokens(tensor, ulysses) for tensor in (query, key, value))
    query_THD, key_TKD, value_TKD = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output_THD = _attention(query_THD, key_TKD, value_TKD, packed_sequences, scaling, sliding_window)
    output_BLHD = output_THD.unflatten(0, (num_rows, -1))
    if ulysses is not None:
        output_BLHD = tokens_for_heads(output_BLHD.transpose(1, 2), ulysses).transpose(1, 2)
    return output_BLHD, None


def packed_attention_of_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """`packed_attention` of a batch in which each row is one sequence, for `attention_proof`."""
    packed = PackedSequences.of_lengths(np.full(query.shape[0], query.shape[2]), query.device)
    return packed_attention(module, query, key, value, None, **{**settings, "packed_sequences": packed})


def _bounds_in_masks(module: nn.Module, sliding_window: int | None) -> list[str]:
    """Returns the kinds of attention of this layer whose bounds are only in a mask, which `packed_attention` does not
    read. These are chunked attention, and a sliding window that the model's code does not pass as `sliding_window`.
    Empty for other layers."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None:
        window = getattr(config, "sliding_window", None)
        has_window = window is not None and window < getattr(config, "max_position_embeddings", math.inf)
        kind = "sliding_attention" if has_window else None
    else:
        kind = kinds[layer]
    is_lost = kind == "chunked_attention" or (kind == "sliding_attention" and sliding_window is None)
    return [f"{kind} only through a mask"] if is_lost else []


def _attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    packed: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    shared = packed.shared
    longest = packed.max_length if shared is None else shared.sequences.max_length
    if window is not None and window >= longest:
        window = None
    if shared is not None:
        output_THD = shared_attention(query_THD, key_TKD, value_TKD, shared, scaling) if window is None else None
        if output_THD is not None:
            return output_THD
        return _attention_per_sequence(query_THD, key_TKD, value_TKD, shared, scaling, window)
    half = flash_precision(query_THD, key_TKD, value_TKD)
    if half is None:
        return _rectangle_attention(query_THD, key_TKD, value_TKD, packed, scaling, window)
    return _varlen_attention(query_THD.to(half), key_TKD.to(half), value_TKD.to(half), packed, scaling, window)


def _attention_per_sequence(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    shared: SharedPrefixes,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of sequences that share prefixes, for windows and for tensors that no kernel of `shared_attention`
    supports. Only attention is computed for every sequence in full; everything else computes a shared prefix once."""
    query_THD, key_TKD, value_TKD = (t.index_select(0, shared.row_T) for t in (query_THD, key_TKD, value_TKD))
    output_THD = _attention(query_THD, key_TKD, value_TKD, shared.sequences, scaling, window)
    return gather_rows(output_THD, shared.token_C)


def _rectangle_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    packed: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    cell_T = packed.cell_T
    cells = [
        t if cell_T is None else scatter_rows(t, cell_T, packed.num_cells) for t in (query_THD, key_TKD, value_TKD)
    ]
    sizes = [rows * width for rows, width in packed.rectangles]
    outputs = []
    for (rows, width), *parts in zip(packed.rectangles, *(tensor.split(sizes) for tensor in cells), strict=True):
        query, key, value = (part.unflatten(0, (rows, width)).transpose(1, 2) for part in parts)
        # The CPU's flash attention supports grouped query heads, with and without a mask.
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if window is None else _band(width, window, query.device),
            is_causal=window is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if cell_T is None else gather_rows(output, cell_T)


def _band(width: int, window: int, device: torch.device) -> Tensor:
    """bool [width, width]: token t sees t − window + 1 … t."""
    full = torch.ones(width, width, dtype=torch.bool, device=device)
    return full.tril() & full.triu(1 - window)


def _varlen_attention(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    packed: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": query_THD.shape[1] != key_TKD.shape[1]} if _takes_enable_gqa() else {}
    bounds, longest = packed.offsets, packed.max_length
    output = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(output, Tensor)
    return output


@cache
def _takes_enable_gqa() -> bool:
    """Whether `varlen_attn` has the argument `enable_gqa`. In torch 2.11, the function accepts grouped query heads
    without this argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
