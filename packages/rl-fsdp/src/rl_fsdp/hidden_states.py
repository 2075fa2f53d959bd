"""What every scorer stands on: the base model's last hidden state in front of each scored token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_fsdp.attention import gather_rows
from rl_fsdp.micro_batch import ModelInput


def predicting_states(model: PreTrainedModel, inputs: ModelInput, compute_dtype: torch.dtype) -> Tensor:
    """[S, H] in `compute_dtype`: for every scored token the state in which it is chosen, made from those before it."""
    packing = {}
    if inputs.packed is not None:
        packing = {"position_ids": inputs.positions_BL, "packed_sequences": inputs.packed}
    with autocast(model, compute_dtype):
        hidden_BLH = model.base_model(input_ids=inputs.tokens_BL, use_cache=False, **packing).last_hidden_state
    return gather_rows(hidden_BLH.flatten(0, 1), inputs.source_S).to(compute_dtype)


def autocast(model: PreTrainedModel, compute_dtype: torch.dtype) -> torch.autocast:
    """bfloat16 where that is computed in; else no casts."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=compute_dtype == torch.bfloat16)
