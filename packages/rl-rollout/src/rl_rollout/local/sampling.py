"""Draws one token per row from filtered logits, with randomness that depends only on (seed, position).

A row's uniform number is a hash of its seed and of the number of tokens that it has sampled (counter-based generation,
Salmon et al. 2011). The token is the inverse of the cumulative distribution at this number. So the uniform numbers do
not depend on the other rows of the batch, and are the same after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_core.interfaces import SamplingParams

_MASK_64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.zeros(0, np.int32)
_MAX_CHUNK_ELEMENTS = 1 << 22
"""Maximum number of logits processed at a time, because float64 sums of a whole batch over a large vocabulary would
need gigabytes."""


def hashed_seeds(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Hashes integers of any size to 64-bit states [B], so that neighbouring seeds get unrelated states."""
    return _splitmix64(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64))


def uniforms(states_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns one independent number in [0, 1) per (state, position).

    u = splitmix64(state + (position + 1) · golden) / 2^64, truncated to 52 bits. The truncation ensures u · total <
    total also in float64, so the inverse of the cumulative distribution stays inside the vocabulary. Source: Steele et
    al. 2014, "Fast splittable pseudorandom number generators".
    """
    mixed_B = _splitmix64(states_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed_B >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _splitmix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def knob_array(params: Sequence[SamplingParams]) -> npt.NDArray[np.float32]:
    """Returns the parameters that `draw` reads, one row per sample [B, 4]: temperature, top_k, top_p, min_p."""
    return np.array([[p.temperature, p.top_k, p.top_p, p.min_p] for p in params], dtype=np.float32).reshape(-1, 4)


def draw(
    logits_BV: Tensor, knobs_array_B4: npt.NDArray[np.float32], uniforms_B: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor, list[npt.NDArray[np.int32]]]:
    """Draws one token per row; returns it with its log-prob in the distribution that it was drawn from, and with the
    tokens of that distribution.

    Logits are divided by the temperature, then filtered by top-k, top-p and min-p, in this order; the log-prob is taken
    from the renormalised remaining distribution. At temperature 0 the most likely token is taken, with the log-prob of
    the unscaled, unfiltered distribution.

    Args:
        logits_BV: logits of any float dtype, which are converted to float32.
        knobs_array_B4: the result of `knob_array`.
        uniforms_B: the result of `uniforms`.

    Returns:
        Tokens int64 [B] and log-probs float32 [B], on the logits' device; and for each row the tokens that the filters
        kept, none if they kept all. A log-prob is NaN if a logit of its row is.
    """
    filtered = _is_filtered(knobs_array_B4)
    knobs_B4 = torch.from_numpy(knobs_array_B4).to(logits_BV.device)
    targets_B = torch.from_numpy(uniforms_B).to(logits_BV.device)
    chunk = max(1, _MAX_CHUNK_ELEMENTS // logits_BV.shape[1])
    parts = [
        _draw_chunk(logits, knobs, targets, filtered)
        for logits, knobs, targets in zip(
            logits_BV.split(chunk), knobs_B4.split(chunk), targets_B.split(chunk), strict=True
        )
    ]
    tokens, logprobs, kept = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), [ids for rows in kept for ids in rows]


def _draw_chunk(
    logits_BV: Tensor, knobs_B4: Tensor, targets_B: Tensor, filtered: bool
) -> tuple[Tensor, Tensor, list[npt.NDArray[np.int32]]]:
    temperature_B1 = knobs_B4[:, :1]
    greedy_B1 = temperature_B1 == 0
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature_B1.masked_fill(greedy_B1, 1.0), dim=-1)
    if filtered:
        logprobs_BV = torch.where(
            greedy_B1, logprobs_BV, filter_logprobs(logprobs_BV, *knobs_B4[:, 1:].split(1, dim=1))
        )
    cumulative_BV = torch.cumsum(logprobs_BV.exp(), dim=-1, dtype=torch.float64)
    drawn_B1 = torch.searchsorted(cumulative_BV, targets_B[:, None] * cumulative_BV[:, -1:], right=True)
    # An index lies past the end only if a sum is NaN; the caller then finds a NaN log-prob.
    drawn_B1 = drawn_B1.clamp(max=logits_BV.shape[1] - 1)
    tokens_B1 = torch.where(greedy_B1, logprobs_BV.argmax(dim=-1, keepdim=True), drawn_B1)
    kept = _kept(logprobs_BV) if filtered else [_NONE] * len(logprobs_BV)
    return tokens_B1[:, 0], logprobs_BV.gather(1, tokens_B1)[:, 0], kept


def _kept(logprobs_BV: Tensor) -> list[npt.NDArray[np.int32]]:
    is_kept_BV = logprobs_BV > -torch.inf
    is_kept_BV[is_kept_BV.all(dim=-1)] = False
    ids = is_kept_BV.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return np.split(ids, is_kept_BV.sum(dim=-1).cumsum(0)[:-1].cpu().numpy())


def filter_logprobs(logprobs_BV: Tensor, top_k_B1: Tensor, top_p_B1: Tensor, min_p_B1: Tensor) -> Tensor:
    """Returns the log-probs renormalised over the tokens that the filters keep; −inf for the others.

    top-k keeps the k most likely tokens (−1: all). top-p keeps the smallest set of most likely remaining tokens whose
    total probability reaches p. min-p keeps the tokens that are at least min_p times as likely as the most likely one.
    The most likely token always stays. Among tokens of equal probability, those with lower ids stay, so top-k keeps
    exactly k tokens.
    """
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(sorted_BV.shape[1], device=sorted_BV.device)
    sorted_BV = sorted_BV.masked_fill((rank_V >= top_k_B1) & (top_k_B1 > 0), -torch.inf)
    probs_BV = torch.softmax(sorted_BV.double(), dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    dropped_BV = ((before_BV >= top_p_B1) & (top_p_B1 < 1)) | (probs_BV < min_p_B1 * probs_BV[:, :1])
    dropped_BV[:, 0] = False
    kept_BV = torch.log_softmax(sorted_BV.masked_fill(dropped_BV, -torch.inf), dim=-1)
    return torch.empty_like(kept_BV).scatter_(1, order_BV, kept_BV)


def _is_filtered(knobs_B4: npt.NDArray[np.float32]) -> bool:
    _, top_k_B, top_p_B, min_p_B = knobs_B4.T
    return bool((top_k_B > 0).any() or (top_p_B < 1).any() or (min_p_B > 0).any())
