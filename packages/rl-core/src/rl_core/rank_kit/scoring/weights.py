"""Selects and names the parameters of a model that are saved, and the tensors that are sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl_core.rank_kit.scoring.lora import Making, adapter_weights, as_they_are, has_adapters, merged_weights
from rl_core.rank_kit.scoring.rank_mesh import whole


def state_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in a saved state, under the names in the model's code: the adapters if there are any, else all
    parameters. A tied weight appears once."""
    return adapter_weights(model) if has_adapters(model) else model.named_parameters()


def exported_weights(
    model: PreTrainedModel, dtype: torch.dtype, making: Making = as_they_are
) -> Iterator[tuple[str, Tensor]]:
    """The whole model under the names of a Hugging Face checkpoint, with adapters merged. A tied weight appears once.

    Tensors are created one at a time, so the consumer decides how many exist.
    """
    for name, weight in merged_weights(model, making):
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
