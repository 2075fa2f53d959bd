"""Takes rotary frequencies from transformers, for every kind of scaling that does not depend on the sequence length.

Megatron-Core 0.16.1 and Megatron-Bridge 0.3.1 compute different frequencies for yarn, support llama3 only with Llama
3's own numbers, and ignore all other scalings. Here transformers computes the frequencies from the model's
configuration, and Megatron rotates with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rotary_fields(config: Any, *, is_latent: bool) -> dict[str, Any]:
    """Returns the fields of `TransformerConfig` with which attention rotates and scales as in transformers.
    `set_frequencies` sets the frequencies.

    Args:
        config: transformers' configuration of the model.
        is_latent: whether the model has latent attention, in which yarn also changes the softmax scale.
    """
    rope = config.rope_parameters
    scaled = _scaled(config)
    base = {"rotary_base": rope["rope_theta"]}
    if is_latent:
        # Without scaling, Bridge treats latent attention as if it had Megatron's default scaling.
        return base | (_unscaled_latent() if scaled is None else _scaled_latent(rope, scaled[1]))
    # Megatron multiplies cosines and sines by 0.1 · mscale · log(factor) + 1 if the factor is above 1.
    factor = 1.0 if scaled is None else scaled[1]
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rope_scaling": False,
        "yarn_rotary_scaling_factor": math.e if factor != 1.0 else 1.0,
        "yarn_mscale": 10.0 * (factor - 1.0),
        "yarn_mscale_all_dim": 0.0,
    }
    if factor != 1.0:
        fields["apply_rope_fusion"] = False  # fused kernels ignore the factor
    return base | fields


def _unscaled_latent() -> dict[str, Any]:
    return {"rope_type": "rope", "rotary_scaling_factor": 1.0}


def _scaled_latent(rope: Any, attention_factor: float) -> dict[str, Any]:
    """Returns the fields for latent attention with scaled frequencies. With factor f, Megatron multiplies cosines and
    sines by (0.1 · mscale · log f + 1) / (0.1 · mscale_all_dim · log f + 1), and the softmax's scale by the square of
    the denominator. So does transformers if the model has `mscale_all_dim`."""
    factor, all_dim = float(rope.get("factor") or 1.0), rope.get("mscale_all_dim") or 0.0
    fields: dict[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": factor, "mscale_all_dim": all_dim}
    if factor > 1.0:
        step = 0.1 * math.log(factor)
        fields["mscale"] = (attention_factor * (step * all_dim + 1.0) - 1.0) / step
    return fields


def set_frequencies(models: Sequence[Any], config: Any) -> None:
    """Sets transformers' frequencies in all rotary embeddings of these models if the model scales its frequencies."""
    scaled = _scaled(config)
    if scaled is None:
        return
    for embedding in (module for model in models for module in model.modules() if isinstance(module, RotaryEmbedding)):
        frequencies = scaled[0].to(embedding.inv_freq.device)
        embedding.inv_freq = frequencies
        if isinstance(embedding, YarnRotaryEmbedding):
            # Megatron interpolates between these two tensors; if both are equal, the result equals them.
            embedding.inv_freq_extra = embedding.inv_freq_inter = frequencies
            embedding.forward.cache_clear()


def _scaled(config: Any) -> tuple[Tensor, float] | None:
    """Returns the frequencies and the factor of cosines and sines, or None if Megatron computes both correctly."""
    make = ROPE_INIT_FUNCTIONS.get(config.rope_parameters.get("rope_type"))
    return None if make is None else make(config, None)
