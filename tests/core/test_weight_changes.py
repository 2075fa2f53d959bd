"""Changes of a tensor are applied bit for bit and have the stated size. Changes made for another tensor are refused."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_core.errors import WeightSyncError
from rl_core.rank_kit.weight_changes import Changes, apply_changes, take_changes, words_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def made_slowly(tensor: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Applies one change after the other, in plain Python."""
    data, size = bytes(changes.data.numpy()), tensor.element_size()
    made = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    at, middle = -1, changes.count * changes.width
    for i in range(changes.count):
        at += int.from_bytes(data[i * changes.width : (i + 1) * changes.width], "little")
        made[at * size : (at + 1) * size] = data[middle + i * size : middle + (i + 1) * size]
    return torch.frombuffer(made, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return np.array_equal(words_of(one), words_of(other))


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_elements=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.002, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
@example(dtype=torch.bfloat16, num_elements=200_000, share=0.00001, seed=0)
def test_a_tensor_with_its_changes_applied_equals_the_new_tensor_bit_for_bit(dtype, num_elements, share, seed):
    random = np.random.default_rng(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    bits = random.integers(0, top, num_elements * size, dtype=np.uint8)
    new_bits = np.where(
        np.repeat(random.random(num_elements) < share, size), random.integers(0, top, len(bits), np.uint8), bits
    )
    old, new = (torch.from_numpy(each.copy()).view(dtype) for each in (bits, new_bits))
    held = old.clone()
    changes = take_changes(held, new)
    assert same_bits(held, new)
    num_changed = int((words_of(old) != words_of(new)).sum())
    if changes is None:
        assert num_changed * (1 + size) > 0.3 * num_elements * size
        return
    assert changes.data.numel() <= 0.5 * new.nbytes
    made = old.clone()
    apply_changes(made, changes)
    assert same_bits(made, new)
    assert same_bits(made_slowly(old, changes), new)


def test_changes_are_found_by_bits_and_not_by_values():
    old = torch.tensor([0.0, float("nan"), 1.0] + [2.0] * 40)
    new = torch.tensor([-0.0, float("nan"), 1.0] + [2.0] * 40)
    new.view(torch.int32)[1] ^= 1
    changes = take_changes(old.clone(), new)
    assert changes is not None
    assert changes.count == 2
    apply_changes(old, changes)
    assert same_bits(old, new)


@pytest.mark.parametrize(("distance", "count", "width"), [(254, 2, 1), (255, 2, 1), (2000, 2, 2), (70_000, 3, 2)])
def test_long_distances_take_two_bytes_or_an_extra_element(distance, count, width):
    """The elements 0 and `distance` change: distances up to 255 fit into one byte and up to 65,535 into two."""
    new = torch.zeros(80_000, dtype=torch.bfloat16)
    new[[0, distance]] = 1.0
    changes = take_changes(torch.zeros_like(new), new)
    assert changes is not None
    assert (changes.count, changes.width) == (count, width)
    assert changes.data.numel() == count * (width + 2)


def test_changes_of_a_fiftieth_of_a_bfloat16_tensor_take_less_than_4_percent_of_its_bytes():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 20, generator=generator).to(torch.bfloat16)
    new = torch.where(torch.rand(old.shape, generator=generator) < 0.02, old + 1, old)
    changes = take_changes(old.clone(), new)
    assert changes is not None
    assert changes.data.numel() < 0.04 * old.nbytes


def test_an_unchanged_tensor_has_no_changes():
    tensor = torch.randn(50)
    changes = take_changes(tensor.clone(), tensor)
    assert changes is not None
    assert (changes.count, changes.data.numel()) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 3}, "got 8 bytes; expected 3 changes of 4-byte"),
        ({"width": 4}, "expected 1 changes"),
        ({"data": torch.tensor([200, 0, 0, 0, 0], dtype=torch.uint8), "count": 1, "width": 1}, "at element 199"),
        ({"data": torch.zeros(5, dtype=torch.uint8), "count": 1, "width": 1}, "at element -1"),
    ],
)
def test_changes_of_another_tensor_are_refused(wrong, message):
    changes = Changes(data=torch.zeros(8, dtype=torch.uint8), count=1, width=1)
    with pytest.raises(WeightSyncError, match=message):
        apply_changes(torch.zeros(100), attrs.evolve(changes, **wrong))
