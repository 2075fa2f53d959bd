"""Faults of Megatron-Core 0.16.1, all but the last where Transformer Engine is not installed. Tests show that each is
still there (tests/megatron/test_fixes.py, test_router_replay.py); when one has gone, so can its function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_megatron.patches.patching import replace

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter
    from torch import Tensor


def fix_router_gating() -> None:
    """`moe_utils.RouterGatingLinearFunction` reads `te_general_gemm`, a name that exists only with Transformer Engine:
    NameError with `moe_router_dtype`."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def fix_latent_attention() -> None:
    """`multi_latent_attention` takes Transformer Engine for installed because its own wrapper module imports without
    it, and then calls `isinstance` with None. Its two down-projections are accepted as replicated only if they are
    `TELinear`: as column-parallel ones, the local alternative, their gradients are wrong under tensor parallelism."""
    from megatron.core.transformer import multi_latent_attention

    from rl_megatron.model.linear import ReplicatedLinear

    if not isinstance(multi_latent_attention.TELinear, type):
        replace(multi_latent_attention, "HAVE_TE", False)
        replace(multi_latent_attention, "TELinear", ReplicatedLinear)


def fix_expert_bias() -> None:
    """`TopKRouter._apply_expert_bias` masks [tokens, experts] with the padding of [tokens]: an error, or, with as many
    tokens as experts, the wrong tokens."""
    from megatron.core.transformer.moe.router import TopKRouter

    def apply_expert_bias(self: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        unfixed(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    unfixed = replace(TopKRouter, "_apply_expert_bias", apply_expert_bias)


def fix_loading_of_torch_adam() -> None:
    """`DistributedOptimizer` reads a fully reshardable state without `step`, which it keeps elsewhere, and then looks
    for `step` among what it read: KeyError with torch's AdamW."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][place], {})
        set_(self, model_param, {**{name: state[name] for name in state if name == "step"}, **tensors})

    set_ = replace(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states)


def apply() -> None:
    """All of them, once per process."""
    fix_loading_of_torch_adam()
    fix_router_gating()
    fix_latent_attention()
    fix_expert_bias()
