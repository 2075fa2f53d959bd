"""What changed of a tensor between two versions, in few bytes: distances between changed elements, then their values.

Elements are compared as bits, whatever their dtype, so what is made of them is the new tensor bit for bit. A distance
takes one or two bytes, whichever is less for the tensor; a longer one is filled with elements that did not change. At
the learning rates of reinforcement learning one or two in a hundred bfloat16 elements change in a step, and a change
then takes 3 bytes and a little.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.errors import WeightSyncError

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by their bytes: what elements are compared and sent as."""
_CHUNK_ELEMENTS = 1 << 22
WORTH_SENDING = 0.5
"""Changes that take more of the tensor's bytes than this are not sent: the tensor is."""


@attrs.frozen(kw_only=True, eq=False)
class Changes:
    """Of one tensor."""

    data: Tensor
    """uint8: all distances, then all values."""
    count: int
    """Elements that are sent."""
    width: int
    """Bytes of a distance, 1 or 2."""


def words_of(tensor: Tensor) -> np.ndarray:
    """The elements of a contiguous tensor on the host as unsigned integers, [elements]; a view."""
    data = tensor.view(-1).view(torch.uint8).numpy()
    return data.view(_WORDS.get(tensor.element_size(), np.uint8))


def take_changes(held: Tensor, new: Tensor) -> Changes | None:
    """What must change in `held` to make it `new`; afterwards `held` is `new`.

    Args:
        held: contiguous, on the host.
        new: likewise, of the same shape and dtype.

    Returns:
        None where so much has changed that the tensor is better sent whole.
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
    """Makes the changes in `tensor`, contiguous and on the host. Raises WeightSyncError where they are not of such a
    tensor."""
    words, data = words_of(tensor), changes.data.numpy()
    middle = changes.count * changes.width
    if changes.width not in (1, 2) or len(data) != middle + changes.count * words.itemsize:
        raise WeightSyncError(f"{len(data)} bytes are not {changes.count} changes of {words.itemsize} bytes each")
    steps = np.frombuffer(data[:middle].tobytes(), _WORDS[changes.width])
    positions = np.cumsum(steps, dtype=np.int64) - 1
    if changes.count and not 0 <= positions[0] <= positions[-1] < len(words):
        raise WeightSyncError(f"changes reach element {positions[-1]} of a tensor of {len(words)}")
    words[positions] = np.frombuffer(data[middle:].tobytes(), words.dtype)


def _longest(width: int) -> int:
    return 256**width - 1


def _size(steps: np.ndarray, width: int, word_bytes: int) -> int:
    return (len(steps) + int(((steps - 1) // _longest(width)).sum())) * (width + word_bytes)


def _filled(steps: np.ndarray, width: int) -> np.ndarray:
    """The same way in steps that `width` bytes hold."""
    longest = _longest(width)
    num_fillers = (steps - 1) // longest
    filled = np.full(len(steps) + int(num_fillers.sum()), longest, np.int64)
    filled[np.cumsum(num_fillers + 1) - 1] = steps - num_fillers * longest
    return filled
