"""Forces the routes of a Mixture-of-Experts model in plain transformers, using the routers' formulas.

The suite compares backends with this module, so the module shares no code with them. The router runs unchanged; a hook
then recomputes the expert weights from the router's logits at the forced experts.
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
"""Router class → function that turns the router's logits into scores. All these routers gather the scores of the chosen
experts, and some divide these scores by their sum."""


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index → router, for models whose router class is in `ROUTERS`."""
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in ROUTERS}
    return {next(int(part) for part in name.split(".") if part.isdigit()): module for name, module in found.items()}


@contextmanager
def forced_routes(model: nn.Module, routes_TLK: Tensor, routed_T: Tensor) -> Iterator[None]:
    """Within the context, the model sends token t to the experts routes[t, layer] if routed[t] is True; else the router
    chooses the experts.

    Args:
        model: a model that is called on one sequence of T tokens.
        routes_TLK: expert ids, any integer dtype, for all transformer layers; entries of dense layers are ignored.
        routed_T: bool; the routes of tokens for which it is False are not read.
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
