"""Loss weights compared with numbers worked by hand and with nested means, and checked to ignore split and order."""

from __future__ import annotations

import inspect
import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.reductions import (
    REDUCTIONS,
    prompt_mean,
    prompt_token_sum,
    seq_mean_token_sum_norm,
    sequence_mean,
    token_mean,
)
from rl_core.errors import ConfigError, ShapeError
from tests.core.token_streams import Stream, reordered, streams

# Trained tokens of sequences 0 to 3: 2, 1, 0, 1. Sequences 0 and 3 have the same prompt.
MASK = torch.tensor([False, True, True, True, False, False, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2, 3])
GROUPS = torch.tensor([5, 1, 9, 5])
# Weights are rounded to float32 once; a sum of 700 of them is accurate to 1e-5.
ROUNDED = {"rtol": 1e-5, "atol": 1e-7}


def weights_of(name: str, mask_T: Tensor, sequence_T: Tensor, group_N: Tensor) -> Tensor:
    given_by_name = {"loss_mask_T": mask_T, "sequence_T": sequence_T, "group_N": group_N, "max_seq_len": 100}
    parameters = inspect.signature(REDUCTIONS[name]).parameters
    return REDUCTIONS[name](**{parameter: given_by_name[parameter] for parameter in parameters})


def test_token_mean_equals_weights_worked_by_hand():
    assert token_mean(MASK).tolist() == [0, 0.25, 0.25, 0.25, 0, 0, 0.25]


def test_sequence_mean_equals_weights_worked_by_hand_and_excludes_an_untrained_sequence():
    expected = torch.tensor([0, 1 / 6, 1 / 6, 1 / 3, 0, 0, 1 / 3])
    torch.testing.assert_close(sequence_mean(MASK, SEQUENCE), expected)


def test_prompt_mean_equals_weights_worked_by_hand_and_excludes_an_untrained_prompt():
    expected = torch.tensor([0, 1 / 6, 1 / 6, 1 / 2, 0, 0, 1 / 6])
    torch.testing.assert_close(prompt_mean(MASK, SEQUENCE, GROUPS), expected)


def test_the_sequence_sum_over_a_constant_equals_weights_worked_by_hand():
    expected = torch.tensor([0, 1 / 30, 1 / 30, 1 / 30, 0, 0, 1 / 30])
    torch.testing.assert_close(seq_mean_token_sum_norm(MASK, SEQUENCE, max_seq_len=10), expected)


def test_the_token_sum_of_prompts_equals_weights_worked_by_hand():
    expected = torch.tensor([0, 1 / 2, 1 / 2, 1 / 2, 0, 0, 1 / 2])
    torch.testing.assert_close(prompt_token_sum(MASK, SEQUENCE, GROUPS), expected)


def slow_loss(name: str, losses: list[float], stream: Stream, groups: list[int]) -> float:
    """The reduction as in the papers: nested means and sums over the trained tokens."""
    by_sequence: dict[int, list[float]] = {}
    for t, (trained, sequence) in enumerate(zip(stream.mask_T.tolist(), stream.sequence_T.tolist(), strict=True)):
        if trained:
            by_sequence.setdefault(sequence, []).append(losses[t])
    if not by_sequence:
        return 0.0

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    if name == "token_mean":
        return mean([loss for values in by_sequence.values() for loss in values])
    if name == "sequence_mean":
        return mean([mean(values) for values in by_sequence.values()])
    if name == "seq_mean_token_sum_norm":
        return mean([math.fsum(values) / 100 for values in by_sequence.values()])
    by_prompt: dict[int, list[float]] = {}
    for sequence, values in by_sequence.items():
        by_prompt.setdefault(groups[sequence], []).extend(values)
    if name == "prompt_token_sum":
        return mean([math.fsum(values) for values in by_prompt.values()])
    return mean([mean(values) for values in by_prompt.values()])


@pytest.mark.parametrize("name", REDUCTIONS)
@given(stream=streams())
def test_the_weighted_sum_equals_the_nested_means(name: str, stream: Stream):
    losses_T, group_N = stream.normal(), stream.groups()
    weights_T = weights_of(name, stream.mask_T, stream.sequence_T, group_N)
    expected = slow_loss(name, losses_T.tolist(), stream, group_N.tolist())
    torch.testing.assert_close(float((weights_T * losses_T).sum()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(stream=streams())
def test_weights_are_zero_where_masked_and_weights_of_means_sum_to_one(name: str, stream: Stream):
    weights_T = weights_of(name, stream.mask_T, stream.sequence_T, stream.groups())
    assert weights_T.dtype == torch.float32
    assert not weights_T[~stream.mask_T].any()
    assert bool((weights_T[stream.mask_T] > 0).all())
    if name not in ("seq_mean_token_sum_norm", "prompt_token_sum"):
        torch.testing.assert_close(float(weights_T.sum()), float(stream.mask_T.any()), **ROUNDED)


@pytest.mark.parametrize("name", REDUCTIONS)
@given(stream=streams())
def test_weights_move_with_their_sequences_in_any_order(name: str, stream: Stream):
    order = torch.randperm(len(stream.lengths), generator=torch.Generator().manual_seed(stream.seed)).tolist()
    group_N = stream.groups()
    sequence_T = torch.repeat_interleave(torch.arange(len(order)), torch.tensor([stream.lengths[i] for i in order]))
    moved_T = weights_of(name, reordered(stream, stream.mask_T, order), sequence_T, group_N[order])
    plain_T = weights_of(name, stream.mask_T, stream.sequence_T, group_N)
    assert torch.equal(moved_T, reordered(stream, plain_T, order))


@pytest.mark.parametrize("name", REDUCTIONS)
@given(stream=streams(), cut=st.floats(0, 1))
def test_parts_of_a_mini_batch_add_up_only_with_weights_of_the_whole(name: str, stream: Stream, cut: float):
    losses_T, group_N = stream.normal(), stream.groups()
    weights_T = weights_of(name, stream.mask_T, stream.sequence_T, group_N)
    at = sum(stream.lengths[: round(cut * len(stream.lengths))])
    parts = (weights_T[:at] * losses_T[:at]).sum() + (weights_T[at:] * losses_T[at:]).sum()
    torch.testing.assert_close(parts, (weights_T * losses_T).sum())
    # With `prompt_token_sum`, parts that each train tokens of every prompt have the same weights as the whole batch.
    if name != "prompt_token_sum" and stream.mask_T[:at].any() and stream.mask_T[at:].any():
        per_part_T = torch.cat(
            [
                weights_of(name, stream.mask_T[part], stream.sequence_T[part], group_N)
                for part in (slice(None, at), slice(at, None))
            ]
        )
        assert not torch.allclose(per_part_T, weights_T, rtol=1e-3)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_an_empty_mask_gives_zeros(name: str, num_tokens: int):
    mask_T = torch.zeros(num_tokens, dtype=torch.bool)
    weights_T = weights_of(name, mask_T, torch.zeros(num_tokens, dtype=torch.int64), torch.tensor([3]))
    assert weights_T.tolist() == [0.0] * num_tokens


def test_wrong_input_is_refused():
    with pytest.raises(ShapeError, match=r"loss_mask_T: expected torch.bool, got torch.float32"):
        token_mean(MASK.float())
    with pytest.raises(ShapeError, match="row 6 is missing from sequence_T"):
        sequence_mean(MASK, SEQUENCE[:6])
    with pytest.raises(ShapeError, match=r"group_N: expected one axis with at least 4 entries, .* got shape \(3,\)"):
        prompt_mean(MASK, SEQUENCE, GROUPS[:3])
    with pytest.raises(ConfigError, match="max_seq_len: nan"):
        seq_mean_token_sum_norm(MASK, SEQUENCE, max_seq_len=cast(Any, math.nan))
    with pytest.raises(ConfigError, match="max_seq_len: 0"):
        seq_mean_token_sum_norm(MASK, SEQUENCE, max_seq_len=0)
