"""Prefix merging: consecutive steps of a trajectory become one sequence if each step's prompt begins with all tokens of
the step before it.

Step k+1 of an agent usually begins with the whole text of step k, and training on both would compute that text twice.
The model is causal: its output at a token depends only on the tokens before it. So one pass over the last step's text
gives the outputs of all steps. Each token's columns are taken from the first step that contains the token; if the token
was sampled, that step sampled it. Routed experts are taken from the last step, whose input contains every token except
the step's last token. So routes of a later turn replace routes of earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_core.errors import DataError, ShapeError
from rl_core.layout.balancing import IntArray
from rl_core.layout.slices import index_runs
from rl_core.trajectory_rows import why_incomplete


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixMerge:
    """Indices that gather M merged sequences with U tokens in all from N steps with T tokens in all."""

    offsets: IntArray
    """[M+1] offsets of the merged stream."""
    token_index: IntArray
    """[U] stream position of each merged token in the first step that contains it. Gathers columns about a token or its
    prediction."""
    input_index: IntArray
    """[U] stream position of each merged token in the last step of its merged sequence. Gathers columns about a token
    as an input (routed experts)."""
    last_step: IntArray
    """[M] row of the last step of each merged sequence, ascending."""
    num_tokens_before: int
    """T, tokens before merging."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens after merging, U."""
        return int(self.offsets[-1])

    @property
    def tokens_saved(self) -> float:
        """Fraction of the tokens that need not be computed, from 0 (nothing merged) to 1."""
        return 1.0 - self.num_tokens / self.num_tokens_before


def merge_prefixes(
    offsets: npt.ArrayLike,
    tokens_T: npt.ArrayLike,
    sampled_T: npt.ArrayLike,
    *,
    trajectory_id_N: npt.ArrayLike,
    step_index_N: npt.ArrayLike,
    is_last_step_N: npt.ArrayLike,
) -> PrefixMerge:
    """Determines which steps merge. A step is merged with the previous one if its prompt starts with all tokens of the
    previous step.

    The prompt is everything before the first sampled token. A step that is not merged starts a new sequence. Rows may
    be in any order. Merged sequences are ordered by the row of their last step, so if nothing is merged, the order does
    not change.

    Raises:
        DataError: a trajectory is incomplete; see `require_complete_trajectories`.
        ShapeError: a column's length does not fit `offsets`.
    """
    offsets, tokens_T, sampled_T = np.asarray(offsets, np.int64), np.asarray(tokens_T), np.asarray(sampled_T, bool)
    if len(tokens_T) != offsets[-1] or len(sampled_T) != offsets[-1]:
        raise ShapeError(
            f"the stream has {offsets[-1]} tokens, but tokens_T has {len(tokens_T)} entries and sampled_T "
            f"{len(sampled_T)}"
        )
    order = require_complete_trajectories(trajectory_id_N, step_index_N, is_last_step_N)
    if len(order) != len(offsets) - 1:
        raise ShapeError(f"the stream has {len(offsets) - 1} sequences, but trajectory_id_N has {len(order)} entries")
    trajectory_id_N = np.asarray(trajectory_id_N)
    chains: list[list[int]] = []
    for row in order.tolist():
        before = chains[-1][-1] if chains else row
        joins = before != row and trajectory_id_N[before] == trajectory_id_N[row]
        if joins and _continues(tokens_T, sampled_T, offsets[before : before + 2], offsets[row : row + 2]):
            chains[-1].append(row)
        else:
            chains.append([row])
    return _merge(sorted(chains, key=lambda chain: chain[-1]), offsets)


def require_complete_trajectories(
    trajectory_id_N: npt.ArrayLike, step_index_N: npt.ArrayLike, is_last_step_N: npt.ArrayLike
) -> IntArray:
    """Returns the indices of the rows, sorted by trajectory and then by step.

    Raises:
        DataError: a trajectory does not have the steps 0, 1, … once each, or `is_last_step_N` is not true for exactly
            its final step. The message names the row.
        ShapeError: the columns differ in length.
    """
    trajectory_id_N, step_index_N = np.asarray(trajectory_id_N, np.int64), np.asarray(step_index_N, np.int64)
    is_last_step_N = np.asarray(is_last_step_N, bool)
    if not trajectory_id_N.shape == step_index_N.shape == is_last_step_N.shape:
        shapes = f"{trajectory_id_N.shape}, {step_index_N.shape}, {is_last_step_N.shape}"
        raise ShapeError(f"trajectory_id_N, step_index_N, is_last_step_N: expected equal lengths, got {shapes}")
    if reason := why_incomplete(trajectory_id_N.tolist(), is_last_step_N.tolist(), step_index_N.tolist()):
        raise DataError(reason)
    return np.lexsort((step_index_N, trajectory_id_N))


def _continues(
    tokens_T: npt.NDArray[np.generic], sampled_T: npt.NDArray[np.bool_], before: IntArray, after: IntArray
) -> bool:
    """Whether the prompt of `after` (start, end) begins with the tokens of `before`."""
    length = before[1] - before[0]
    if after[1] - after[0] < length or sampled_T[after[0] : after[0] + length].any():
        return False
    return bool((tokens_T[before[0] : before[1]] == tokens_T[after[0] : after[0] + length]).all())


def _merge(chains: list[list[int]], offsets: IntArray) -> PrefixMerge:
    lengths = np.diff(offsets)
    rows = np.array([row for chain in chains for row in chain], np.int64)
    ends = np.cumsum([len(chain) for chain in chains])
    last_step = rows[ends - 1]
    # A step adds the tokens that follow the previous step's tokens; the first step of a chain adds all its tokens.
    before = np.concatenate([[0], lengths[rows[:-1]]])
    before[ends[:-1]] = 0
    return PrefixMerge(
        offsets=np.concatenate([[0], np.cumsum(lengths[last_step])]),
        token_index=index_runs(offsets[rows] + before, lengths[rows] - before),
        input_index=index_runs(offsets[last_step], lengths[last_step]),
        last_step=last_step,
        num_tokens_before=int(offsets[-1]),
    )
