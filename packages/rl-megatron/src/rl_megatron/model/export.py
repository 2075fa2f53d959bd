"""Weights and gradients under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_BUFFER = ".e_score_correction_bias"


def exported(bridge: Any, chunks: Sequence[Any], *, with_buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one at a time, on every rank; a tied weight comes once. All ranks must drain it together.

    `with_buffers` adds what is no parameter: the expert bias by which some routers choose.

    The conversion is planned anew each time: plans hold tensors, which change when weights move between devices.
    """
    vocab_size = chunks[0].config.vocab_size
    is_tied = chunks[0].config.share_embeddings_and_output_weights
    # A critic's head has no place in the conversion: there is no task for it.
    tasks = [task for task in bridge.get_conversion_tasks(list(chunks)) if task is not None]
    for name, tensor in bridge.export_hf_weights(list(chunks), cpu=False, show_progress=False, conversion_tasks=tasks):
        if name == "lm_head.weight" and is_tied:
            continue
        if not with_buffers and name.endswith(_BUFFER):
            continue
        yield name, tensor[:vocab_size] if name.endswith(_VOCABULARY) else tensor


@contextmanager
def gradients_as_weights(chunks: Sequence[Any]):
    """Inside, the parameters of trained chunks hold their main gradients: what converts weights converts these."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    kept = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.main_grad.to(torch.float32)
        yield
    finally:
        for parameter, weight in zip(parameters, kept, strict=True):
            parameter.data = weight
