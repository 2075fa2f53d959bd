"""Comparisons of tensors whose errors say which tensor differs, and by how much."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest absolute difference over all tensors; NaN if any difference is NaN."""
    return torch.stack([(actual[name].float() - t.float()).abs().max() for name, t in expected.items()]).max().item()


def require_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raises AssertionError, with the largest difference and its position, if the difference is above `tolerance`."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual - expected).abs().reshape(-1)
    worst = int(difference.argmax())
    assert difference[worst] <= tolerance, (
        f"{what}: differs by {difference[worst]:.1e} at {worst}, allowed {tolerance:g}"
    )


def multiple_of(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """The end of a message that says by which factor all gradients differ. Empty if no single factor fits, or if it is
    1."""
    whole = torch.cat([gradient.flatten() for gradient in expected.values()])
    found = torch.cat([actual[name].flatten() for name in expected])
    factor = torch.dot(found, whole) / torch.dot(whole, whole)
    if abs(factor - 1.0) < 1e-3 or not (found - factor * whole).norm() < 1e-3 * found.norm():
        return ""
    return f"; all gradients are {factor:.4g} times the expected ones: sum over micro-batches and ranks, never divide"


def require_no_gradient(gradients: Mapping[str, Tensor]) -> None:
    """Raises AssertionError naming the first gradient that is not 0."""
    for name, gradient in gradients.items():
        assert not bool(gradient.any()), f"the gradient of {name} is not 0"


def require_same_names(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raises AssertionError that says how many names are missing and unexpected, and shows the first of each."""
    missing, unexpected = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    found = [
        f"{len(names)} {kind}, such as {names[0]}"
        for names, kind in ((missing, "missing"), (unexpected, "unexpected"))
        if names
    ]
    assert not found, f"{what}: names differ from the checkpoint's: {'; '.join(found)}"


def require_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raises AssertionError unless both have the same names and bit-identical tensors."""
    require_same_names(actual, expected, what)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{what}: {name} differs"
