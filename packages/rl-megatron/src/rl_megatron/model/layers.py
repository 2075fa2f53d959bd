"""Chooses the modules of a layer: Transformer Engine's if it is installed, else Megatron's and some of this package."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rl_megatron.model.attention import CoreAttention
from rl_megatron.model.bridge import HAS_TRANSFORMER_ENGINE
from rl_megatron.model.linear import ReplicatedLinear
from rl_megatron.model.norm import LatentNorm, RmsNorm


def layer_specs(config: Any, vp_stage: int | None = None, *, packs_float32: bool = False) -> TransformerBlockSubmodules:
    """Returns the specs of the layers of this rank's stage, or of one of its virtual stages.

    Transformer Engine's attention cannot pack float32; with `packs_float32`, torch's attention is used instead.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=HAS_TRANSFORMER_ENGINE, vp_stage=vp_stage)
    specs = block.layer_specs or []
    if HAS_TRANSFORMER_ENGINE and packs_float32:
        return dataclasses.replace(block, layer_specs=[_with_own_attention(spec) for spec in specs])
    if HAS_TRANSFORMER_ENGINE:
        return block
    norm: Any = RmsNorm  # Megatron expects a class but annotates an instance
    return TransformerBlockSubmodules(layer_specs=[_local(spec) for spec in specs], layer_norm=norm)


def _with_own_attention(spec: ModuleSpec) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    layer: Any = spec.submodules
    layer.self_attention.submodules.core_attention = CoreAttention
    return spec


def _local(spec: ModuleSpec) -> ModuleSpec:
    """Replaces norms, core attention and MLA's down-projections with modules that support sequence and context
    parallelism."""
    spec = _with_own_attention(spec)
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    is_latent = hasattr(attention, "kv_layernorm")
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, LatentNorm if is_latent else RmsNorm)
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if getattr(attention, name, None) is not None:
            setattr(attention, name, ReplicatedLinear)
    return spec
