"""On-policy distillation: advantages from the teacher's log-probs of the student's samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_core.algorithms.advantages import TokenAdvantages
from rl_core.algorithms.checks import require_floating
from rl_core.algorithms.token_loss import masked, require_tokens
from rl_core.errors import ConfigError


@torch.no_grad()
def distillation_advantages(
    old_logprobs_T: Tensor, ref_logprobs_T: Tensor, mask_T: Tensor, *, distillation_clip: float = math.inf
) -> TokenAdvantages:
    """The teacher's log-prob of each sampled token minus the student's: A_t = ref_logprob_t − old_logprob_t.

    The expected value of A_t is −KL(student ‖ teacher) of token t's distribution. So a policy-gradient step with A
    reduces the reverse KL at each token; later tokens do not contribute to an earlier token's advantage. The teacher is
    the reference model (`trainer.ref.model.path`, with the same vocabulary). Rewards are not used.
    Source: Agarwal et al. 2024 (GKD), arXiv 2306.13649, with on-policy samples only; as an advantage: Lu 2025,
    "On-Policy Distillation", Thinking Machines Lab.

    Args:
        old_logprobs_T: log-probs of the student at the start of the update.
        ref_logprobs_T: log-probs of the teacher.
        mask_T: bool, the sampled tokens.
        distillation_clip: > 0, nats; advantages are clipped to ± this value. A confident teacher may give a wrong token
            a log-prob tens of nats below the student's, and such tokens would outweigh all others. `inf`: no clipping.

    Returns:
        TokenAdvantages [T], whose returns equal the advantages.

    Raises:
        ShapeError: lengths or dtypes do not fit.
        ConfigError: `distillation_clip` is not above 0.
    """
    require_tokens(mask_T, old_logprobs_T=old_logprobs_T, ref_logprobs_T=ref_logprobs_T)
    require_floating(old_logprobs_T=old_logprobs_T, ref_logprobs_T=ref_logprobs_T)
    if not distillation_clip > 0:
        raise ConfigError(f"distillation_clip: got {distillation_clip:g}; expected above 0")
    advantages_T = masked(ref_logprobs_T - old_logprobs_T, mask_T).clamp(-distillation_clip, distillation_clip)
    return TokenAdvantages(advantages_T, advantages_T)
