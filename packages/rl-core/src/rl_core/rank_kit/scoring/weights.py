"""Which parameters of a model are trained and saved, which tensors are sent, and under which names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl_core.rank_kit.scoring.lora import Making, adapter_weights, as_they_are, has_adapters, merged_weights
from rl_core.rank_kit.scoring.rank_mesh import whole


def state_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """What a state holds, under the names of the model's own code: the adapters, where there are any, else all
    parameters; a tied weight comes once."""
    return adapter_weights(model) if has_adapters(model) else model.named_parameters()


def exported_weights(
    model: PreTrainedModel, dtype: torch.dtype, making: Making = as_they_are
) -> Iterator[tuple[str, Tensor]]:
    """The whole model under the names of a Hugging Face checkpoint, adapters merged; a tied weight comes once.

    Made one by one, so a consumer decides how many exist at a time.
    """
    for name, weight in merged_weights(model, making):
        yield from checkpoint_tensors(model, name, whole(weight.to(dtype)))


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter as it stands in a checkpoint: transformers may hold several tensors (experts) as one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a saved model holds besides parameters; most have none."""
    return {
        # FSDP1 puts a module around every sharded one, which has no place in a name.
        f"{prefix}.{name}".replace("_fsdp_wrapped_module.", ""): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
