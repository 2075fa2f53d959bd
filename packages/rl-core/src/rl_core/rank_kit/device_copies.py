"""Copies of a batch to the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; itself where it is there already.

    A copy to a GPU goes through page-locked memory, so that it runs beside what is computed before it: the caller does
    not wait, and nothing else may wait for it but the device itself. torch keeps such memory until the copy is done.
    """
    if is_pinned_first(tensor, device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_pinned_first(tensor: Tensor, device: torch.device) -> bool:
    """Whether the copy goes through page-locked memory: from host memory to a GPU. Tensors without data, by which
    memory is planned, have none."""
    return device.type == "cuda" and tensor.device.type == "cpu" and type(tensor) is Tensor and tensor.numel() > 0
