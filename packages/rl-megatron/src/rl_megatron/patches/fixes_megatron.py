"""Fixes for bugs of Megatron-Core 0.16.1. For every fix other than `fix_expert_bias`, tests/megatron/test_needed.py
checks that the fault occurs without the fix. Remove a fix when its bug is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_megatron.patches.patching import replace

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter
    from torch import Tensor


def fix_router_gating() -> None:
    """Defines `moe_utils.te_general_gemm` as None. `RouterGatingLinearFunction`, which is used if `moe_router_dtype` is
    set, reads this name. Without Transformer Engine the name does not exist, so the function would raise NameError."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def fix_latent_attention() -> None:
    """Makes `multi_latent_attention` use `ReplicatedLinear` if Transformer Engine is not installed. Megatron's wrapper
    module can be imported even then, so `multi_latent_attention` assumes that Transformer Engine is installed, and
    calls `isinstance` with None. The two down-projections are treated as replicated only if they are `TELinear`;
    Megatron's local alternative, column-parallel layers, gives wrong gradients under tensor parallelism."""
    from megatron.core.transformer import multi_latent_attention

    from rl_megatron.model.linear import ReplicatedLinear

    if not isinstance(multi_latent_attention.TELinear, type):
        replace(multi_latent_attention, "HAVE_TE", False)
        replace(multi_latent_attention, "TELinear", ReplicatedLinear)


def fix_expert_bias() -> None:
    """Gives the padding mask an axis for experts. `TopKRouter._apply_expert_bias` masks a [tokens, experts] tensor with
    a [tokens] mask: this raises, or masks wrong entries if there are as many tokens as experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    def apply_expert_bias(self: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        unfixed(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    unfixed = replace(TopKRouter, "_apply_expert_bias", apply_expert_bias)


def fix_balancing_without_tokens() -> None:
    """Divides by 1 instead of 0 in the load-balancing losses of a micro-batch that is all padding, as on a rank without
    sequences. These losses divide by the number of tokens, so all gradients would be NaN."""
    from megatron.core.transformer.moe import router

    def count(*args: Any, **settings: Any) -> tuple[Any, Any, Any]:
        per_expert, own_tokens, all_tokens = counted(*args, **settings)
        return per_expert, own_tokens, all_tokens + (all_tokens == 0)

    counted = replace(router, "get_tokens_per_expert_and_token_count", count)


def fix_loading_of_torch_adam() -> None:
    """Adds the current `step` to each parameter's state that `DistributedOptimizer` loads. A fully reshardable
    checkpoint stores `step` separately, but with torch's AdamW, loading expects it in each parameter's state and would
    raise KeyError."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][place], {})
        set_(self, model_param, {**{name: state[name] for name in state if name == "step"}, **tensors})

    set_ = replace(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states)


def apply() -> None:
    """Applies all fixes; call once per process."""
    fix_loading_of_torch_adam()
    fix_router_gating()
    fix_latent_attention()
    fix_expert_bias()
    fix_balancing_without_tokens()
