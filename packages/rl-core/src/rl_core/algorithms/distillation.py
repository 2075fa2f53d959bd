"""On-policy distillation: the teacher's log-probs of what the student sampled, as advantages."""

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
    """How much likelier than the student the teacher finds each sampled token: A_t = ref_logprob_t − old_logprob_t.

    Its mean is −KL(student ‖ teacher) per token, so a policy-gradient step on it is one on the reverse KL, as far as
    each token's own choice goes: later tokens have no part in an earlier one's advantage. The reference is the teacher
    (`trainer.ref.model.path`, of the same vocabulary); rewards play no part.
    Source: Agarwal et al. 2024 (GKD), arXiv 2306.13649, with on-policy samples alone; as an advantage: Lu 2025,
    "On-Policy Distillation", Thinking Machines Lab.

    Args:
        old_logprobs_T: the student, at the start of the update.
        ref_logprobs_T: the teacher.
        mask_T: bool, the sampled tokens.
        distillation_clip: > 0, nats; advantages are held between ± this. A teacher that is sure finds a mistake tens of
            nats unlikely, and such tokens outweigh all others; `inf` keeps them.

    Returns:
        TokenAdvantages [T]; the returns are the same numbers.

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
