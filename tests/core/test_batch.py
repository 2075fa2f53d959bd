"""The token stream: a batch's invariants, and how it survives selecting, splitting, padding and saving."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rl_core.batch import Batch, PaddedBatch, dtypes_of, field_of, offsets_of
from rl_core.columns import FIELDS
from rl_core.errors import DataError, ShapeError


def column_of(name: str, lengths: list[int], generator: torch.Generator) -> torch.Tensor:
    field = field_of(name)
    shape = (sum(lengths) if field.axes[0] == "T" else len(lengths), *(2, 3)[: len(field.axes) - 1])
    values = torch.randint(0, 100, shape, generator=generator)
    dtype = dtypes_of(name)[0]
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


@st.composite
def batches(draw) -> Batch:
    """One to eight sequences with `tokens` and any subset of the other columns."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
    names = draw(st.sets(st.sampled_from([*FIELDS, "x_quantile"]))) | {"tokens"}
    counted = {name for name in names if field_of(name).counted_by}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    columns = {name: column_of(name, lengths, generator) for name in sorted(names - counted)}
    for name in counted:
        counts_T = column_of(str(field_of(name).counted_by), lengths, generator) % 4
        size = (int(counts_T.sum()),)
        columns |= {
            str(field_of(name).counted_by): counts_T,
            name: torch.randint(0, 100, size, generator=generator).int(),
        }
    return Batch(offsets_of(lengths), columns)


def require_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.offsets, other.offsets)
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


TWO = [
    {"tokens": [5, 6, 7], "sampled": [False, True, True], "rewards": [0, 0, 1], "group_id": 4},
    {"tokens": [8, 9], "sampled": [False, False], "rewards": [0.0, 0.5], "group_id": 4},
]


# --- the stream -----------------------------------------------------------------------------------------------------


def test_sequences_lie_end_to_end():
    batch = Batch.from_sequences(TWO)
    assert (batch.num_sequences, batch.num_tokens) == (2, 5)
    assert batch.offsets.tolist() == [0, 3, 5]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.sequence_index.tolist() == [0, 0, 0, 1, 1]
    assert batch["tokens"].tolist() == [5, 6, 7, 8, 9]
    assert batch["rewards"].dtype == torch.float32
    assert batch["group_id"].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("largest", "dtype"), [(255, torch.uint8), (256, torch.int16), (383, torch.int16), (2**15 - 1, torch.int16)]
)
@pytest.mark.parametrize("given", [list, np.array, torch.tensor])
def test_expert_numbers_take_the_first_dtype_that_holds_all_of_them(largest, dtype, given):
    routes = [[[[0], [7]]], [[[largest], [1]], [[2], [3]]]]
    batch = Batch.from_sequences([{"tokens": [1] * len(part), "routed_experts": given(part)} for part in routes])
    assert batch["routed_experts"].dtype == dtype
    assert batch["routed_experts"].tolist() == [token for part in routes for token in part]


def test_the_prompt_ends_before_the_first_sampled_token():
    assert Batch.from_sequences(TWO).prompt_lengths.tolist() == [1, 2]
    turns = [{"tokens": [1, 2, 3, 4], "sampled": [False, True, False, True]}, {"tokens": [1], "sampled": [True]}]
    assert Batch.from_sequences(turns).prompt_lengths.tolist() == [1, 0]


def test_selecting_takes_sequences_in_the_order_given_with_repeats():
    batch = Batch.from_sequences(TWO).select([1, 0, 1])
    assert batch["tokens"].tolist() == [8, 9, 5, 6, 7, 8, 9]
    assert batch.offsets.tolist() == [0, 2, 5, 7]


@given(batches(), st.data())
def test_neighbours_are_selected_without_a_copy(batch, data):
    first = data.draw(st.integers(0, batch.num_sequences - 1))
    end = data.draw(st.integers(first + 1, batch.num_sequences))
    selected = batch.select(range(first, end))
    backwards = batch.select(list(reversed(range(first, end))))
    require_equal(selected, backwards.select(list(reversed(range(end - first)))))
    assert selected["tokens"].untyped_storage().data_ptr() == batch["tokens"].untyped_storage().data_ptr()
    assert (selected is batch) == (end - first == batch.num_sequences)


KEPT = [
    {"tokens": [5, 6, 7], "kept_counts": [0, 3, 1], "kept_ids": [6, 1, 2, 7]},
    {"tokens": [8, 9], "kept_counts": [0, 2], "kept_ids": [9, 3]},
]


def test_the_entries_of_a_column_with_several_per_token_follow_their_tokens():
    batch = Batch.from_sequences(KEPT)
    assert batch["kept_ids"].tolist() == [6, 1, 2, 7, 9, 3]
    assert batch.select([1, 0, 1])["kept_ids"].tolist() == [9, 3, 6, 1, 2, 7, 9, 3]
    assert batch.select([1])["kept_ids"].tolist() == [9, 3]
    assert batch.rows_of("kept_ids", torch.tensor([4, 2, 0, 1]), torch.tensor([])).tolist() == [4, 5, 3, 0, 1, 2]
    padded = batch.to_padded(pad_token_id=0)
    assert padded.columns["kept_counts"].tolist() == [[0, 3, 1], [0, 0, 2]]
    require_equal(Batch.from_padded(padded), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept_ids": [6, 1, 2]}, "sequence 0: kept_ids has 3 entries for 4 kept_counts in all"),
        ({"kept_ids": 7}, "sequence 0: kept_ids is 7; expected a list"),
    ],
)
def test_entries_that_their_counts_do_not_explain_are_refused(change, message):
    with pytest.raises(ShapeError, match=message):
        Batch.from_sequences([{**KEPT[0], **change}, KEPT[1]])
    batch = Batch.from_sequences(KEPT)
    with pytest.raises(ShapeError, match=r"kept_ids: expected \[E\] with E = 6, got \(5,\)"):
        batch.with_columns(kept_ids=batch["kept_ids"][1:])
    with pytest.raises(ShapeError, match="kept_ids: this batch has no column 'kept_counts', which counts its entries"):
        batch.without_columns("kept_counts")


def test_a_batch_is_not_changed_by_the_batches_made_of_it():
    batch = Batch.from_sequences(TWO)
    more = batch.with_columns(returns=torch.zeros(5))
    assert "returns" not in more.without_columns("returns", "values")
    assert "returns" in more
    assert "returns" not in batch


@given(batches())
def test_splitting_and_concatenating_give_the_batch_back(batch):
    sizes = [1] * batch.num_sequences
    require_equal(Batch.concat(batch.split(sizes)), batch)


@given(batches(), st.randoms())
def test_a_permutation_and_its_inverse_give_the_batch_back(batch, random):
    order = list(range(batch.num_sequences))
    random.shuffle(order)
    require_equal(batch.select(order).select(torch.tensor(order).argsort()), batch)


@given(batches())
def test_a_saved_batch_loads_unchanged(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    batch.save(path)
    require_equal(Batch.load(path), batch)


def test_columns_that_share_memory_are_saved(tmp_path):
    batch = Batch.from_sequences(TWO)
    batch = batch.with_columns(loss_mask=batch["sampled"])
    batch.save(tmp_path / "batch.safetensors")
    require_equal(Batch.load(tmp_path / "batch.safetensors"), batch)


def test_a_cut_off_file_is_refused(tmp_path):
    path = tmp_path / "batch.safetensors"
    Batch.from_sequences(TWO).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="not a complete batch file"):
        Batch.load(path)


# --- the rectangle --------------------------------------------------------------------------------------------------


def test_sequences_are_padded_on_the_left_to_the_longest():
    padded = Batch.from_sequences(TWO).to_padded(pad_token_id=99)
    assert padded.columns["tokens"].tolist() == [[5, 6, 7], [99, 8, 9]]
    assert padded.attention_mask.tolist() == [[True, True, True], [False, True, True]]
    assert padded.columns["sampled"].tolist() == [[False, True, True], [False, False, False]]
    assert padded.columns["group_id"].tolist() == [4, 4]


def test_long_prompts_with_short_responses_do_not_widen_the_rectangle():
    def sequence(prompt: int, response: int) -> dict:
        return {"tokens": [1] * (prompt + response), "sampled": [False] * prompt + [True] * response}

    padded = Batch.from_sequences([sequence(10, 90), sequence(90, 10)]).to_padded(pad_token_id=0)
    assert padded.attention_mask.shape == (2, 100)  # would be 180 if prompts and responses were padded separately
    assert padded.columns["sampled"][:, -10:].all()


def test_padding_has_policy_version_minus_one():
    batch = Batch.from_sequences([{"tokens": [1], "policy_version": [3]}, {"tokens": [1, 2], "policy_version": [3, 4]}])
    assert batch.to_padded(pad_token_id=0).columns["policy_version"].tolist() == [[-1, 3], [3, 4]]


@given(batches(), st.integers(0, 100))
def test_the_stream_comes_back_from_the_rectangle(batch, pad_token_id):
    require_equal(Batch.from_padded(batch.to_padded(pad_token_id=pad_token_id)), batch)


def test_rectangles_padded_on_both_sides_can_be_read():
    mask = torch.tensor([[False, True, True, False], [True, True, True, True]])
    tokens = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6]])
    batch = Batch.from_padded(PaddedBatch(attention_mask=mask, columns={"tokens": tokens}))
    assert batch["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.offsets.tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[True, True], [False, False]], "row 1 has no tokens"),
        ([[], []], r"got no tokens, shape \[2, 0\]; expected at least one per row"),
        ([[True, False, True], [True, True, True]], "row 0 has padding between its tokens"),
        ([[1, 1], [1, 0]], r"expected bool \[N, W\], got torch.int64 \[2, 2\]; convert .* with .bool\(\)"),
    ],
)
def test_a_wrong_attention_mask_is_refused(mask, message):
    mask = torch.tensor(mask, dtype=None if mask[0] else torch.bool)
    with pytest.raises(ShapeError, match=message):
        Batch.from_padded(
            PaddedBatch(attention_mask=mask, columns={"tokens": torch.zeros(mask.shape, dtype=torch.int64)})
        )


def test_a_mask_that_is_not_a_tensor_is_refused():
    mask: Any = [[True, True]]
    with pytest.raises(ShapeError, match="attention_mask: expected a bool tensor"):
        Batch.from_padded(PaddedBatch(attention_mask=mask, columns={"tokens": torch.zeros(1, 2, dtype=torch.int64)}))


@pytest.mark.parametrize("given", [[[5, 6]], np.array([[5, 6]])])
def test_a_column_that_is_not_a_tensor_is_refused(given):
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"tokens: expected a tensor, got (list|ndarray); .*torch\.as_tensor"):
        Batch.from_padded(PaddedBatch(attention_mask=mask, columns={"tokens": given}))
    with pytest.raises(ShapeError, match=r"advantages: expected a tensor, got (list|ndarray)"):
        Batch.from_sequences(TWO).with_columns(advantages=given)


@pytest.mark.parametrize("wrong", [torch.tensor([False, True]), [True, False], [0.0], 1, [[0]]])
def test_only_indices_select_sequences(wrong):
    with pytest.raises(ShapeError, match=r"select: expected indices.*nonzero\(\)"):
        Batch.from_sequences(TWO).select(wrong)


def test_a_column_of_another_shape_than_the_mask_is_refused():
    columns = {"tokens": torch.zeros(1, 3, dtype=torch.int64)}
    with pytest.raises(ShapeError, match=r"tokens: expected \[1, 2\] like the attention mask, got \[1, 3\]"):
        Batch.from_padded(PaddedBatch(attention_mask=torch.ones(1, 2, dtype=torch.bool), columns=columns))


# --- what is refused ------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("offsets", "columns", "message"),
    [
        ([0, 3], {}, "needs the column 'tokens'"),
        ([0, 1, 1, 3], {"tokens": TOKENS}, "must start at 0 and increase strictly"),
        ([1, 3], {"tokens": TOKENS}, "must start at 0 and increase strictly"),
        ([0], {"tokens": TOKENS}, r"expected int64 \[N\+1\]"),
        ([0, 4], {"tokens": TOKENS}, r"tokens: expected \[T\] with T = 4, got \(3,\)"),
        ([0, 3], {"tokens": TOKENS, "group_id": TOKENS}, r"group_id: expected \[N\] with N = 1"),
        ([0, 3], {"tokens": TOKENS.int()}, "tokens: expected torch.int64, got torch.int32"),
        ([0, 3], {"tokens": TOKENS, "reward": TOKENS.float()}, r"'reward' is not a column.*Did you mean 'rewards'"),
        ([0, 3], {"tokens": TOKENS, "x_mask": TOKENS.byte()}, "x_mask: expected"),
    ],
)
def test_a_wrong_batch_cannot_be_built(offsets, columns, message):
    with pytest.raises(ShapeError, match=message):
        Batch(torch.tensor(offsets), columns)


def test_wrong_sequences_are_named():
    with pytest.raises(ShapeError, match="got no sequences"):
        Batch.from_sequences([])
    with pytest.raises(ShapeError, match="sequence 1 has no 'sampled', but sequence 0 does"):
        Batch.from_sequences([TWO[0], {"tokens": [1], "rewards": [0], "group_id": 1}])
    with pytest.raises(ShapeError, match="sequence 0: sampled has 1 entries for 2 tokens"):
        Batch.from_sequences([{"tokens": [1, 2], "sampled": [True]}])
    with pytest.raises(ShapeError, match="sequence 1 has no tokens; leave it out"):
        Batch.from_sequences([{"tokens": [1]}, {"tokens": []}])
    with pytest.raises(ShapeError, match="sequence 1 has no column 'tokens'"):
        Batch.from_sequences([{"tokens": [1]}, {"sampled": []}])


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ({"tokens": [1, 2]}, "expected a list of mappings .* got an item of type str"),
        ([[1, 2]], "expected a list of mappings .* got an item of type list"),
        ([{"tokens": 3}], "sequence 0: tokens is 3; expected a list with one value per token"),
        ([{"tokens": "ab"}], "sequence 0: tokens is 'ab'; expected a list"),
        ([{"tokens": [1, 2], "rewards": 1.0}], "sequence 0: rewards is 1.0; expected a list"),
        ([{"tokens": [1, 2], "rollout_logprobs": None}], "sequence 0: rollout_logprobs is None; expected a list"),
    ],
)
def test_a_value_that_is_not_a_list_is_named(sequences: Any, message: str):
    with pytest.raises(ShapeError, match=message):
        Batch.from_sequences(sequences)


@pytest.mark.parametrize("given", [list, np.array])
@pytest.mark.parametrize("wrong", [0.5, 2, -1, math.nan, "False"])
def test_a_mask_takes_only_truth_values(wrong: Any, given: Any):
    with pytest.raises(ShapeError, match=r"sequence 1: loss_mask has .*; expected True or False, or 1 or 0"):
        Batch.from_sequences(
            [{"tokens": [1], "loss_mask": [1]}, {"tokens": [1, 2], "loss_mask": given([wrong, wrong])}]
        )
    with pytest.raises(ShapeError, match="is_last_step"):
        Batch.from_sequences([{"tokens": [1], "is_last_step": wrong}])
    zeros_and_ones = Batch.from_sequences([{"tokens": [1, 2], "loss_mask": given([0.0, 1.0])}])
    assert zeros_and_ones["loss_mask"].tolist() == [False, True]


@pytest.mark.parametrize("index", [2, -3])
def test_a_sequence_outside_the_batch_is_named(index: int):
    with pytest.raises(ShapeError, match=f"sequence {index} is not in a batch of 2 sequences"):
        Batch.from_sequences(TWO).select([0, index])


def test_a_batch_that_cannot_be_written_is_an_error_of_the_file(tmp_path: Path):
    with pytest.raises(OSError, match="missing/batch: the batch cannot be written"):
        Batch.from_sequences(TWO).save(tmp_path / "missing" / "batch")


def test_a_group_id_that_is_text_is_refused():
    with pytest.raises(ShapeError, match="sequence 1: group_id is the text 'b'; expected a number"):
        Batch.from_sequences([{"tokens": [1], "group_id": 0}, {"tokens": [1], "group_id": "b"}])


@pytest.mark.parametrize("given", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("routed_experts", [[[0]], [[2**15]]], "routed_experts: 32768 does not fit into torch.int16"),
        ("routed_experts", [[[-(2**15) - 1]], [[0]]], "routed_experts: -32769 does not fit into torch.int16"),
        ("policy_version", [2**31, -1], "policy_version: 2147483648 does not fit into torch.int32"),
    ],
)
def test_a_number_that_a_column_cannot_hold_is_named(name, values, message, given):
    with pytest.raises(ShapeError, match=message):
        Batch.from_sequences([{"tokens": [1, 2], name: given(values)}])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": [1.0, 1.5]}, "tokens: got 1.5; expected whole numbers"),
        ({"tokens": [1, math.nan]}, "tokens: got nan; expected whole numbers"),
        ({"group_id": 0.25}, "group_id: got 0.25; expected whole numbers"),
        ({"group_id": 2**70}, f"group_id: {2**70} does not fit into torch.int64"),
    ],
)
def test_a_number_that_an_integer_column_would_change_is_refused(values, message):
    with pytest.raises(ShapeError, match=message):
        Batch.from_sequences([{"tokens": [1, 2], **values}])
    assert Batch.from_sequences([{"tokens": [1.0, 2.0], "group_id": 3.0}])["group_id"].tolist() == [3]


def test_errors_name_missing_columns_and_sizes_that_do_not_fit():
    batch = Batch.from_sequences(TWO)
    with pytest.raises(ShapeError, match=r"no column 'reward'.*Did you mean 'rewards'"):
        batch["reward"]
    with pytest.raises(ShapeError, match=r"batch 1 differs from batch 0 in columns \['rewards'\]"):
        Batch.concat([batch, batch.without_columns("rewards")])
    with pytest.raises(ShapeError, match="got no batches"):
        Batch.concat([])
    with pytest.raises(ShapeError, match="sizes sum to 3, the batch has 2"):
        batch.split([1, 2])


def test_arrays_without_offsets_are_refused(tmp_path: Path):
    with pytest.raises(ShapeError, match="'offsets' is missing among tokens"):
        Batch.from_arrays({"tokens": np.zeros(3, np.int64)})
    save_file({"tokens": torch.zeros(3, dtype=torch.int64)}, tmp_path / "batch.safetensors")
    with pytest.raises(ShapeError, match="'offsets' is missing among tokens"):
        Batch.load(tmp_path / "batch.safetensors")
