"""Argument checks: equal lengths, dtypes, ordered streams, settings within their range."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor

from rl_core.errors import ConfigError, DataError, ShapeError


def require_same_length(**tensors: Tensor) -> None:
    """Raises ShapeError unless all tensors have one axis, the same length and the same device. The message names the
    first missing row."""
    for name, values in tensors.items():
        _require_tensor(name, values)
        if values.dim() != 1:
            remedy = "; index padded tensors with a bool mask: values_NW[mask_NW]" if values.dim() > 1 else ""
            raise ShapeError(f"{name}: expected one axis, got shape {tuple(values.shape)}{remedy}")
    (first, reference), *others = tensors.items()
    for name, values in others:
        if values.numel() != reference.numel():
            shorter = name if values.numel() < reference.numel() else first
            row = min(values.numel(), reference.numel())
            raise ShapeError(
                f"{name} has {values.numel()} entries, {first} has {reference.numel()}: "
                f"row {row} is missing from {shorter}"
            )
        if values.device != reference.device:
            raise ShapeError(
                f"{name} is on {values.device}, {first} on {reference.device}; move them to one device with .to(device)"
            )


def require_floating(**tensors: Tensor) -> None:
    """Raises ShapeError unless every tensor holds floating-point numbers."""
    for name, values in tensors.items():
        _require_tensor(name, values)
        if not values.is_floating_point():
            raise ShapeError(f"{name}: expected floating-point numbers, got {values.dtype}; convert with .float()")


def require_int64(**tensors: Tensor) -> None:
    """Raises ShapeError unless every tensor is int64."""
    for name, values in tensors.items():
        _require_tensor(name, values)
        if values.dtype != torch.int64:
            raise ShapeError(f"{name}: expected torch.int64, got {values.dtype}; convert whole numbers with .long()")


def require_finite(**tensors: Tensor) -> None:
    """Raises DataError if a tensor holds NaN or an infinity. The message names the first one."""
    for name, values in tensors.items():
        wrong = ~values.isfinite()
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            raise DataError(f"{name}[{i}] is {float(values[i])}; expected a finite number")


def require_bool(**tensors: Tensor) -> None:
    """Raises ShapeError unless every tensor is bool."""
    for name, values in tensors.items():
        _require_tensor(name, values)
        if values.dtype != torch.bool:
            raise ShapeError(
                f"{name}: expected torch.bool, got {values.dtype}; convert a mask of 0 and 1 with .bool() "
                "(a mask cannot hold weights)"
            )


def require_ordered(sequence_T: Tensor) -> None:
    """Raises ShapeError unless `sequence_T` is int64, not negative and non-decreasing. The message names the first
    token that violates this."""
    require_int64(sequence_T=sequence_T)
    if sequence_T.numel() and int(sequence_T[0]) < 0:
        raise ShapeError(f"sequence_T[0] is {int(sequence_T[0])}; expected an index of at least 0")
    falls_T = sequence_T[1:] < sequence_T[:-1]
    if bool(falls_T.any()):
        t = int(falls_T.nonzero()[0]) + 1
        raise ShapeError(
            f"sequence_T falls from {int(sequence_T[t - 1])} to {int(sequence_T[t])} at token {t}; "
            "expected the tokens of each sequence to be consecutive, and sequences in ascending order"
        )


def require_row_per_sequence(sequence_T: Tensor, **tensors: Tensor) -> None:
    """Raises ShapeError unless every tensor has one axis, with an entry for each sequence index up to the stream's last
    one. `sequence_T` must be ordered."""
    needed = int(sequence_T[-1]) + 1 if sequence_T.numel() else 0
    for name, values in tensors.items():
        if values.dim() != 1 or values.numel() < needed:
            raise ShapeError(
                f"{name}: expected one axis with at least {needed} entries, because the stream's last sequence has "
                f"index {needed - 1}; got shape {tuple(values.shape)}"
            )


def require_between(low: float, high: float, **settings: float) -> None:
    """Raises ConfigError unless every setting is a number in [low, high]."""
    for name, value in settings.items():
        if not isinstance(value, Real):
            raise ConfigError(f"{name}: {value!r} is not a number between {low:g} and {high:g}")
        if not low <= value <= high:
            raise ConfigError(f"{name}: {value!r} is not between {low:g} and {high:g}")


def _require_tensor(name: str, values: object) -> None:
    if isinstance(values, Tensor):
        return
    if isinstance(values, str):
        raise ShapeError(f"{name}: expected a tensor, got {values!r}; pass settings by name, as setting={values!r}")
    items = list(values) if isinstance(values, Iterable) else []
    is_text = any(isinstance(item, str) for item in items)
    remedy = (
        "replace strings by numbers, equal ones by the same number" if is_text else "convert it with torch.as_tensor"
    )
    held = f" of {type(items[0]).__name__}" if items else ""
    raise ShapeError(f"{name}: expected a tensor, got {type(values).__name__}{held}; {remedy}")
