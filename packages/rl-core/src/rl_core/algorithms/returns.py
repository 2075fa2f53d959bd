"""Places rewards in the token stream, and computes their sums, discounted per token or per turn.

Only the sampled tokens of a sequence are time steps. Tokens between them (observations of an environment) are not
actions: they have no reward, and the discount does not count them. `sequence_T` may also be the trajectory's index if
the steps of each trajectory are consecutive in the stream; sums then continue across steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.algorithms.checks import (
    require_between,
    require_bool,
    require_finite,
    require_floating,
    require_ordered,
    require_row_per_sequence,
    require_same_length,
)
from rl_core.algorithms.groups import sequence_sum
from rl_core.errors import ShapeError

_BLOCK = 64


def outcome_rewards(scores_N: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Token-level rewards of outcomes: each sequence's score on its last sampled token, 0 elsewhere.

    Args:
        scores_N: outcome reward of each sequence, finite, any range.
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        Rewards [T] in the dtype of `scores_N`.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a sequence has a score other than 0 but no sampled token.
        DataError: a score is not finite.
    """
    require_floating(scores_N=scores_N)
    _require_stream(sequence_T, mask_T=mask_T)
    require_row_per_sequence(sequence_T, scores_N=scores_N)
    require_finite(scores_N=scores_N)
    sampled_N = torch.zeros(scores_N.numel(), dtype=torch.bool, device=scores_N.device)
    sampled_N[sequence_T[mask_T]] = True
    lost_N = (scores_N != 0) & ~sampled_N
    if bool(lost_N.any()):
        i = int(lost_N.nonzero()[0])
        raise ShapeError(
            f"sequence {i} has the score {float(scores_N[i]):g}, but no sampled token that can have this reward; "
            "pass the mask of sampled tokens, not of trained ones, or set the score to 0"
        )
    index_T = mask_T.nonzero().squeeze(1)
    last_T = index_T[~continues(sequence_T[index_T])]
    return scores_N.new_zeros(mask_T.numel()).index_copy(0, last_T, scores_N[sequence_T[last_T]])


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each sampled token to its sequence's end.

    G_t = r_t + gamma · G_{t'}, with t' the next sampled token of the sequence; G_{t'} = 0 after the last one.
    Source: Sutton & Barto 2018, eq. 3.8 and 3.9.

    Args:
        rewards_T: token-level rewards, finite; 0 on tokens that were not sampled.
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        gamma: discount per sampled token, in [0, 1].

    Returns:
        Returns [T] in the dtype of `rewards_T`, 0 where no token was sampled.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a token that was not sampled has a reward.
        DataError: a reward is not finite.
        ConfigError: `gamma` is out of range.
    """
    require_between(0, 1, gamma=gamma)
    require_rewarded_stream(rewards_T, mask_T, sequence_T)
    index_T = mask_T.nonzero().squeeze(1)
    sampled_rewards_T = rewards_T[index_T]
    decay_T = gamma * continues(sequence_T[index_T]).to(rewards_T.dtype)
    return on_stream(reverse_scan(sampled_rewards_T, decay_T), index_T, rewards_T)


def turn_index(mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Index of each token's turn, counted over the whole stream from 0; −1 for tokens that were not sampled.

    A turn is a run of consecutive sampled tokens in one sequence. Two turns without an observation token between them
    form a single run and count as one.

    Args:
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        int64 [T].

    Raises:
        ShapeError: lengths or dtypes do not fit.
    """
    _require_stream(sequence_T, mask_T=mask_T)
    starts_T = mask_T.clone()
    starts_T[1:] &= ~mask_T[:-1] | (sequence_T[1:] != sequence_T[:-1])
    return torch.where(mask_T, starts_T.cumsum(0) - 1, -1)


def turn_rewards(rewards_U: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Token-level rewards of turns: each turn's reward on its last sampled token, 0 elsewhere.

    Args:
        rewards_U: one reward per turn, in the order of the stream (`turn_index`).
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.

    Returns:
        Rewards [T] in the dtype of `rewards_U`.

    Raises:
        ShapeError: lengths or dtypes do not fit, or the stream has a different number of turns.
    """
    require_floating(rewards_U=rewards_U)
    turn_T = turn_index(mask_T, sequence_T)
    num_turns = int(turn_T.max()) + 1 if turn_T.numel() else 0
    if rewards_U.shape != (num_turns,):
        raise ShapeError(f"rewards_U: the stream has {num_turns} turns, got shape {tuple(rewards_U.shape)}")
    index_T = mask_T.nonzero().squeeze(1)
    last_U = index_T[~continues(turn_T[index_T])]
    return rewards_U.new_zeros(mask_T.numel()).index_copy(0, last_U, rewards_U)


def turn_returns(rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each turn to its sequence's end, equal for all tokens of a turn.

    G_u = R_u + gamma · G_{u+1}, with R_u the sum of the rewards in turn u. The discount counts turns instead of tokens,
    so a long turn does not reduce the value of later ones.
    Source: the return of Sutton & Barto 2018, eq. 3.9, with a turn as one action.

    Args:
        rewards_T: token-level rewards, finite; 0 on tokens that were not sampled.
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        gamma: discount per turn, in [0, 1].

    Returns:
        Returns [T] in the dtype of `rewards_T`, 0 where no token was sampled.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a token that was not sampled has a reward.
        DataError: a reward is not finite.
        ConfigError: `gamma` is out of range.
    """
    require_between(0, 1, gamma=gamma)
    require_rewarded_stream(rewards_T, mask_T, sequence_T)
    index_T = mask_T.nonzero().squeeze(1)
    turn_T = turn_index(mask_T, sequence_T)[index_T]
    sequence_U = sequence_T[index_T][~continues(turn_T)]
    decay_U = gamma * continues(sequence_U).double()
    returns_U = reverse_scan(sequence_sum(rewards_T[index_T], turn_T), decay_U)
    return on_stream(returns_U[turn_T], index_T, rewards_T)


def reverse_scan(inputs_T: Tensor, decay_T: Tensor) -> Tensor:
    """Computes the linear recurrence y_t = x_t + d_t · y_{t+1} from the end, with y = 0 after the end.

    The input is cut into blocks of 64. All blocks are computed in parallel, each as if y were 0 after it, together with
    the products of their decays. The recurrence over the blocks' first values is the same problem, 64 times shorter.
    Each position then adds the first value of the next block, multiplied by the decays in between. This takes 64 vector
    steps per level and O(T) work, for one long sequence as well as for many short ones.

    Args:
        inputs_T: x, finite.
        decay_T: d, finite, same dtype; 0 at the end of each sequence.

    Returns:
        y [T].

    Raises:
        ShapeError: lengths do not fit.
    """
    require_same_length(inputs_T=inputs_T, decay_T=decay_T)
    num_tokens = inputs_T.numel()
    num_blocks = -(-num_tokens // _BLOCK)
    sums_KB, products_KB = _in_blocks(inputs_T, num_blocks), _in_blocks(decay_T, num_blocks)
    for k in range(_BLOCK - 2, -1, -1):
        sums_KB[k].addcmul_(products_KB[k], sums_KB[k + 1])
        products_KB[k] *= products_KB[k + 1]
    if num_blocks > 1:
        first_B = reverse_scan(sums_KB[0], products_KB[0])
        sums_KB[:, :-1].addcmul_(products_KB[:, :-1], first_B[1:])
    return sums_KB.T.reshape(-1)[:num_tokens]


def require_rewarded_stream(rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> None:
    """Raises ShapeError unless lengths and dtypes fit and all rewards are on sampled tokens. Rewards on other tokens
    would be ignored. Raises DataError if a reward is not finite."""
    require_floating(rewards_T=rewards_T)
    _require_stream(sequence_T, mask_T=mask_T, rewards_T=rewards_T)
    stray_T = (rewards_T != 0) & ~mask_T
    if bool(stray_T.any()):
        t = int(stray_T.nonzero()[0])
        raise ShapeError(
            f"rewards_T[{t}] is {float(rewards_T[t]):g}, but token {t} (of sequence {int(sequence_T[t])}) was not "
            "sampled; put a reward on the last sampled token before it"
        )
    require_finite(rewards_T=rewards_T)


def on_stream(values_T: Tensor, index_T: Tensor, like_T: Tensor) -> Tensor:
    """A stream with the shape and dtype of `like_T`: `values_T` at the positions `index_T`, 0 elsewhere."""
    return torch.zeros_like(like_T).index_copy_(0, index_T, values_T.to(like_T.dtype))


def continues(index_T: Tensor) -> Tensor:
    """bool [T]: whether the next entry is equal. It is false at the last entry of every run of equal values."""
    continues_T = torch.zeros_like(index_T, dtype=torch.bool)
    torch.eq(index_T[1:], index_T[:-1], out=continues_T[:-1])
    return continues_T


def _in_blocks(values_T: Tensor, num_blocks: int) -> Tensor:
    """A copy of the values as [K, B]: B blocks of K positions, the last one padded with 0."""
    blocks_KB = values_T.new_zeros(_BLOCK, num_blocks)
    num_full = values_T.numel() // _BLOCK
    blocks_KB[:, :num_full] = values_T[: num_full * _BLOCK].view(num_full, _BLOCK).T
    rest = values_T[num_full * _BLOCK :]
    blocks_KB[: rest.numel(), num_full:] = rest[:, None]
    return blocks_KB


def _require_stream(sequence_T: Tensor, *, mask_T: Tensor, **tensors: Tensor) -> None:
    require_same_length(sequence_T=sequence_T, mask_T=mask_T, **tensors)
    require_bool(mask_T=mask_T)
    require_ordered(sequence_T)
