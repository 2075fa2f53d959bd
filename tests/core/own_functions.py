"""Source text of the module `own_functions`: a user's losses and estimators, for tests of function checks."""

from __future__ import annotations

FUNCTIONS = """
import functools

from rl_core.algorithms import TokenLoss, clip_cov_loss, kl_cov_loss, prepared_by, takes_corrections
from rl_core.algorithms import maxrl_advantages, pass_at_k_advantages


def loss(logprobs_T, old_logprobs_T, advantages_T, mask_T, *, eps_clip_low=0.2, sharpness=2.0):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_of_tokens(logprobs_T, mask_T):
    return TokenLoss(-logprobs_T, {})


def loss_that_corrects(logprobs_T, rollout_logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T, {})


def best_tokens(advantages_T, mask_T, *, share=0.5):
    return {"x_best": advantages_T >= advantages_T[mask_T].quantile(1 - share)}


@prepared_by(best_tokens)
def loss_of_best_tokens(logprobs_T, advantages_T, mask_T, x_best_T):
    return TokenLoss(-logprobs_T * advantages_T * x_best_T, {})


@takes_corrections("scales")
@prepared_by(best_tokens)
def declared_loss_of_best_tokens(logprobs_T, advantages_T, mask_T, x_best_T):
    return TokenLoss(-logprobs_T * advantages_T * x_best_T, {})


@takes_corrections("refuses")
def loss_that_refuses(logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_with_a_penalty(logprobs_T, advantages_T, mask_T):
    return TokenLoss(-advantages_T * logprobs_T + logprobs_T.square(), {})


def sure_tokens(old_entropies_T, mask_T):
    return {"x_sure": old_entropies_T < 1.0}


@prepared_by(sure_tokens)
def loss_of_sure_tokens(logprobs_T, advantages_T, mask_T, x_sure_T):
    return TokenLoss(-logprobs_T * advantages_T * x_sure_T, {})


@functools.wraps(kl_cov_loss)
def watched_kl_cov(*columns, **settings):
    return kl_cov_loss(*columns, **settings)


@functools.wraps(maxrl_advantages)
def watched_maxrl(*columns, **settings):
    return maxrl_advantages(*columns, **settings)


pass_at_4 = functools.partial(pass_at_k_advantages, k=4)


def strict_loss(logprobs_T, advantages_T, *, eps_clip_low):
    return TokenLoss(-advantages_T * logprobs_T, {})


def loss_with_duty(logprobs_T, mask_T, *, duty):
    return TokenLoss(-logprobs_T, {})


def broken_loss(logprobs_T, mask_T):
    raise RuntimeError("not today")


def advantages(scores_N, group_N, *, gamma=1.0, grpo_norm_by_std=True):
    return scores_N
"""
