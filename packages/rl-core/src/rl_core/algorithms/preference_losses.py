"""Pairwise losses: of two responses to a prompt, the one with the higher reward is preferred.

A pair's loss is a function of one number, the margin Δ between its two responses. The gradient of the loss is the slope
of this function times the gradient of Δ, and Δ is a sum over tokens. So the controller computes the slopes before the
batch is split, from scores at the start of the update, and workers only sum. The two responses of a pair may therefore
be on different ranks or in different micro-batches. The gradient is exact only for one optimizer step per batch, so
`pairwise` requires this.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_core.algorithms.checks import require_between, require_finite, require_int64, require_ordered
from rl_core.algorithms.groups import group_sum, sequence_sum
from rl_core.algorithms.token_loss import (
    TokenLoss,
    masked,
    pairwise,
    prepared_by,
    require_tokens,
    takes_corrections,
)
from rl_core.errors import ConfigError, ShapeError


def dpo_columns(
    old_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    rewards_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    group_T: Tensor,
    *,
    dpo_type: Literal["sigmoid", "ipo"] = "sigmoid",
    dpo_beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> dict[str, Tensor]:
    """The `prepare` function of `dpo_loss`. Returns for each token the slope of its pair's loss, the token's share of
    the loss, and the inputs of the metrics."""
    if dpo_type not in ("sigmoid", "ipo"):
        raise ConfigError(f"dpo_type: got {dpo_type!r}; expected sigmoid or ipo")
    require_between(0.0, math.inf, dpo_beta=dpo_beta)
    require_between(0.0, 0.5, label_smoothing=label_smoothing)
    if dpo_beta == 0:
        raise ConfigError("dpo_beta: got 0; expected above 0")
    pairs = _Pairs.of(rewards_T, mask_T, sequence_T, group_T)
    scores_S = sequence_sum(masked((old_logprobs_T - ref_logprobs_T).double(), mask_T), pairs.sequence_T)
    unit_S = torch.ones_like(scores_S)
    if dpo_type == "ipo":
        unit_S = sequence_sum(mask_T, pairs.sequence_T).clamp(min=1).double().reciprocal()
    margin_P = pairs.margins(scores_S * unit_S)
    if dpo_type == "ipo":
        loss_P = (margin_P - 1.0 / (2.0 * dpo_beta)).square()
        slope_P = 2.0 * (margin_P - 1.0 / (2.0 * dpo_beta))
    else:
        scaled_P = dpo_beta * margin_P
        loss_P = -(1.0 - label_smoothing) * logsigmoid(scaled_P) - label_smoothing * logsigmoid(-scaled_P)
        slope_P = dpo_beta * (label_smoothing * scaled_P.sigmoid() - (1.0 - label_smoothing) * (-scaled_P).sigmoid())
    rewards_P = (pairs.preferred(dpo_beta * scores_S), pairs.other(dpo_beta * scores_S))
    return pairs.columns(loss_P, slope_P, unit_S, rewards_P, old_logprobs_T.dtype)


@pairwise
@takes_corrections("refuses")
@prepared_by(dpo_columns)
def dpo_loss(
    logprobs_T: Tensor,
    mask_T: Tensor,
    x_pair_slope_T: Tensor,
    x_pair_loss_T: Tensor,
    x_pair_preferred_T: Tensor,
    x_pair_other_T: Tensor,
    x_pair_share_T: Tensor,
) -> TokenLoss:
    """Direct preference optimisation on stored or sampled pairs.

    Δ = s(preferred) − s(other), s = sum over a response's trained tokens of logprob − ref_logprob.
    sigmoid: −(1 − ε) log σ(βΔ) − ε log σ(−βΔ). Source: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; with label
    smoothing ε: Mitchell 2023, "A note on DPO with noisy preferences" (conservative DPO).
    ipo: (Δ − 1/(2β))², with s the mean over the tokens. Source: Azar et al. 2023, arXiv 2310.12036, eq. 17; the
    authors' and TRL's code also use the mean.
    A prompt with equal rewards, or with only one trained response, has no loss, but still counts as a prompt.

    Args:
        logprobs_T: log-probs under the current policy; carries gradient.
        mask_T: bool, the trained tokens.
        x_pair_…_T: computed by `dpo_columns` from log-probs at the start of the update and those of the reference.
        dpo_type: 'sigmoid' or 'ipo' (a setting of `dpo_columns`, like the next two).
        dpo_beta: > 0, per nat; the smaller it is, the further the policy may move from the reference.
        label_smoothing: in [0, 0.5], the probability that a preference is wrong; only for 'sigmoid'.

    Returns:
        Loss [T], whose sum over a prompt's tokens is the pair's loss; metrics as means over prompts: pair_accuracy,
        pair_margin, pair_preferred and pair_other (the implicit rewards β·s; for 'ipo', s is the sum here too).
    """
    require_tokens(mask_T, logprobs_T=logprobs_T, x_pair_slope_T=x_pair_slope_T)
    return _pair_loss(
        logprobs_T, mask_T, x_pair_slope_T, x_pair_loss_T, x_pair_preferred_T, x_pair_other_T, x_pair_share_T
    )


def reward_model_columns(
    values_T: Tensor,
    rewards_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    group_T: Tensor,
) -> dict[str, Tensor]:
    """The `prepare` function of `reward_model_loss`. Returns the same columns as `dpo_columns`."""
    pairs = _Pairs.of(rewards_T, mask_T, sequence_T, group_T)
    last_T = pairs.last_trained()
    scores_S = sequence_sum(masked(values_T.double(), last_T), pairs.sequence_T)
    margin_P = pairs.margins(scores_S)
    made = pairs.columns(
        -logsigmoid(margin_P),
        -(-margin_P).sigmoid(),
        torch.ones_like(scores_S),
        (pairs.preferred(scores_S), pairs.other(scores_S)),
        values_T.dtype,
    )
    return made | {"x_pair_slope": masked(made["x_pair_slope"], last_T)}


@pairwise
@takes_corrections("refuses")
@prepared_by(reward_model_columns)
def reward_model_loss(
    predicted_values_T: Tensor,
    mask_T: Tensor,
    x_pair_slope_T: Tensor,
    x_pair_loss_T: Tensor,
    x_pair_preferred_T: Tensor,
    x_pair_other_T: Tensor,
    x_pair_share_T: Tensor,
) -> TokenLoss:
    """Trains a reward model on pairs: −log σ(r(preferred) − r(other)).

    r is the value predicted at a response's last trained token, from all tokens before that token.
    Source: Bradley and Terry 1952; Ouyang et al. 2022 (InstructGPT), arXiv 2203.02155, eq. 1, for two responses.

    Args:
        predicted_values_T: values of the trained model, which has a value head; carries gradient.
        mask_T: bool, the trained tokens.
        x_pair_…_T: computed by `reward_model_columns` from values at the start of the update.

    Returns:
        Loss [T] and metrics as in `dpo_loss`; pair_preferred and pair_other are the two rewards.
    """
    require_tokens(mask_T, predicted_values_T=predicted_values_T, x_pair_slope_T=x_pair_slope_T)
    return _pair_loss(
        predicted_values_T, mask_T, x_pair_slope_T, x_pair_loss_T, x_pair_preferred_T, x_pair_other_T, x_pair_share_T
    )


def _pair_loss(
    scores_T: Tensor,
    mask_T: Tensor,
    slope_T: Tensor,
    loss_T: Tensor,
    preferred_T: Tensor,
    other_T: Tensor,
    share_T: Tensor,
) -> TokenLoss:
    """Returns a loss that has the value of the pair's loss and the gradient slope · ∇score."""
    scores_T = masked(scores_T, mask_T)
    margin_T = preferred_T - other_T
    metrics = {
        "pair_accuracy": (margin_T > 0) * share_T,
        "pair_margin": margin_T * share_T,
        "pair_preferred": preferred_T * share_T,
        "pair_other": other_T * share_T,
    }
    return TokenLoss(slope_T * (scores_T - scores_T.detach()) + loss_T, metrics)


class _Pairs(NamedTuple):
    """The one or two sequences of each prompt: S sequences of P prompts."""

    pair_S: Tensor
    """int64, the prompt of each sequence, from 0."""
    sign_S: Tensor
    """1 for the preferred sequence, −1 for the other, 0 where there is no preference."""
    sequence_T: Tensor
    """int64 [T], the sequence of each token, from 0 to S − 1."""
    mask_T: Tensor

    @classmethod
    def of(cls, rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, group_T: Tensor) -> _Pairs:
        """Finds the pairs of a mini-batch. Numbers that `sequence_T` leaves out are sequences without tokens and do not
        count. Raises ShapeError for a prompt with more than two sequences, or if `sequence_T` or `group_T` does not
        fit; raises DataError if the reward of a token in the mask is not finite."""
        require_tokens(mask_T, rewards_T=rewards_T, sequence_T=sequence_T, group_T=group_T)
        require_ordered(sequence_T)
        require_int64(group_T=group_T)
        rewards_T = masked(rewards_T, mask_T)
        require_finite(rewards_T=rewards_T)
        starts_T = torch.ones_like(mask_T)
        starts_T[1:] = sequence_T[1:] != sequence_T[:-1]
        sequence_T = starts_T.cumsum(0) - 1
        rewards_S = sequence_sum(rewards_T, sequence_T)
        pair_S = group_T[starts_T].unique(return_inverse=True)[1]
        counts_P = pair_S.bincount()
        if bool((counts_P > 2).any()):
            raise ShapeError(
                f"a prompt has {int(counts_P.max())} responses, but a pairwise loss compares two: set "
                "generator.n_samples_per_prompt=2"
            )
        total_S = group_sum(rewards_S, pair_S)[pair_S]
        trained_P = group_sum(sequence_sum(mask_T, sequence_T) > 0, pair_S)
        sign_S = torch.where(trained_P[pair_S] == 2, torch.sign(2.0 * rewards_S - total_S), 0.0)
        return cls(pair_S, sign_S, sequence_T, mask_T)

    def margins(self, scores_S: Tensor) -> Tensor:
        """[P], score of the preferred sequence minus score of the other sequence; 0 without a preference."""
        return group_sum(self.sign_S * scores_S, self.pair_S)

    def preferred(self, scores_S: Tensor) -> Tensor:
        """[P], score of the preferred sequence."""
        return group_sum((self.sign_S > 0) * scores_S, self.pair_S)

    def other(self, scores_S: Tensor) -> Tensor:
        """[P], score of the other sequence."""
        return group_sum((self.sign_S < 0) * scores_S, self.pair_S)

    def last_trained(self) -> Tensor:
        """bool [T], each sequence's last trained token."""
        index_T = torch.where(self.mask_T, torch.arange(self.mask_T.numel(), device=self.mask_T.device), -1)
        last_S = index_T.new_full((self.pair_S.numel(),), -1).scatter_reduce(0, self.sequence_T, index_T, "amax")
        last_T = torch.zeros_like(self.mask_T)
        last_T[last_S[last_S >= 0]] = True
        return last_T

    def columns(
        self, loss_P: Tensor, slope_P: Tensor, unit_S: Tensor, rewards_P: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The columns of the loss: each token's slope, and its share of the pair's loss and metrics.

        Metrics are later averaged over trained tokens. To make this average a mean over pairs, a pair's metric is
        multiplied by (trained tokens) / (pairs · trained tokens of the pair).
        """
        tokens_P = group_sum(sequence_sum(self.mask_T, self.sequence_T).double(), self.pair_S)
        has_preference_P = group_sum(self.sign_S.abs(), self.pair_S) > 0
        share_P = tokens_P.sum() / (tokens_P.clamp(min=1) * tokens_P.numel())
        slope_S = slope_P[self.pair_S] * self.sign_S * unit_S
        per_pair = {
            "x_pair_loss": torch.where(has_preference_P, loss_P, 0.0) / tokens_P.clamp(min=1),
            "x_pair_preferred": rewards_P[0],
            "x_pair_other": rewards_P[1],
            "x_pair_share": share_P,
        }
        made_S = {name: values_P[self.pair_S] for name, values_P in per_pair.items()} | {"x_pair_slope": slope_S}
        return {name: masked(values_S[self.sequence_T].to(dtype), self.mask_T) for name, values_S in made_S.items()}
