"""Freezes the parameters that `trainer.<model>.model.trainable` does not name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_core.rank_kit.trained_parameters import trained_parameters

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


def freeze_others(bridge: Any, chunks: Sequence[Any], trainable: Sequence[str], key: str) -> None:
    """Freezes every parameter of this rank's chunks whose tensors `trainable` does not match. Collective, because an
    expression may match only parameters of other ranks.

    Raises:
        ConfigError: on all ranks: see `trained_parameters`. `key`: for its messages.
    """
    models = unwrap_model(list(chunks))
    is_tied = models[0].share_embeddings_and_output_weights
    own = own_parameters(bridge, chunks)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [names for _, names in own])
    parts: dict[str, set[tuple[str, ...]]] = {}
    for names in (names for rank in of_ranks for names in rank):
        aliases = [(name, _OUTPUT) if is_tied and name.endswith(_EMBEDDING) else (name,) for name in names]
        parts.setdefault(_unit(names), set()).update(aliases)
    trained = trained_parameters(trainable, {unit: sorted(found) for unit, found in parts.items()}, key)
    for parameter, names in own:
        parameter.requires_grad_(_unit(names) in trained)
    for model in models:
        if is_tied and (model.pre_process or model.post_process):  # the last stage has a copy of a tied embedding
            is_trained = any(unit.endswith(_EMBEDDING) for unit in trained)
            model.shared_embedding_or_output_weight().requires_grad_(is_trained)


def own_parameters(bridge: Any, chunks: Sequence[Any]) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """This rank's parameters, each with the names of the checkpoint's tensors that it holds. Leaves out a critic's head
    and the last stage's copy of a tied embedding."""
    own = []
    for task in bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, list(chunks)):
        if task is not None and task.megatron_module is not None and isinstance(task.param_weight, nn.Parameter):
            own.append((task.param_weight, names_of(task)))
    return own


def names_of(task: Any) -> tuple[str, ...]:
    """The names of the checkpoint's tensors that the parameter of a conversion task holds."""
    names = task.mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def _unit(names: Sequence[str]) -> str:
    """What is trained or frozen as a whole: a parameter, or the parameters of all experts of a layer. If only one
    rank's experts were trained, only this rank would run the backward pass of the layer's exchange of tokens."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", "+".join(names))


def keep_input_gradients(chunks: Sequence[Any]) -> None:
    """Lets the output of a frozen embedding require a gradient. Megatron recomputes a layer only if the layer's input
    requires one; otherwise the layer's parameters would get none."""
    for model in unwrap_model(list(chunks)):
        if model.pre_process and not model.embedding.word_embeddings.weight.requires_grad:
            embedding = model.embedding.word_embeddings
            embedding.forward = partial(_embed, embedding.forward)


def _embed(embed: Any, tokens_BS: Tensor) -> Tensor:
    return embed(tokens_BS).requires_grad_()
