"""Advantages: how much better a sample, or a token, is than a baseline.

Outcome estimators take one row per trajectory and return [N]; the caller copies each value to all tokens of that
trajectory. Token estimators return `TokenAdvantages` [T]. A group consists of the samples of one prompt, in any row
order. If an estimator compares the samples of a group, the advantage of a sample that is alone in its group is 0:
without a baseline, the reward's offset alone would change the policy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.algorithms.checks import (
    require_between,
    require_bool,
    require_finite,
    require_floating,
    require_int64,
    require_same_length,
)
from rl_core.algorithms.groups import group_mean, group_std, require_groups
from rl_core.algorithms.returns import continues, discounted_returns, on_stream, require_rewarded_stream, reverse_scan
from rl_core.errors import ConfigError, DataError

ESTIMATOR_COLUMNS = (
    "scores_N",
    "group_N",
    "lengths_N",
    "greedy_scores_N",
    "environment_scores_N",
    "rewards_T",
    "values_T",
    "old_logprobs_T",
    "ref_logprobs_T",
    "mask_T",
    "sequence_T",
    "trajectory_T",
)
"""Names of the positional parameters that an estimator may have. `environment_scores_N` are scores without the KL
penalty. In columns that end in `_T`, the steps of a trajectory stand one after another: to an estimator, an episode is
one sequence, even if each of its steps is a row of the batch. `sequence_T` and `trajectory_T` are the same: the index
of each token's trajectory, which is also the row of that trajectory in `…_N`."""
_STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


class TokenAdvantages(NamedTuple):
    """Result of a token-level estimator. Both tensors are 0 at tokens that were not sampled."""

    advantages_T: Tensor
    returns_T: Tensor
    """The values that the critic learns to predict. Not used in a run without a critic."""


def grpo_advantages(scores_N: Tensor, group_N: Tensor, *, grpo_norm_by_std: bool = True) -> Tensor:
    """Score minus the mean score of the prompt's samples, divided by the standard deviation of these scores.

    A_i = (s_i − mean) / (std + 1e-6), std with n − 1 in the denominator.
    Without `grpo_norm_by_std` (Dr. GRPO): A_i = s_i − mean.
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2; without the deviation: Liu et al. 2025, arXiv 2503.20783,
    section 3.2.

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        grpo_norm_by_std: whether to divide by the standard deviation.

    Returns:
        Advantages [N]; 0 for a group of one and for a group of equal scores.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
    """
    require_groups(scores_N, group_N)
    mean_N, _ = group_mean(scores_N, group_N)
    centred_N = scores_N.double() - mean_N
    if grpo_norm_by_std:
        centred_N = centred_N / (group_std(scores_N, group_N) + _STD_EPSILON)
    return centred_N.to(scores_N.dtype)


def rloo_advantages(scores_N: Tensor, group_N: Tensor) -> Tensor:
    """Score minus the mean score of the OTHER samples of the same prompt.

    A_i = n · (s_i − mean_j s_j) / (n − 1), which equals s_i − mean_{j≠i} s_j.
    Source: Ahmadian et al. 2024, arXiv 2402.14740 (RLOO estimator).

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.

    Returns:
        Advantages [N]; 0 for a group of one.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
    """
    require_groups(scores_N, group_N)
    mean_N, count_N = group_mean(scores_N, group_N)
    return ((scores_N.double() - mean_N) * count_N / (count_N - 1).clamp(min=1)).to(scores_N.dtype)


def reinforce_plus_plus_baseline_advantages(scores_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Score minus the mean score of the prompt's samples, standardised over all tokens of the batch.

    a_i = s_i − mean of its group; A_i = (a_i − m) / sqrt(v + 1e-8), with m and v the mean and variance of a over the
    batch's sampled tokens. So each trajectory is weighted by its number of tokens.
    Source: Hu et al. 2025, arXiv 2501.03262 (REINFORCE++ with baseline).

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        lengths_N: int64, number of sampled tokens of each trajectory.

    Returns:
        Advantages [N]; 0 for a group of one, which is also excluded from m and v.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
    """
    require_groups(scores_N, group_N)
    _require_lengths(scores_N, lengths_N)
    mean_N, count_N = group_mean(scores_N, group_N)
    has_baseline_N = count_N > 1
    weight_N = lengths_N.double() * has_baseline_N
    weight_N = weight_N / weight_N.sum().clamp(min=1)
    centred_N = scores_N.double() - mean_N
    centred_N -= (weight_N * centred_N).sum()
    variance = (weight_N * centred_N.square()).sum()
    whitened_N = centred_N * (variance + _VARIANCE_EPSILON).rsqrt()
    return torch.where(has_baseline_N, whitened_N, 0.0).to(scores_N.dtype)


def maxrl_advantages(scores_N: Tensor, group_N: Tensor, environment_scores_N: Tensor | None = None) -> Tensor:
    """Score minus the mean score of the prompt's samples, divided by that mean. The rarer successes are, the larger
    their weight becomes.

    A_i = (e_i − mean e) / mean e + p_i − mean p, with e the environment's score and p = s − e the (negative) KL penalty
    in the score. With scores 0 and 1, the first part estimates the gradient of an objective between the success rate
    and its logarithm. The penalty does not count as success, so it is a separate reward.
    Source: Tajwar et al. 2026, arXiv 2602.02710 (MaxRL), without a penalty.

    Args:
        scores_N: outcome reward of each trajectory, finite.
        group_N: int64, equal for samples of one prompt.
        environment_scores_N: the scores without the penalty, at least 0; meant to be 1 for success and 0 for failure.
            None: `scores_N`.

    Returns:
        Advantages [N]; 0 for a group of one. In a group without any success only p_i − mean p remains.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite, or a score without the penalty is negative, so the mean is not a success rate.
    """
    outcomes_N, penalty_N = _without_penalty(scores_N, environment_scores_N, group_N)
    if bool((outcomes_N < 0).any()):
        row = int((outcomes_N < 0).nonzero()[0])
        name = "scores_N" if environment_scores_N is None else "environment_scores_N"
        raise DataError(
            f"{name}[{row}] is {float(outcomes_N[row]):g}; MaxRL divides by the mean score and needs scores of "
            "at least 0: 1 for success, 0 for failure"
        )
    mean_N, _ = group_mean(outcomes_N, group_N)
    ratio_N = (outcomes_N.double() - mean_N) / torch.where(mean_N > 0, mean_N, 1.0)
    return (ratio_N + penalty_N).to(scores_N.dtype)


def remax_advantages(scores_N: Tensor, greedy_scores_N: Tensor) -> Tensor:
    """Score minus the score of the policy's greedy answer to the same prompt.

    A_i = s_i − s_greedy(prompt of i).
    Source: Li et al. 2023, arXiv 2310.10505 (ReMax).

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        greedy_scores_N: outcome reward of the greedy answer to each trajectory's prompt.

    Returns:
        Advantages [N]. A group of one is not a special case, because the greedy answer is the baseline.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
    """
    require_same_length(scores_N=scores_N, greedy_scores_N=greedy_scores_N)
    require_floating(scores_N=scores_N, greedy_scores_N=greedy_scores_N)
    require_finite(scores_N=scores_N, greedy_scores_N=greedy_scores_N)
    return scores_N - greedy_scores_N


def opo_advantages(scores_N: Tensor, group_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Score minus the length-weighted mean score of the prompt's samples.

    A_i = s_i − sum_j l_j · s_j / sum_j l_j over the samples j of the prompt. Of all baselines, this one has the least
    gradient variance if a sample's squared gradient norm is proportional to its length.
    Source: Hao et al. 2025, arXiv 2505.23585 (OPO).

    Args:
        scores_N: outcome reward of each trajectory, finite, any range.
        group_N: int64, equal for samples of one prompt.
        lengths_N: int64, number of sampled tokens of each trajectory.

    Returns:
        Advantages [N]; 0 for a group of one and for a group without any sampled token.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
    """
    require_groups(scores_N, group_N)
    _require_lengths(scores_N, lengths_N)
    weighted_N, count_N = group_mean(scores_N.double() * lengths_N, group_N)
    length_N, _ = group_mean(lengths_N, group_N)
    baseline_N = weighted_N / torch.where(length_N > 0, length_N, 1.0)
    compared_N = (count_N > 1) & (length_N > 0)
    return torch.where(compared_N, scores_N.double() - baseline_N, 0.0).to(scores_N.dtype)


def pass_at_k_advantages(
    scores_N: Tensor, group_N: Tensor, environment_scores_N: Tensor | None = None, *, k: int
) -> Tensor:
    """The advantage of each sample if k samples share one reward: 1 if any of the k samples succeeds, else 0.

    A sample's advantage is the mean advantage of the k-subsets of its group that contain it. With n samples, c
    successes and q = C(n−c, k) / C(n, k), the subsets' rewards have mean R = 1 − q and deviation sqrt(q (1 − q)).
    For a success: A = (1 − R) / deviation = sqrt(q / (1 − q)).
    For a failure: A = (1 − R − C(n−c−1, k−1) / C(n−1, k−1)) / deviation = −c / (n − c) · sqrt(q / (1 − q)).
    The KL penalty in the scores, p = s − e, is a separate reward and adds p_i − mean p.
    Source: Chen et al. 2025, arXiv 2508.10751 (Pass@k training, analytical derivation), without a penalty.

    Args:
        scores_N: outcome reward of each trajectory.
        group_N: int64, equal for samples of one prompt.
        environment_scores_N: the scores without the penalty; above 0 is a success. None: `scores_N`.
        k: subset size, at least 1.

    Returns:
        Advantages [N]. The part without the penalty is 0 if all k-subsets of the group have the same reward, and for a
        group smaller than k, which has no k-subset.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a score is not finite.
        ConfigError: `k` is not positive.
    """
    outcomes_N, penalty_N = _without_penalty(scores_N, environment_scores_N, group_N)
    success_N = outcomes_N > 0
    rate_N, count_N = group_mean(success_N, group_N)
    successes_N = (rate_N * count_N).round()
    fail_N = _fail_at_k(successes_N, count_N, k)
    informative_N = (fail_N > 0) & (fail_N < 1) & (count_N >= k)
    success_advantage_N = (fail_N / torch.where(informative_N, 1 - fail_N, 1.0)).sqrt()
    failure_advantage_N = -successes_N / (count_N - successes_N).clamp(min=1) * success_advantage_N
    advantages_N = torch.where(success_N, success_advantage_N, failure_advantage_N)
    return (torch.where(informative_N, advantages_N, 0.0) + penalty_N).to(scores_N.dtype)


def pass_at_k(num_correct_P: Tensor, num_samples_P: Tensor, *, k: int) -> Tensor:
    """Unbiased estimate of the probability that at least one of k samples of a prompt is correct.

    pass@k = 1 − C(n−c, k) / C(n, k) with c of n samples correct.
    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1.

    Args:
        num_correct_P: int64, c of each prompt.
        num_samples_P: int64, n of each prompt, at least k.
        k: number of samples, at least 1; one correct sample is enough.

    Returns:
        float64 [P] in [0, 1].

    Raises:
        ShapeError: lengths or dtypes do not fit.
        DataError: a prompt has fewer than k samples, or the number of correct ones is negative or above n.
        ConfigError: `k` is not positive.
    """
    require_same_length(num_correct_P=num_correct_P, num_samples_P=num_samples_P)
    require_int64(num_correct_P=num_correct_P, num_samples_P=num_samples_P)
    wrong_P = (num_samples_P < k) | (num_correct_P > num_samples_P) | (num_correct_P < 0)
    if bool(wrong_P.any()):
        row = int(wrong_P.nonzero()[0])
        raise DataError(
            f"prompt {row} has {int(num_correct_P[row])} correct of {int(num_samples_P[row])} samples; "
            f"pass@{k} needs at least {k} samples and 0 to n correct ones"
        )
    return 1 - _fail_at_k(num_correct_P.double(), num_samples_P, k)


def reinforce_plus_plus_advantages(
    rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, *, gamma: float = 1.0
) -> TokenAdvantages:
    """Discounted return to go, standardised over all sampled tokens of the batch.

    A_t = (G_t − mean G) / sqrt(var G + 1e-8), G_t = r_t + gamma · G_{t'}, t' the next sampled token. The KL penalty, if
    any, is part of r_t.
    Source: Hu et al. 2025, arXiv 2501.03262 (REINFORCE++).

    Args:
        rewards_T: token-level rewards, finite; 0 on tokens that were not sampled.
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        gamma: discount per sampled token, in [0, 1].

    Returns:
        TokenAdvantages [T] with the unstandardised G as returns. The baseline is the batch's mean, not the group's.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a token that was not sampled has a reward.
        DataError: a reward is not finite.
        ConfigError: `gamma` is out of range.
    """
    returns_T = discounted_returns(rewards_T, mask_T, sequence_T, gamma=gamma)
    return TokenAdvantages(whiten(returns_T, mask_T), returns_T)


@torch.no_grad()
def gae_advantages(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    whiten_advantages: bool = True,
) -> TokenAdvantages:
    """Generalized advantage estimation along the sampled tokens of each sequence.

    A_t = sum_k (gamma · lambd)^k · d_{t+k}, d_t = r_t + gamma · V_{t'} − V_t, with t' the next sampled token and V = 0
    after the last. Returns are A_t + V_t, with A_t before whitening.
    Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.

    Args:
        rewards_T: token-level rewards, finite; 0 on tokens that were not sampled.
        values_T: the critic's value of the state in which each token is chosen; read only at sampled tokens.
        mask_T: bool, the sampled tokens.
        sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
        gamma: discount per sampled token, in [0, 1].
        lambd: decay of later errors d, in [0, 1]; 1 gives the return minus the value, 0 the one-step error d_t.
        whiten_advantages: whether to standardise the advantages over the sampled tokens of the batch.

    Returns:
        TokenAdvantages [T] in the dtype of `rewards_T`, without gradient to the critic. The baseline is the critic, not
        the group.

    Raises:
        ShapeError: lengths or dtypes do not fit, or a token that was not sampled has a reward.
        DataError: a reward is not finite.
        ConfigError: `gamma` or `lambd` is out of range.
    """
    require_between(0, 1, gamma=gamma, lambd=lambd)
    require_same_length(rewards_T=rewards_T, values_T=values_T)
    require_floating(values_T=values_T)
    require_rewarded_stream(rewards_T, mask_T, sequence_T)
    index_T = mask_T.nonzero().squeeze(1)
    sampled_values_T = values_T[index_T].to(rewards_T.dtype)
    decay_T = gamma * continues(sequence_T[index_T]).to(rewards_T.dtype)
    errors_T = rewards_T[index_T] - sampled_values_T
    errors_T[:-1] += decay_T[:-1] * sampled_values_T[1:]
    advantages_T = reverse_scan(errors_T, lambd * decay_T)
    returns_T = on_stream(advantages_T + sampled_values_T, index_T, rewards_T)
    if whiten_advantages:
        advantages_T = _standardised(advantages_T)
    return TokenAdvantages(on_stream(advantages_T, index_T, rewards_T), returns_T)


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Values standardised over the tokens in the mask: mean 0, variance 1.

    y_t = (x_t − mean) / sqrt(var + 1e-8), with mean and variance (divided by n) over the tokens in the mask.

    Args:
        values_T: finite where the mask is true; not read elsewhere.
        mask_T: bool, the tokens that count.

    Returns:
        [T] in the dtype of `values_T`, 0 outside the mask; all 0 for an empty mask and for equal values.

    Raises:
        ShapeError: lengths or dtypes do not fit.
    """
    require_same_length(values_T=values_T, mask_T=mask_T)
    require_floating(values_T=values_T)
    require_bool(mask_T=mask_T)
    index_T = mask_T.nonzero().squeeze(1)
    return on_stream(_standardised(values_T[index_T]), index_T, values_T)


def _standardised(values: Tensor) -> Tensor:
    if not values.numel():
        return values
    centred = values - values.mean()
    # Subtract the mean twice. The first mean is rounded, and for equal values the division would amplify the remainder.
    centred -= centred.mean()
    return centred * (centred.square().mean() + _VARIANCE_EPSILON).rsqrt()


def _fail_at_k(successes: Tensor, counts: Tensor, k: int) -> Tensor:
    """C(n−c, k) / C(n, k), the share of k-subsets without a success; 0 where n < k."""
    if k < 1:
        raise ConfigError(f"k: {k} is not a positive number of samples")
    failures, share = counts - successes, torch.ones_like(successes)
    for j in range(k):
        share = share * (failures - j).clamp(min=0) / (counts - j).clamp(min=1)
    return share


def _without_penalty(scores_N: Tensor, environment_scores_N: Tensor | None, group_N: Tensor) -> tuple[Tensor, Tensor]:
    """The environment's scores [N], and the (negative) penalty minus the prompt's mean penalty, float64 [N]."""
    require_groups(scores_N, group_N)
    if environment_scores_N is None:
        return scores_N, torch.zeros_like(scores_N, dtype=torch.float64)
    require_groups(environment_scores_N, group_N)
    penalty_N = scores_N.double() - environment_scores_N
    return environment_scores_N, penalty_N - group_mean(penalty_N, group_N)[0]


def _require_lengths(scores_N: Tensor, lengths_N: Tensor) -> None:
    require_same_length(scores_N=scores_N, lengths_N=lengths_N)
    require_int64(lengths_N=lengths_N)
