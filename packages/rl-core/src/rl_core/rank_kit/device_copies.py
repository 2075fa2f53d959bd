"""Copies of a batch to the computing device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of the tensor on `device`, or the tensor itself if it is already there.

    A copy from the host to a GPU goes through page-locked memory, so that it overlaps with earlier computation. The
    caller does not wait for the copy; only later work on the device does. torch keeps the memory until the copy is
    done.
    """
    if is_pinned_first(tensor, device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_pinned_first(tensor: Tensor, device: torch.device) -> bool:
    """Whether the copy goes through page-locked memory. True for copies of non-empty plain tensors from host memory to
    a GPU. Tensor subclasses, such as the fake tensors of rehearsals, may have no data."""
    return device.type == "cuda" and tensor.device.type == "cpu" and type(tensor) is Tensor and tensor.numel() > 0
