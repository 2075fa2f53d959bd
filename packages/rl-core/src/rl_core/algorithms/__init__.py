"""Advantages, losses, KL, corrections, reductions and selection as pure functions of tensors. This package depends only
on torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.algorithms.advantages import (
        TokenAdvantages,
        gae_advantages,
        grpo_advantages,
        maxrl_advantages,
        opo_advantages,
        pass_at_k,
        pass_at_k_advantages,
        reinforce_plus_plus_advantages,
        reinforce_plus_plus_baseline_advantages,
        remax_advantages,
        rloo_advantages,
        whiten,
    )
    from rl_core.algorithms.best_of_k import (
        best_minus_second_advantages,
    )
    from rl_core.algorithms.corrections import (
        geometric_log_ratios,
        masked_ratios,
        off_policy_correction,
        outlier_sequence_mask,
        ratio_mask,
        rollout_log_ratios,
        sequence_log_ratios,
        truncated_ratios,
    )
    from rl_core.algorithms.distillation import (
        distillation_advantages,
    )
    from rl_core.algorithms.groups import group_mean
    from rl_core.algorithms.kl import adaptive_kl_coef, estimate_kl, kl_penalty
    from rl_core.algorithms.logprobs import (
        chunked_logprobs,
        full_logprobs,
    )
    from rl_core.algorithms.losses import (
        cispo_loss,
        cross_entropy_loss,
        dro_loss,
        dual_clip_loss,
        importance_sampling_loss,
        ppo_clip_loss,
        reinforce_loss,
        sapo_loss,
    )
    from rl_core.algorithms.minibatch_losses import (
        clip_cov_loss,
        kl_cov_loss,
        token_covariances,
        top_entropy_loss,
        top_entropy_mask,
    )
    from rl_core.algorithms.objective import Objective
    from rl_core.algorithms.off_policy_mask import (
        off_policy_sequence_mask,
    )
    from rl_core.algorithms.preference_losses import dpo_loss, reward_model_loss
    from rl_core.algorithms.reductions import (
        prompt_mean,
        prompt_token_sum,
        seq_mean_token_sum_norm,
        sequence_mean,
        token_mean,
    )
    from rl_core.algorithms.returns import discounted_returns, outcome_rewards, turn_index, turn_returns, turn_rewards
    from rl_core.algorithms.rollout_losses import (
        decoupled_ppo_loss,
        dppo_loss,
        rollout_is_loss,
    )
    from rl_core.algorithms.selection import (
        dynamic_sampling_filter,
        dynamic_sampling_replace,
        overlong_mask,
        soft_overlong_penalty,
        zero_variance_groups,
        zero_variance_mask,
    )
    from rl_core.algorithms.sequence_losses import (
        gmpo_loss,
        gspo_loss,
        gspo_token_loss,
    )
    from rl_core.algorithms.token_loss import TokenLoss, prepared_by, takes_corrections
    from rl_core.algorithms.trajectories import (
        require_complete_trajectories,
        spread_to_steps,
        step_returns,
        trajectory_lengths,
        trajectory_scores,
    )
    from rl_core.algorithms.turn_level import (
        turn_level_advantages,
    )
    from rl_core.algorithms.value_losses import (
        value_clip_loss,
    )

_MODULES = {
    "TokenAdvantages": "advantages",
    "gae_advantages": "advantages",
    "grpo_advantages": "advantages",
    "opo_advantages": "advantages",
    "reinforce_plus_plus_advantages": "advantages",
    "reinforce_plus_plus_baseline_advantages": "advantages",
    "remax_advantages": "advantages",
    "distillation_advantages": "distillation",
    "rloo_advantages": "advantages",
    "whiten": "advantages",
    "best_minus_second_advantages": "best_of_k",
    "maxrl_advantages": "advantages",
    "pass_at_k": "advantages",
    "pass_at_k_advantages": "advantages",
    "geometric_log_ratios": "corrections",
    "masked_ratios": "corrections",
    "off_policy_correction": "corrections",
    "outlier_sequence_mask": "corrections",
    "ratio_mask": "corrections",
    "rollout_log_ratios": "corrections",
    "sequence_log_ratios": "corrections",
    "truncated_ratios": "corrections",
    "group_mean": "groups",
    "adaptive_kl_coef": "kl",
    "estimate_kl": "kl",
    "kl_penalty": "kl",
    "chunked_logprobs": "logprobs",
    "full_logprobs": "logprobs",
    "cispo_loss": "losses",
    "cross_entropy_loss": "losses",
    "dro_loss": "losses",
    "dual_clip_loss": "losses",
    "importance_sampling_loss": "losses",
    "ppo_clip_loss": "losses",
    "reinforce_loss": "losses",
    "sapo_loss": "losses",
    "clip_cov_loss": "minibatch_losses",
    "kl_cov_loss": "minibatch_losses",
    "token_covariances": "minibatch_losses",
    "top_entropy_loss": "minibatch_losses",
    "top_entropy_mask": "minibatch_losses",
    "Objective": "objective",
    "off_policy_sequence_mask": "off_policy_mask",
    "dpo_loss": "preference_losses",
    "reward_model_loss": "preference_losses",
    "prompt_mean": "reductions",
    "prompt_token_sum": "reductions",
    "seq_mean_token_sum_norm": "reductions",
    "sequence_mean": "reductions",
    "token_mean": "reductions",
    "discounted_returns": "returns",
    "outcome_rewards": "returns",
    "turn_index": "returns",
    "turn_returns": "returns",
    "turn_rewards": "returns",
    "decoupled_ppo_loss": "rollout_losses",
    "dppo_loss": "rollout_losses",
    "rollout_is_loss": "rollout_losses",
    "dynamic_sampling_filter": "selection",
    "dynamic_sampling_replace": "selection",
    "overlong_mask": "selection",
    "soft_overlong_penalty": "selection",
    "zero_variance_groups": "selection",
    "zero_variance_mask": "selection",
    "gmpo_loss": "sequence_losses",
    "gspo_loss": "sequence_losses",
    "gspo_token_loss": "sequence_losses",
    "TokenLoss": "token_loss",
    "prepared_by": "token_loss",
    "takes_corrections": "token_loss",
    "require_complete_trajectories": "trajectories",
    "spread_to_steps": "trajectories",
    "step_returns": "trajectories",
    "trajectory_lengths": "trajectories",
    "trajectory_scores": "trajectories",
    "turn_level_advantages": "turn_level",
    "value_clip_loss": "value_losses",
}
__all__ = [
    "TokenAdvantages",
    "gae_advantages",
    "grpo_advantages",
    "opo_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "distillation_advantages",
    "rloo_advantages",
    "whiten",
    "best_minus_second_advantages",
    "maxrl_advantages",
    "pass_at_k",
    "pass_at_k_advantages",
    "geometric_log_ratios",
    "masked_ratios",
    "off_policy_correction",
    "outlier_sequence_mask",
    "ratio_mask",
    "rollout_log_ratios",
    "sequence_log_ratios",
    "truncated_ratios",
    "group_mean",
    "adaptive_kl_coef",
    "estimate_kl",
    "kl_penalty",
    "chunked_logprobs",
    "full_logprobs",
    "cispo_loss",
    "cross_entropy_loss",
    "dro_loss",
    "dual_clip_loss",
    "importance_sampling_loss",
    "ppo_clip_loss",
    "reinforce_loss",
    "sapo_loss",
    "clip_cov_loss",
    "kl_cov_loss",
    "token_covariances",
    "top_entropy_loss",
    "top_entropy_mask",
    "Objective",
    "off_policy_sequence_mask",
    "prompt_mean",
    "prompt_token_sum",
    "seq_mean_token_sum_norm",
    "sequence_mean",
    "token_mean",
    "discounted_returns",
    "outcome_rewards",
    "turn_index",
    "turn_returns",
    "turn_rewards",
    "decoupled_ppo_loss",
    "dpo_loss",
    "dppo_loss",
    "rollout_is_loss",
    "dynamic_sampling_filter",
    "dynamic_sampling_replace",
    "overlong_mask",
    "soft_overlong_penalty",
    "zero_variance_groups",
    "zero_variance_mask",
    "gmpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "TokenLoss",
    "prepared_by",
    "takes_corrections",
    "require_complete_trajectories",
    "spread_to_steps",
    "step_returns",
    "trajectory_lengths",
    "trajectory_scores",
    "turn_level_advantages",
    "value_clip_loss",
    "reward_model_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
