"""A batch becomes arrays, as it is sent to another process, and becomes the same batch again."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import Batch, dtypes_of, offsets_of
from rl_core.columns import FIELDS


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """`tokens`, any other known columns, and a column that a loss's `prepare` computes, each in any of its dtypes."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    names = draw(st.sets(st.sampled_from(sorted(FIELDS))))
    columns = {}
    for name in ["tokens", *sorted(names - {"tokens", "kept_ids"}), "x_own"]:
        field = FIELDS.get(name, FIELDS["rewards"])
        sizes = {"T": sum(lengths), "N": len(lengths), "L": 2, "K": 3}
        shape = [sizes[axis] for axis in field.axes]
        dtype = draw(st.sampled_from(dtypes_of(name)))
        columns[name] = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    if "kept_counts" in names:
        columns["kept_ids"] = torch.arange(int(columns["kept_counts"].sum()), dtype=torch.int32)
    return Batch(offsets_of(lengths), columns)


@given(batches(), st.data())
def test_received_arrays_give_the_selected_batch(batch, data):
    sequences = data.draw(st.lists(st.integers(0, batch.num_sequences - 1), min_size=1, max_size=8))
    received = Batch.from_arrays(batch.to_arrays(np.array(sequences)))
    expected = batch.select(sequences)
    assert torch.equal(received.offsets, expected.offsets)
    assert list(received) == list(expected)
    for name in expected:
        assert received[name].dtype == expected[name].dtype
        assert torch.equal(received[name], expected[name])


def test_a_received_batch_is_a_view_of_its_arrays():
    batch = Batch.from_sequences([{"tokens": [1, 2, 3]}, {"tokens": [4]}])
    arrays = batch.to_arrays(np.array([1, 0]))
    for values in arrays.values():
        values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only arrays
        received = Batch.from_arrays(arrays)
    assert received["tokens"].data_ptr() == arrays["tokens"].ctypes.data


def test_only_the_named_columns_are_taken():
    batch = Batch.from_sequences([{"tokens": [1, 2, 3], "rewards": [0, 0, 1]}, {"tokens": [4], "rewards": [2]}])
    arrays = batch.to_arrays(np.array([1, 0]), ["rewards"])
    assert {name: values.tolist() for name, values in arrays.items()} == {"offsets": [0, 1, 4], "rewards": [2, 0, 0, 1]}
