"""Gradient checkpointing of a Hugging Face model's decoder layers, full or selective.

`True` keeps only a layer's input and computes the layer again. `"selective"` keeps the results of matrix products and
attention, which take nearly all of the time, and computes everything else again: norms, rotary embedding, activation
functions. (Korthikanti et al. 2022, arXiv 2205.05198, recompute attention instead, because attention without flash
kernels keeps its scores for backward.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers its operation
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.errors import ConfigError

_aten: Any = torch.ops.aten
_attention: Any = torch.ops.torch_attn

KEPT = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
) | {_attention._varlen_attn.default}
"""Operations whose results selective checkpointing keeps. The last one is attention of packed sequences on GPUs."""


def recompute_layers(model: PreTrainedModel, which: Literal[True, "selective"], where: str) -> None:
    """Wraps every decoder layer's `forward`, not its `__call__`, so that hooks of a sharding wrapper run only once.

    transformers' own switch works in training mode only, which would also switch dropout on.

    Args:
        model: the model whose layers are computed again in backward.
        which: see the module's docstring.
        where: section of the model, for messages.

    Raises:
        ConfigError: the model's code marks no layers for gradient checkpointing.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} marks no layers for gradient checkpointing: set "
            "trainer.gradient_checkpointing=false",
            key=where,
        )
    contexts = partial(create_selective_checkpoint_contexts, _kept) if which == "selective" else noop_context_fn
    for layer in layers:
        # The random state need not be restored: in evaluation mode, layers use no random numbers.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def _kept(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
