"""Plain transformers with a Mixture-of-Experts model's choices given from outside, written from the routers' formulas.

The suite compares backends with it, so it shares nothing with how they do it: the model's router runs as it is, and a
hook computes its weights anew from its logits, at the experts that are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROUTERS = {
    "Qwen3MoeTopKRouter": "softmax",
    "Qwen2MoeTopKRouter": "softmax",
    "OlmoeTopKRouter": "softmax",
    "MixtralTopKRouter": "softmax",
    "DeepseekV3TopkRouter": "sigmoid",
}
"""Class → what makes scores of its logits. All gather the scores of the chosen experts, and may divide by their sum."""


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """Transformer layer → its router, of models whose router is in `ROUTERS`."""
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in ROUTERS}
    return {next(int(part) for part in name.split(".") if part.isdigit()): module for name, module in found.items()}


@contextmanager
def forced_routes(model: nn.Module, routes_TLK: Tensor, routed_T: Tensor) -> Iterator[None]:
    """Inside, the model sends token t to the experts routes[t, layer] where routed[t], else to those of its own choice.

    Args:
        model: is run on one sequence of T tokens.
        routes_TLK: expert ids, any integer dtype, for all transformer layers; dense ones are not read.
        routed_T: bool; where False, routes are not read.
    """
    handles = [
        router.register_forward_hook(_forcing(routes_TLK[:, layer].long(), routed_T))
        for layer, router in routers(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forcing(routes_TK: Tensor, routed_T: Tensor) -> Any:
    def force(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, own_weights_TK, own_TK = output
        chosen_TK = torch.where(routed_T[:, None], routes_TK, own_TK)
        logits_TE = logits_TE.float()
        is_softmax = ROUTERS[type(router).__name__] == "softmax"
        scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        weights_TK = scores_TE.gather(1, chosen_TK)
        if getattr(router, "norm_topk_prob", True):
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        weights_TK = weights_TK * getattr(router, "routed_scaling_factor", 1.0)
        return output[0], weights_TK.to(own_weights_TK.dtype), chosen_TK

    return force
