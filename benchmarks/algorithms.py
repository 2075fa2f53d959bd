"""Times of losses, estimators and reductions on one mini-batch of 4,096 sequences and 4 million tokens.

A loss is timed forward and backward, with its metrics. An estimator that returns one value per sequence is timed
together with spreading these values over the tokens. All times are compared with PPO clip's time, and this time with
that of a minimal version of its formula in torch. The functions are timed in interleaved rounds and the best time of
each counts, so that other load on the machine affects all of them alike. The script checks bounds on most ratios, and
on the seconds that the layout of sequences takes.

Run: python benchmarks/algorithms.py [tokens, default 4,000,000]
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_core import algorithms
from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.layout import plan_micro_batches

NUM_SEQUENCES, SAMPLES_PER_PROMPT, ROUNDS = 4096, 16, 5
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("ppo_clip_loss", {}),
    "dual_clip": ("dual_clip_loss", {}),
    "cispo": ("cispo_loss", {}),
    "sapo": ("sapo_loss", {}),
    "importance_sampling": ("importance_sampling_loss", {}),
    "reinforce": ("reinforce_loss", {}),
    "cross_entropy": ("cross_entropy_loss", {}),
    "rollout_is": ("rollout_is_loss", {}),
    "dppo, binary_tv": ("dppo_loss", {"dppo_type": "binary_tv"}),
    "dppo, binary_kl": ("dppo_loss", {"dppo_type": "binary_kl"}),
    "decoupled_ppo": ("decoupled_ppo_loss", {}),
    "gspo": ("gspo_loss", {}),
    "gspo_token": ("gspo_token_loss", {}),
    "gmpo": ("gmpo_loss", {}),
    "clip_cov": ("clip_cov_loss", {}),
    "kl_cov": ("kl_cov_loss", {}),
    "top_entropy": ("top_entropy_loss", {}),
    "value_clip": ("value_clip_loss", {}),
}
PREPARES = ("clip_cov_columns", "kl_cov_columns", "top_entropy_columns")
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo_advantages": {},
    "rloo_advantages": {},
    "reinforce_plus_plus_baseline_advantages": {},
    "maxrl_advantages": {},
    "remax_advantages": {},
    "opo_advantages": {},
    "pass_at_k_advantages": {"k": 4},
    "reinforce_plus_plus_advantages": {"gamma": 0.99},
    "gae_advantages": {"gamma": 0.99, "lambd": 0.95},
}


def mini_batch(num_tokens: int) -> dict[str, Tensor]:
    """Columns by parameter name: log-normal lengths, one outcome reward per sequence, four in five tokens trained."""
    generator = torch.Generator().manual_seed(0)
    shares_N = torch.randn(NUM_SEQUENCES, generator=generator).exp()
    lengths_N = (shares_N / shares_N.sum() * (num_tokens - NUM_SEQUENCES)).long() + 1
    lengths_N[-1] += num_tokens - lengths_N.sum()
    sequence_T = torch.arange(NUM_SEQUENCES).repeat_interleave(lengths_N)
    mask_T = torch.rand(num_tokens, generator=generator) < 0.8
    ends_N = lengths_N.cumsum(0) - 1
    mask_T[ends_N] = True

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=generator)

    scores_N = torch.randint(0, 2, (NUM_SEQUENCES,), generator=generator).float()
    old_logprobs_T = -torch.rand(num_tokens, generator=generator) * 2 - 0.01
    return {
        "old_logprobs_T": old_logprobs_T,
        "rollout_logprobs_T": old_logprobs_T + noise(0.02),
        "logprobs_T": old_logprobs_T + noise(0.2),
        "advantages_T": torch.randn(NUM_SEQUENCES, generator=generator)[sequence_T],
        "old_entropies_T": noise(1.0).abs(),
        "values_T": noise(1.0),
        "returns_T": noise(1.0),
        "predicted_values_T": noise(1.0),
        "rewards_T": torch.zeros(num_tokens).index_copy_(0, ends_N, scores_N),
        "mask_T": mask_T,
        "sequence_T": sequence_T,
        "loss_weights_T": mask_T / mask_T.sum(),
        "scores_N": scores_N,
        "greedy_scores_N": scores_N.flip(0),
        "group_N": torch.randperm(NUM_SEQUENCES, generator=generator) // SAMPLES_PER_PROMPT,
        "lengths_N": lengths_N,
    }


def bound(function: Callable[..., Any], columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns whose names are parameters of the function."""
    return {name: columns[name] for name in inspect.signature(function).parameters if name in columns}


def loss_run(name: str, settings: dict[str, Any], columns: dict[str, Tensor]) -> Callable[[], None]:
    """Returns a call that computes one loss forward and backward."""
    function = getattr(algorithms, name)
    arguments = bound(function, columns)
    current = "predicted_values_T" if "predicted_values_T" in arguments else "logprobs_T"

    def run() -> None:
        leaf_T = columns[current].detach().requires_grad_()
        loss_T, _ = function(**{**arguments, current: leaf_T}, **settings)
        (columns["loss_weights_T"] * loss_T).sum().backward()

    return run


def minimal_ppo_clip(columns: dict[str, Tensor]) -> None:
    """PPO clip as in the paper's formula, without masks, guards or metrics."""
    logprobs_T = columns["logprobs_T"].detach().requires_grad_()
    ratio_T = torch.exp(logprobs_T - columns["old_logprobs_T"])
    advantages_T = columns["advantages_T"]
    loss_T = -torch.min(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    (columns["loss_weights_T"] * loss_T).sum().backward()


def estimator_run(name: str, settings: dict[str, Any], columns: dict[str, Tensor]) -> Callable[[], None]:
    """Returns a call that computes one estimator. If the result has one value per sequence, the call spreads the values
    over the tokens."""
    function = getattr(algorithms, name)
    arguments = bound(function, columns)

    def run() -> None:
        result = function(**arguments, **settings)
        if isinstance(result, Tensor):
            torch.where(columns["mask_T"], result.float().index_select(0, columns["sequence_T"]), 0.0)

    return run


def prepare_run(name: str, columns: dict[str, Tensor]) -> Callable[[], Any]:
    """Returns a call of a loss's `prepare` function, which the controller runs once per mini-batch."""
    function = getattr(algorithms, name)
    return partial(function, **bound(function, columns))


def reduction_run(function: Callable[..., Tensor], columns: dict[str, Tensor]) -> Callable[[], Any]:
    """Returns a call that computes one reduction's loss weights."""
    settings = {"max_seq_len": 4096} if "max_seq_len" in inspect.signature(function).parameters else {}
    return partial(function, **bound(function, {**columns, "loss_mask_T": columns["mask_T"]}), **settings)


def best_times(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds per name: the best of ROUNDS interleaved rounds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def layout_seconds() -> float:
    """Seconds to plan 100,000 sequences on 512 data-parallel ranks (more cases: benchmarks/layout.py)."""
    lengths_N = np.clip(np.random.default_rng(0).lognormal(np.log(2000), 1.0, 100_000), 16, 32_768).astype(np.int64)
    start = time.perf_counter()
    plan_micro_batches(lengths_N, num_data_ranks=512, max_tokens=65_536, sequence_multiple=32)
    return time.perf_counter() - start


def main() -> int:
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4_000_000
    columns = mini_batch(num_tokens)
    runs: dict[str, Callable[[], Any]] = {"PPO clip, minimal": partial(minimal_ppo_clip, columns)}
    for name in PREPARES:
        runs[name] = prepare_run(name, columns)
        columns.update({f"{made}_T": values_T for made, values_T in runs[name]().items()})
    runs |= {label: loss_run(name, settings, columns) for label, (name, settings) in LOSSES.items()}
    runs |= {name: estimator_run(name, settings, columns) for name, settings in ESTIMATORS.items()}
    runs |= {name: reduction_run(function, columns) for name, function in REDUCTIONS.items()}
    seconds = best_times(runs)

    reference = seconds["ppo_clip"]
    limits = {"PPO clip, minimal": None, "gae_advantages": 5.0, **dict.fromkeys(PREPARES)}
    failures = 0
    print(
        f"{NUM_SEQUENCES:,} sequences, {num_tokens:,} tokens, {torch.get_num_threads()} thread(s), best of {ROUNDS}\n"
    )
    print(f"{'':42} {'ms':>8} {'/ PPO clip':>10} {'allowed':>8}")
    for name, elapsed in seconds.items():
        limit, ratio = limits.get(name, 3.0), elapsed / reference
        failures += limit is not None and ratio > limit
        print(f"{name:42} {elapsed * 1e3:8.1f} {ratio:10.2f} {'' if limit is None else f'{limit:8.1f}'}")
    over_minimal, layout = reference / seconds["PPO clip, minimal"], layout_seconds()
    print(f"\nPPO clip over the minimal version: {over_minimal:.2f}, allowed 1.5")
    print(f"layout of 100,000 sequences on 512 ranks: {layout:.2f} s, allowed 2 s")
    return 1 if failures or over_minimal > 1.5 or layout > 2.0 else 0


if __name__ == "__main__":
    sys.exit(main())
