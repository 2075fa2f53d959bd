"""Returns along the stream, compared with numbers computed by hand and with a plain recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.algorithms.returns import (
    discounted_returns,
    outcome_rewards,
    reverse_scan,
    turn_index,
    turn_returns,
    turn_rewards,
)
from rl_core.errors import ConfigError, DataError, ShapeError
from tests.core.token_streams import Stream, streams

# A sequence of two turns with an observation between them, then a sequence that begins with a sampled token.
MASK = torch.tensor([False, True, True, False, True, True])
SEQUENCE = torch.tensor([0, 0, 0, 0, 0, 1])


def test_an_outcome_sits_on_the_last_sampled_token():
    assert outcome_rewards(torch.tensor([2.0, 3.0]), MASK, SEQUENCE).tolist() == [0, 0, 0, 0, 2, 3]


def test_an_outcome_of_a_sequence_without_a_sampled_token_is_refused():
    mask_T = torch.tensor([True, False])
    assert outcome_rewards(torch.tensor([2.0, 0.0]), mask_T, torch.tensor([0, 1])).tolist() == [2.0, 0.0]
    with pytest.raises(ShapeError, match=r"sequence 1 has the score 5, but no sampled token.* set the score to 0"):
        outcome_rewards(torch.tensor([2.0, 5.0]), mask_T, torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"scores_N\[0\] is nan"):
        outcome_rewards(torch.tensor([float("nan"), 0.0]), mask_T, torch.tensor([0, 1]))


def test_a_single_decay_is_not_broadcast():
    with pytest.raises(ShapeError, match="row 1 is missing from decay_T"):
        reverse_scan(torch.ones(4), torch.ones(1))


def test_the_discount_counts_sampled_tokens():
    rewards_T = torch.tensor([0.0, 0.0, 4.0, 0.0, 8.0, 1.0])
    assert discounted_returns(rewards_T, MASK, SEQUENCE, gamma=0.5).tolist() == [0, 4, 8, 0, 8, 1]


def test_turns_are_runs_of_sampled_tokens_within_a_sequence():
    assert turn_index(MASK, SEQUENCE).tolist() == [-1, 0, 0, -1, 1, 2]


def test_a_turns_reward_sits_on_its_last_token():
    assert turn_rewards(torch.tensor([4.0, 8.0, 1.0]), MASK, SEQUENCE).tolist() == [0, 0, 4, 0, 8, 1]
    with pytest.raises(ShapeError, match="the stream has 3 turns"):
        turn_rewards(torch.tensor([4.0, 8.0]), MASK, SEQUENCE)


def test_the_turn_discount_counts_turns_and_is_the_same_for_all_tokens_of_a_turn():
    rewards_T = torch.tensor([0.0, 1.0, 3.0, 0.0, 8.0, 1.0])
    assert turn_returns(rewards_T, MASK, SEQUENCE, gamma=0.5).tolist() == [0, 8, 8, 0, 8, 1]


def test_a_reward_on_a_token_that_was_not_sampled_is_refused():
    with pytest.raises(ShapeError, match=r"rewards_T\[3\] is 1, but token 3 \(of sequence 0\) was not sampled"):
        discounted_returns(torch.tensor([0.0, 0, 0, 1, 0, 0]), MASK, SEQUENCE)


def test_a_falling_or_negative_sequence_index_is_refused_with_the_token_named():
    with pytest.raises(ShapeError, match="falls from 1 to 0 at token 2"):
        turn_index(torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 0]))
    with pytest.raises(ShapeError, match=r"sequence_T\[0\] is -1"):
        turn_index(torch.ones(1, dtype=torch.bool), torch.tensor([-1]))


def test_a_discount_above_one_is_refused():
    with pytest.raises(ConfigError, match=r"gamma: 1\.1"):
        turn_returns(torch.zeros(6), MASK, SEQUENCE, gamma=1.1)


@given(
    num_tokens=st.sampled_from([0, 1, 63, 64, 65, 128, 4095, 4096, 4097, 5000]),
    seed=st.integers(0, 2**20),
    ends=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_the_block_scan_equals_the_plain_recurrence(num_tokens: int, seed: int, ends: float):
    generator = torch.Generator().manual_seed(seed)
    inputs_T = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    decay_T = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    decay_T *= torch.rand(num_tokens, generator=generator) >= ends
    given_inputs_T, given_decay_T = inputs_T.clone(), decay_T.clone()
    expected, following = [], 0.0
    for value, decay in zip(reversed(inputs_T.tolist()), reversed(decay_T.tolist()), strict=True):
        following = value + decay * following
        expected.append(following)
    expected_T = torch.tensor(expected[::-1], dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(inputs_T, decay_T), expected_T, rtol=1e-12, atol=1e-12)
    assert torch.equal(inputs_T, given_inputs_T)
    assert torch.equal(decay_T, given_decay_T)


@given(stream=streams(), gamma=st.sampled_from([0.0, 0.7, 1.0]))
def test_returns_equal_their_definition_token_by_token_and_turn_by_turn(stream: Stream, gamma: float):
    rewards_T = stream.normal() * stream.mask_T
    turns = turn_index(stream.mask_T, stream.sequence_T).tolist()
    by_token_T, by_turn_T = torch.zeros_like(rewards_T), torch.zeros_like(rewards_T)
    for sequence in range(len(stream.lengths)):
        times = ((stream.sequence_T == sequence) & stream.mask_T).nonzero().flatten().tolist()
        turn_starts = [turns.index(turns[t]) for t in times]
        for here, t in enumerate(times):
            by_token_T[t] = sum(gamma**k * float(rewards_T[u]) for k, u in enumerate(times[here:]))
            from_turn = [u for u, start in zip(times, turn_starts, strict=True) if turns[start] >= turns[t]]
            by_turn_T[t] = sum(gamma ** (turns[u] - turns[t]) * float(rewards_T[u]) for u in from_turn)
    stream_args = (rewards_T, stream.mask_T, stream.sequence_T)
    torch.testing.assert_close(discounted_returns(*stream_args, gamma=gamma), by_token_T, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(turn_returns(*stream_args, gamma=gamma), by_turn_T, rtol=1e-11, atol=1e-11)
