"""Compact encoding of the changes of a tensor between two versions: the distances between changed elements, then
the new values of these elements.

Elements are compared bitwise for every dtype, so the result equals the new tensor bit for bit. Distances use one or two
bytes, whichever makes the encoding smaller; longer distances are bridged with unchanged elements. At a learning
rate of 1e-6, 1 to 2 % of the bfloat16 elements change per step, and a change takes slightly more than 3 bytes.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.errors import WeightSyncError

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element size in bytes → unsigned integer type in which elements are compared and sent."""
_CHUNK_ELEMENTS = 1 << 22
WORTH_SENDING = 0.5
"""If changes would exceed this fraction of the tensor's bytes, the whole tensor is sent."""


@attrs.frozen(kw_only=True, eq=False)
class Changes:
    """The changes of one tensor."""

    data: Tensor
    """uint8: all distances, then all values."""
    count: int
    """Number of elements sent, including the unchanged elements that bridge long distances."""
    width: int
    """Bytes per distance: 1 or 2."""


def words_of(tensor: Tensor) -> np.ndarray:
    """The elements of a contiguous tensor on the host as unsigned integers, [elements]; a view."""
    data = tensor.view(-1).view(torch.uint8).numpy()
    return data.view(_WORDS.get(tensor.element_size(), np.uint8))


def take_changes(held: Tensor, new: Tensor) -> Changes | None:
    """Returns the changes from `held` to `new`, and updates `held` in place to equal `new`.

    Args:
        held: contiguous, on the host.
        new: contiguous, on the host, with the same shape and dtype.

    Returns:
        The changes, or None if the tensor should be sent whole.
    """
    held_words, new_words = words_of(held), words_of(new)
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(new_words), _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        found.append(np.flatnonzero(held_words[chunk] != new_words[chunk]) + start)
    positions = np.concatenate(found)
    held_words[positions] = new_words[positions]
    steps = np.diff(positions, prepend=-1)
    width = min((1, 2), key=lambda width: _size(steps, width, new_words.itemsize))
    if _size(steps, width, new_words.itemsize) > WORTH_SENDING * new_words.nbytes:
        return None
    steps = _filled(steps, width)
    values = new_words[np.cumsum(steps) - 1]
    data = np.concatenate([steps.astype(_WORDS[width]).view(np.uint8), values.view(np.uint8)])
    return Changes(data=torch.from_numpy(data), count=len(steps), width=width)


def apply_changes(tensor: Tensor, changes: Changes) -> None:
    """Applies the changes to `tensor` (contiguous, on the host) in place. Raises WeightSyncError if the changes do not
    fit the tensor."""
    words, data = words_of(tensor), changes.data.numpy()
    middle = changes.count * changes.width
    if changes.width not in (1, 2) or len(data) != middle + changes.count * words.itemsize:
        raise WeightSyncError(
            f"got {len(data)} bytes; expected {changes.count} changes of {words.itemsize}-byte elements"
        )
    steps = np.frombuffer(data[:middle].tobytes(), _WORDS[changes.width])
    positions = np.cumsum(steps, dtype=np.int64) - 1
    if changes.count and not 0 <= positions[0] <= positions[-1] < len(words):
        outside = positions[0] if positions[0] < 0 else positions[-1]
        raise WeightSyncError(f"got a change at element {outside}; expected 0 to {len(words) - 1}")
    words[positions] = np.frombuffer(data[middle:].tobytes(), words.dtype)


def _longest(width: int) -> int:
    return 256**width - 1


def _size(steps: np.ndarray, width: int, word_bytes: int) -> int:
    return (len(steps) + int(((steps - 1) // _longest(width)).sum())) * (width + word_bytes)


def _filled(steps: np.ndarray, width: int) -> np.ndarray:
    """Replaces each distance that needs more than `width` bytes by several shorter distances."""
    longest = _longest(width)
    num_fillers = (steps - 1) // longest
    filled = np.full(len(steps) + int(num_fillers.sum()), longest, np.int64)
    filled[np.cumsum(num_fillers + 1) - 1] = steps - num_fillers * longest
    return filled
