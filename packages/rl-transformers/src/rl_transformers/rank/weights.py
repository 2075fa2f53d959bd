"""Selects and names the parameters of a model that are trained and saved, and the tensors that are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl_core.rank_kit.trained_parameters import Parts, trained_parameters, unit_of
from rl_transformers.rank.lora import Making, as_they_are, merged_weights
from rl_transformers.rank.rank_mesh import whole


def trained_or_all(weights: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters among `weights`; all if none is trained, as in a reference model."""
    weights = list(weights)
    return [(name, weight) for name, weight in weights if weight.requires_grad] or weights


def freeze_others(model: PreTrainedModel, trainable: Sequence[str], key: str) -> None:
    """Freezes every parameter that the expressions `trainable` do not select (`trained_parameters`).

    Raises:
        ConfigError: see `trained_parameters`. `key`: for its messages.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    parts = {own[0]: _checkpoint_names(model, own, weight) for weight, own in names.items()}
    trained = trained_parameters(trainable, parts, key)
    for weight, own in names.items():
        weight.requires_grad_(own[0] in trained)


def trained_units(weights: Iterable[tuple[str, nn.Parameter]]) -> set[str]:
    """The units (`unit_of`) with a trained parameter."""
    return {unit_of(name) for name, weight in weights if weight.requires_grad}


def _checkpoint_names(model: PreTrainedModel, names: Sequence[str], weight: Tensor) -> Parts:
    """The names of the checkpoint's tensors that a parameter holds. `names`: the parameter's, several if it is tied."""
    shape = torch.empty_like(weight, device="meta")
    return list(zip(*([name for name, _ in checkpoint_tensors(model, own, shape)] for own in names), strict=True))


def exported_weights(
    model: PreTrainedModel, dtype: torch.dtype, making: Making = as_they_are, *, only_trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The model under the names of a Hugging Face checkpoint, with adapters merged: the whole model, or only
    `trained_units`. A tied weight appears once.

    Tensors are created one at a time, so the consumer decides how many exist.
    """
    units = trained_units(model.named_parameters()) if only_trained else None
    for name, weight in merged_weights(model, making, units):
        yield from checkpoint_tensors(model, name, whole(weight.to(dtype)))


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Converts a parameter to checkpoint tensors: several if the parameter holds all experts of a layer, else one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a saved model contains besides parameters; most models have none."""
    return {
        # FSDP1 wraps every sharded module; the wrapper must not appear in names.
        f"{prefix}.{name}".replace("_fsdp_wrapped_module.", ""): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
