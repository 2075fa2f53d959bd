"""Advantages, losses, KL, corrections, reductions and selection as pure torch functions. Needs torch alone."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "kl": ("KL_ESTIMATORS", "adaptive_kl_coef", "estimate_kl", "kl_penalty"),
    "logprobs": ("chunked_logprobs", "full_logprobs"),
    "losses": (
        "cispo_loss",
        "cross_entropy_loss",
        "dual_clip_loss",
        "importance_sampling_loss",
        "ppo_clip_loss",
        "reinforce_loss",
        "sapo_loss",
    ),
    "minibatch_losses": (
        "clip_cov_columns",
        "clip_cov_loss",
        "kl_cov_columns",
        "kl_cov_loss",
        "token_covariances",
        "top_entropy_columns",
        "top_entropy_loss",
        "top_entropy_mask",
    ),
    "objective": ("Objective", "sum_metrics"),
    "rollout_losses": ("decoupled_ppo_loss", "dppo_loss", "rollout_is_loss"),
    "sequence_losses": ("gmpo_loss", "gspo_loss", "gspo_token_loss"),
    "token_loss": ("TokenLoss", "chooses_columns", "prepared_by"),
    "value_losses": ("value_clip_loss",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
