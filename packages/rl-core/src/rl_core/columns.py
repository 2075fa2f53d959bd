"""The columns of a batch, each declared once. This module imports only the standard library, because `algorithms`
imports it, and `algorithms` must work with torch as its only dependency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One column of a batch."""

    axes: str
    """One letter per axis. The first letter is `T` (tokens), `N` (sequences) or `E` (the entries of one token after
    another, see `counted_by`); `L` stands for layers, `K` for the experts of a token."""
    dtypes: tuple[str, ...]
    """Accepted torch dtypes. Floats and bools are stored in the first dtype, integers in the first dtype that can hold
    all values."""
    meaning: str
    counted_by: str | None = None
    """For a column with the axis `E`: the per-token column that says how many of its entries belong to each token."""


_FLOAT = ("float32", "float64")

FIELDS: dict[str, Field] = {
    "tokens": Field("T", ("int64",), "prompt, sampled and observation tokens"),
    "sampled": Field("T", ("bool",), "the policy sampled this token"),
    "loss_mask": Field("T", ("bool",), "trained on; a subset of `sampled`"),
    "rollout_logprobs": Field("T", _FLOAT, "log-prob in the engine's distribution; 0 if not sampled, NaN if unknown"),
    "old_logprobs": Field("T", _FLOAT, "log-prob under the policy at the start of the update"),
    "ref_logprobs": Field("T", _FLOAT, "log-prob under the reference model"),
    "values": Field("T", _FLOAT, "the critic's value of the state in which token t is chosen"),
    "old_entropies": Field("T", _FLOAT, "entropy of the policy's distribution of token t at the start of the update"),
    "rewards": Field("T", _FLOAT, "token-level reward; an outcome reward sits on the last sampled token"),
    "environment_rewards": Field("T", _FLOAT, "`rewards` without the KL penalty; present if there is a penalty"),
    "advantages": Field("T", _FLOAT, "advantage of token t, computed by the controller before the batch is split"),
    "correction_weights": Field("T", _FLOAT, "factor by which an off-policy correction scales the token's policy loss"),
    "returns": Field("T", _FLOAT, "the critic's target"),
    "loss_weights": Field("T", _FLOAT, "weight of each token's loss in the sum that is minimised"),
    "routed_experts": Field("TLK", ("uint8", "int16"), "experts chosen when token t was the input, per layer"),
    "routed": Field("T", ("bool",), "whether `routed_experts` is known at t"),
    "route_layers": Field("NL", ("bool",), "which layers `routed_experts` has, on a rank that reads only some"),
    "kept_counts": Field("T", ("int32",), "number of ids among which token t was sampled; 0: all, or not sampled"),
    "kept_ids": Field("E", ("int32",), "these ids, which top-p, top-k and min-p kept", counted_by="kept_counts"),
    "policy_version": Field("T", ("int32",), "version of the weights that sampled the token; -1 if it was not sampled"),
    "group_id": Field("N", ("int64",), "equal for the samples of one prompt"),
    "greedy_score": Field("N", _FLOAT, "reward of the policy's greedy answer to the prompt, if the estimator reads it"),
    "trajectory_id": Field("N", ("int64",), "equal for the steps of one trajectory"),
    "step_index": Field("N", ("int64",), "position of the sequence among its trajectory's steps"),
    "is_last_step": Field("N", ("bool",), "true for exactly one sequence of each trajectory, its last step"),
}
PREPARED = Field("T", ("float32", "float64", "bool", "int64"), "computed by a loss's `prepare`")
"""Describes every column that a loss's `prepare` computes. The names of these columns begin with `x_`."""
ROUTE_COLUMNS = ("routed_experts", "routed")
"""Columns that record each token's experts, and whether the experts are known."""
KEPT_COLUMNS = ("kept_counts", "kept_ids")
"""Columns that record the ids among which each token was sampled, if sampling was truncated."""
INPUT_COLUMNS = ("tokens", *ROUTE_COLUMNS, "route_layers", *KEPT_COLUMNS)
"""Columns that a worker reads to compute scores."""
STEP_COLUMNS = ("trajectory_id", "step_index", "is_last_step")
"""Columns that say which sequences are the steps of one trajectory."""
