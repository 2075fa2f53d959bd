"""Compares an attention function with the eager attention in a model's own code, in every attention layer.

transformers passes each layer's settings to whichever attention function is selected, and a function ignores those that
it does not implement. SDPA, for example, ignores Gemma 2's softcap. The settings act on large or small scores, which a
few tokens of a model need not have, so each layer's functions are compared on random queries, keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_core.errors import ConfigError

T = TypeVar("T")
Attend = Callable[..., tuple[Tensor, Any]]
"""An attention function as transformers calls it: (module, query, key, value, attention_mask, **settings)."""

_EAGER = "rl_core_eager"
_LIMIT = 1e-3
"""Largest relative difference of outputs. float32 rounding gives about 1e-6, Gemma 2's softcap of 50 about 0.1."""
_SPREADS = (1.0, 8.0, 64.0)
"""Standard deviations of the random scores. At 1, a term that competes with scores (an attention sink, a bias) has an
effect; at the others, a term that limits scores."""


def default_attention(model: PreTrainedModel) -> str:
    """The attention implementation that transformers selects for the model if none is named."""
    return "sdpa" if model._supports_sdpa else "eager"


def sdpa_with_mask(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: Any) -> Any:
    """transformers' SDPA attention."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **settings)


def with_eager_attention(model: PreTrainedModel, run: Callable[[], T], attend: Attend) -> tuple[T, str | None]:
    """Runs the model with its own eager attention, and compares `attend` with it in each attention layer that runs.

    Args:
        model: any model; it keeps eager attention afterwards. A model that does not select its attention by
            transformers' `AttentionInterface` runs as it was loaded, and nothing is compared.
        run: calls the model.
        attend: the attention function to compare.

    Returns:
        The result of `run`, and the worst difference: the layer and the settings that it got. None: there is no
        difference above rounding.
    """
    worst: dict[str, tuple[float, str]] = {}

    def compared(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any):
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise ConfigError(
                f"{type(module).__name__} has no eager_attention_forward to compare with; use another model"
            )
        error = _difference(eager, attend, module, (query, key, value), settings)
        given = ", ".join(name for name, setting in settings.items() if setting is not None)
        worst["layer"] = max(worst.get("layer", (0.0, "")), (error, f"{type(module).__name__} (given {given})"))
        return eager(module, query, key, value, attention_mask, **settings)

    AttentionInterface.register(_EAGER, compared)
    AttentionMaskInterface.register(_EAGER, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    can_select = model._can_set_attn_implementation()
    try:
        if can_select:
            model.set_attn_implementation(_EAGER)
        result = run()
    finally:
        if can_select:
            model.set_attn_implementation("eager")
    error, layer = worst.get("layer", (0.0, ""))
    return result, None if error < _LIMIT else f"{layer} differs from its own eager attention by {error:.1e} (relative)"


@torch.no_grad()
def _difference(
    eager: Attend, attend: Attend, module: nn.Module, like: tuple[Tensor, Tensor, Tensor], settings: dict[str, Any]
) -> float:
    """The largest relative difference of the two functions' outputs on random tensors shaped as in `like`, float32."""
    device, length = like[0].device, like[0].shape[2]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tensor.shape, generator=generator).to(device) for tensor in like)
    query = query / ((settings.get("scaling") or query.shape[-1] ** -0.5) * query.shape[-1] ** 0.5)
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    hidden = (distance < 0) | (distance >= (settings.get("sliding_window") or length))
    mask = torch.zeros(1, 1, length, length, device=device).masked_fill(hidden, torch.finfo(torch.float32).min)
    errors = [0.0]
    with torch.autocast(device.type, enabled=False):
        for spread in _SPREADS:
            outputs = [f(module, query * spread, key, value, mask, **settings)[0].float() for f in (eager, attend)]
            errors.append(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()))
    return max(errors)
