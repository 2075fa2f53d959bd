"""Router replay (R3, Ma et al. 2025, arXiv 2510.11370): the policy's tokens go to the experts that the engine chose.

Only the choice is replaced (`rl_transformers.expert_choices`). The weights of the chosen experts come from the
router's current scores, and gradients flow through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.errors import ConfigError
from rl_transformers.expert_choices import ExpertChoices
from rl_transformers.rank.micro_batch import ModelInput, Routes, predicting_states


def follow(choices: ExpertChoices, routes: Routes | None) -> None:
    """Sets the routes of the next forward pass and of its recomputation; None: the routers choose."""
    if routes is None:
        choices.follow(None, None)
    else:
        choices.follow(routes.experts_CLK, routes.is_known_C)


def require_followed_routes(
    model: PreTrainedModel, choices: ExpertChoices, inputs: ModelInput, compute_dtype: torch.dtype, key: str
) -> None:
    """Sends a few tokens to random experts, and checks which experts and weights the model uses.

    This check detects models that choose experts in a way that `ExpertChoices` does not replace, and models that give
    weight 0 to experts outside the groups that they choose first.

    Raises:
        ConfigError: other experts were used, some have weight 0, or a layer calls its experts never or several times.
    """
    shape, num_cells = choices.shape, inputs.tokens_BL.numel()
    generator = torch.Generator().manual_seed(0)
    sent_CLE = torch.rand(num_cells, shape.num_layers, shape.num_experts, generator=generator).argsort(-1)
    sent_CLK = sent_CLE[..., : shape.experts_per_token].to(model.device)
    given: list[tuple[Any, ...]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: given.append(args))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    choices.follow(sent_CLK, torch.ones(num_cells, dtype=torch.bool, device=model.device))
    try:
        with torch.no_grad():
            predicting_states(model, inputs, compute_dtype)
    finally:
        for handle in handles:
            handle.remove()
    name = type(model).__name__
    remedy = f"set {key}=false and generator.inference_engine.enable_return_routed_experts=false"
    if len(given) != len(shape.layers):
        raise ConfigError(
            f"{name} called its experts {len(given)} times for {len(shape.layers)} layers with experts, so its use of "
            f"the routes cannot be checked; {remedy}",
            key=key,
        )
    for layer, arguments in zip(shape.layers, given, strict=True):
        if not _is_followed(arguments, sent_CLK[:, layer]):
            raise ConfigError(
                f"layer {layer} of {name} does not use the experts that the routes name; {remedy}", key=key
            )


def _is_followed(arguments: tuple[Any, ...], sent_CK: Tensor) -> bool:
    """Whether the experts, which are called with hidden states, indices and weights, got the sent indices and no weight
    of 0."""
    if len(arguments) != 3 or arguments[1].shape != sent_CK.shape:
        return False
    return torch.equal(arguments[1], sent_CK) and bool((arguments[2] != 0).all())
