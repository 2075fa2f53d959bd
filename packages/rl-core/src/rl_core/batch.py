"""The token stream: N sequences concatenated into one flat stream of T tokens.

Storage has no padding and no prompt/response split. Entry t of every per-token column belongs to token t:
`old_logprobs[t]` is log p(token t | previous tokens of its sequence). It is 0.0 at each sequence's first token, which
has no previous tokens and is never trained on. Columns are declared once, in `columns.FIELDS`; all code that selects,
concatenates, saves or sends a batch is generic over that table, so a new column needs only a row there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.columns import FIELDS, PREPARED, ROUTE_COLUMNS, Field
from rl_core.errors import DataError, ShapeError, nearest


@attrs.frozen(eq=False)
class Batch:
    """N sequences in one stream of T tokens. No method changes the batch; a batch that a method returns may be a view
    of it."""

    offsets: Tensor
    """int64 [N+1]. Sequence i is the slice offsets[i]:offsets[i+1] of the stream and has at least one token. offsets[0]
    is 0, and offsets[N] is T."""
    columns: Mapping[str, Tensor]
    """Column name → values. The column `tokens` is always present. The columns that a loss's `prepare` computes are
    named `x_…` and have one entry per token."""

    def __attrs_post_init__(self) -> None:
        _validate(self.offsets, self.columns)

    @classmethod
    def from_sequences(cls, sequences: Sequence[Mapping[str, Any]]) -> Batch:
        """Concatenates sequences. Each sequence maps column names to values: a list with one value per token, or one
        number for a per-sequence column. The columns of the batch are those of the first sequence.

        Raises:
            ShapeError: there are no sequences, a sequence has no tokens, a column is unknown, a sequence lacks a column
                of the first one, a per-token value is not a list, a list's length differs from the number of tokens, a
                per-sequence value is text, a value of an integer column is out of the column's range or is not a whole
                number, or a value of a bool column is not 0, 1 or a bool.
        """
        if not sequences:
            raise ShapeError("Batch.from_sequences: got no sequences")
        others = [sequence for sequence in sequences if not isinstance(sequence, Mapping)]
        if others:
            raise ShapeError(
                "Batch.from_sequences: expected a list of mappings from column names to values, such as "
                f"[{{'tokens': [5, 6]}}], got an item of type {type(others[0]).__name__}"
            )
        for i, sequence in enumerate(sequences):
            _require_list(i, "tokens", sequence.get("tokens", ()))
        without_tokens = [i for i, sequence in enumerate(sequences) if not len(sequence.get("tokens", ()))]
        if without_tokens:
            index = without_tokens[0]
            what = "no tokens; leave it out" if "tokens" in sequences[index] else "no column 'tokens'"
            raise ShapeError(f"Batch.from_sequences: sequence {index} has {what}")
        lengths = [len(sequence["tokens"]) for sequence in sequences]
        columns = {}
        for name in sequences[0]:
            missing = [i for i, sequence in enumerate(sequences) if name not in sequence]
            if missing:
                raise ShapeError(f"Batch.from_sequences: sequence {missing[0]} has no {name!r}, but sequence 0 does")
            dtypes, counted_by = dtypes_of(name), field_of(name).counted_by
            values = [sequence[name] for sequence in sequences]
            if field_of(name).axes[0] in "TE":
                for i, value in enumerate(values):
                    _require_list(i, name, value)
                due = lengths if counted_by is None else [int(sum(s.get(counted_by, ()))) for s in sequences]
                wrong = [i for i, (value, length) in enumerate(zip(values, due, strict=True)) if len(value) != length]
                if wrong:
                    i, what = wrong[0], "tokens" if counted_by is None else f"{counted_by} in all"
                    raise ShapeError(f"sequence {i}: {name} has {len(values[i])} entries for {due[i]} {what}")
                columns[name] = _laid_end_to_end(name, values, dtypes)
            else:
                columns[name] = _one_per_sequence(name, values, dtypes)
        return cls(offsets_of(lengths), columns)

    @property
    def num_sequences(self) -> int:
        """The number of sequences, N."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sequences together, T."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """int64 [N]: the number of tokens of each sequence."""
        return self.offsets.diff()

    @property
    def sequence_index(self) -> Tensor:
        """int64 [T]: the index of the sequence to which each token belongs."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 [N]: the number of tokens before a sequence's first sampled token; the sequence's length if none of its
        tokens was sampled."""
        position_T = torch.arange(self.num_tokens) - self.offsets[:-1][self.sequence_index]
        first_T = torch.where(self["sampled"], position_T, self.lengths[self.sequence_index])
        return torch.full_like(self.lengths, torch.iinfo(torch.int64).max).scatter_reduce(
            0, self.sequence_index, first_T, "amin"
        )

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise ShapeError(
                f"this batch has no column {name!r}; it has {', '.join(self.columns)}.{nearest(name, self.columns)}"
            )
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def with_columns(self, **columns: Tensor) -> Batch:
        """A batch with these columns added or replaced."""
        return Batch(self.offsets, {**self.columns, **columns})

    def without_columns(self, *names: str) -> Batch:
        """A batch without these columns. Missing names are ignored."""
        return Batch(self.offsets, {name: values for name, values in self.columns.items() if name not in names})

    def select(self, sequences: Sequence[int] | Tensor) -> Batch:
        """A batch of the given sequences (indices in any order, repeats allowed). It is a view if the indices are
        consecutive and ascending. Raises ShapeError for a mask, for indices that are not integers, and for an index
        outside the batch."""
        index = torch.as_tensor(sequences)
        if index.dim() != 1 or (len(index) and (index.dtype == torch.bool or index.is_floating_point())):
            raise ShapeError(
                f"Batch.select: expected indices of sequences, got {index.dtype} {list(index.shape)}; "
                "convert a mask with mask_N.nonzero()[:, 0]"
            )
        index = index.long()
        outside = index[(index < -self.num_sequences) | (index >= self.num_sequences)]
        if len(outside):
            raise ShapeError(
                f"Batch.select: sequence {int(outside[0])} is not in a batch of {self.num_sequences} sequences"
            )
        first, end = (int(index[0]), int(index[0]) + len(index)) if len(index) else (-1, -1)
        if 0 <= first < end <= self.num_sequences and torch.equal(index, torch.arange(first, end)):
            return self._neighbours(first, end)
        token_index = self.token_index(index)
        columns = {name: v[self.rows_of(name, token_index, index)] for name, v in self.columns.items()}
        return Batch(offsets_of(self.lengths[index]), columns)

    def rows_of(self, name: str, token_index: Tensor, sequences: Tensor) -> Tensor:
        """The rows of a column that belong to the tokens (a column with one row per sequence: to the sequences), int64.
        Both arguments are int64 indices, and the rows are in their order."""
        counted_by = field_of(name).counted_by
        if counted_by is None:
            return token_index if field_of(name).axes[0] == "T" else sequences
        return _within(offsets_of(self[counted_by]), token_index)

    def _neighbours(self, first: int, end: int) -> Batch:
        if end - first == self.num_sequences:
            return self
        offsets = self.offsets[first : end + 1]
        sequences = slice(first, end)
        columns = {}
        for name, values in self.columns.items():
            starts = self._starts(name)
            columns[name] = values[sequences if starts is None else slice(int(starts[first]), int(starts[end]))]
        return Batch(offsets - offsets[0], columns)

    def _starts(self, name: str) -> Tensor | None:
        """int64 [N+1]: where the rows of each sequence start in a column; None for a column with one per sequence."""
        field = field_of(name)
        if field.counted_by is not None:
            return offsets_of(self[field.counted_by])[self.offsets]
        return self.offsets if field.axes[0] == "T" else None

    def token_index(self, sequences: Tensor) -> Tensor:
        """Stream positions of all tokens of the given sequences, int64. `sequences` are int64 indices; the positions
        are in the order of `sequences`."""
        return _within(self.offsets, sequences)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenates batches. Raises ShapeError unless all batches have the same columns."""
        if not batches:
            raise ShapeError("Batch.concat: got no batches")
        names = set(batches[0].columns)
        for i, batch in enumerate(batches):
            if set(batch.columns) != names:
                raise ShapeError(
                    f"Batch.concat: batch {i} differs from batch 0 in columns {sorted(names ^ set(batch.columns))}"
                )
        lengths = torch.cat([batch.lengths for batch in batches])
        return Batch(offsets_of(lengths), {name: torch.cat([b[name] for b in batches]) for name in batches[0].columns})

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Splits the batch into consecutive batches, the i-th with sizes[i] sequences. Raises ShapeError unless the
        sizes sum to N."""
        if sum(sizes) != self.num_sequences:
            raise ShapeError(f"Batch.split: sizes sum to {sum(sizes)}, the batch has {self.num_sequences} sequences")
        return [self.select(part) for part in torch.arange(self.num_sequences).split(list(sizes))]

    def to_padded(self, *, pad_token_id: int) -> PaddedBatch:
        """Converts the sequences to left-padded rows, for models without packing and for other frameworks.

        The width W is the length of the longest sequence. Padding is `pad_token_id` in `tokens`, -1 in `policy_version`
        and 0 (False) in all other per-token columns. Columns with several entries per token (`Field.counted_by`) stay
        flat.
        """
        width = int(self.lengths.max())
        attention_mask = torch.arange(width) >= width - self.lengths[:, None]
        columns = {}
        for name, values in self.columns.items():
            if field_of(name).axes[0] == "T":
                fill = {"tokens": pad_token_id, "policy_version": -1}.get(name, 0)
                padded = values.new_full((*attention_mask.shape, *values.shape[1:]), fill)
                padded[attention_mask] = values
                values = padded
            columns[name] = values
        return PaddedBatch(attention_mask=attention_mask, columns=columns)

    @classmethod
    def from_padded(cls, padded: PaddedBatch) -> Batch:
        """Converts padded rows to a batch; the inverse of `to_padded`. Rows may have padding on the left, the right or
        both sides.

        Raises:
            ShapeError: a row has no tokens or has padding between tokens, or a column does not fit the mask.
        """
        mask = padded.attention_mask
        if not isinstance(mask, Tensor):
            raise ShapeError(f"attention_mask: expected a bool tensor [N, W], got {type(mask).__name__}")
        if mask.dtype != torch.bool or mask.dim() != 2:
            remedy = "; convert a mask of 0 and 1 with .bool()" if mask.dim() == 2 else ""
            raise ShapeError(f"attention_mask: expected bool [N, W], got {mask.dtype} {list(mask.shape)}{remedy}")
        if not mask.numel():
            raise ShapeError(f"attention_mask: got no tokens, shape {list(mask.shape)}; expected at least one per row")
        width = torch.arange(mask.shape[1])
        spans = torch.where(mask, width, -1).amax(1) - torch.where(mask, width, mask.shape[1]).amin(1) + 1
        wrong = (mask.sum(1) != spans).nonzero()
        if len(wrong):
            row = int(wrong[0])
            what = "padding between its tokens" if bool(mask[row].any()) else "no tokens"
            raise ShapeError(f"attention_mask: row {row} has {what}")
        columns = {}
        for name, values in padded.columns.items():
            if field_of(name).axes[0] == "T":
                _require_tensor(name, values)
                if values.shape[:2] != mask.shape:
                    raise ShapeError(
                        f"{name}: expected {list(mask.shape)} like the attention mask, got {list(values.shape)}"
                    )
                values = values[mask]
            columns[name] = values
        return cls(offsets_of(mask.sum(1)), columns)

    def to_arrays(self, sequences_M: np.ndarray, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Copies the offsets and columns of `select(sequences_M)` into numpy arrays, for sending a batch to another
        process. `names` are the columns to copy; None: all.

        Ray puts numpy arrays into shared memory, where other processes read them without a copy; it would pickle torch
        tensors. Sequences are copied one by one, which is several times faster than indexing their tokens.
        """
        offsets = self.offsets.numpy()
        starts_M, ends_M = offsets[sequences_M], offsets[sequences_M + 1]
        arrays = {"offsets": np.concatenate([[0], np.cumsum(ends_M - starts_M)])}
        for name in self.columns if names is None else names:
            column, starts = self[name].detach().cpu().numpy(), self._starts(name)
            if starts is None:
                arrays[name] = column[sequences_M]
                continue
            bounds = zip(starts.numpy()[sequences_M], starts.numpy()[sequences_M + 1], strict=True)
            arrays[name] = np.concatenate([column[start:end] for start, end in bounds])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Batch:
        """Builds a batch from the arrays that `to_arrays` returned; its tensors are views of them. Raises ShapeError if
        the arrays are not a valid batch."""
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return cls._of_tensors(tensors)

    def save(self, path: str | Path) -> None:
        """Writes the batch as one safetensors file. Raises OSError if it cannot be written."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        # Copies, because columns may share memory, which safetensors refuses: `loss_mask` may be `sampled` itself.
        tensors = {name: values.clone(memory_format=torch.contiguous_format) for name, values in self.columns.items()}
        metadata = {"rl_core.batch": json.dumps({"version": 1})}
        try:
            save_file({"offsets": self.offsets, **tensors}, path, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: the batch cannot be written ({error})") from error

    @classmethod
    def load(cls, path: str | Path) -> Batch:
        """Reads a batch written by `save`. Raises DataError if the file is incomplete, OSError if it cannot be read,
        and ShapeError if its contents are not a valid batch."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise DataError(f"{path}: not a complete batch file ({error}); write it again with Batch.save") from error
        return cls._of_tensors(tensors)

    @classmethod
    def _of_tensors(cls, tensors: dict[str, Tensor]) -> Batch:
        if "offsets" not in tensors:
            raise ShapeError(f"not a batch: 'offsets' is missing among {', '.join(tensors) or 'no tensors'}")
        return cls(tensors.pop("offsets"), tensors)


@attrs.frozen(kw_only=True, eq=False)
class PaddedBatch:
    """N sequences as rows of width W, including padding."""

    attention_mask: Tensor
    """bool [N, W]: True for tokens, False for padding."""
    columns: Mapping[str, Tensor]
    """The batch's columns. Per-token columns have the shape [N, W, …]."""


def field_of(name: str) -> Field:
    """The column's row of `FIELDS`, or `PREPARED` for a column `x_…` from a loss's `prepare`. Raises ShapeError for any
    other name."""
    if name.startswith("x_"):
        return PREPARED
    if name not in FIELDS:
        raise ShapeError(
            f"{name!r} is not a column of a batch (rl_core.columns.FIELDS lists them).{nearest(name, FIELDS)} "
            "A column from a loss's `prepare` is named 'x_…'"
        )
    return FIELDS[name]


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a column may have, the preferred one first."""
    return tuple(getattr(torch, dtype) for dtype in field_of(name).dtypes)


def token_inputs(batch: Batch) -> list[np.ndarray]:
    """The per-token columns that are inputs of a model (tokens and routes), each [T, …]. Two tokens are the same input
    if they have the same position in their sequences and equal values in all these columns."""
    return [batch[name].numpy() for name in ("tokens", *ROUTE_COLUMNS) if name in batch]


def _within(offsets: Tensor, index: Tensor) -> Tensor:
    """int64: the positions in the ranges offsets[i]:offsets[i+1], for each i of `index` in order."""
    starts, lengths = offsets[:-1][index], offsets.diff()[index]
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(offsets_of(lengths)[:-1], lengths)
    return torch.repeat_interleave(starts, lengths) + within


def offsets_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """int64 [N+1], the running sum of `lengths`, starting at 0."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


_NUMPY = {
    torch.int64: np.int64,
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.uint8: np.uint8,
}


def _one_per_sequence(name: str, values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Tensor:
    wrong = [(i, value) for i, value in enumerate(values) if isinstance(value, str)]
    if wrong:
        i, value = wrong[0]
        raise ShapeError(
            f"sequence {i}: {name} is the text {value!r}; expected a number. Replace equal texts by equal numbers"
        )
    if dtypes[0] == torch.int64:
        return _laid_end_to_end(name, [[value] for value in values], dtypes)
    if dtypes[0] == torch.bool:
        _require_truth_values(name, values)
    return torch.tensor(values, dtype=dtypes[0])


def _laid_end_to_end(name: str, values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Tensor:
    if dtypes[0] == torch.bool:
        _require_truth_values(name, values)
    if dtypes[0].is_floating_point or dtypes[0] == torch.bool:
        return torch.from_numpy(np.concatenate([np.asarray(v, _NUMPY[dtypes[0]]) for v in values]))
    whole = np.concatenate([np.asarray(v) for v in values])
    if whole.dtype.kind == "f" and len(fractions := whole[~np.isfinite(whole) | (whole != np.trunc(whole))]):
        raise ShapeError(f"{name}: got {fractions[0]}; expected whole numbers")
    smallest, largest = int(whole.min(initial=0)), int(whole.max(initial=0))
    for dtype in dtypes:
        if torch.iinfo(dtype).min <= smallest and largest <= torch.iinfo(dtype).max:
            return torch.from_numpy(whole.astype(_NUMPY[dtype]))
    widest = torch.iinfo(dtypes[-1])
    wrong = smallest if smallest < widest.min else largest
    raise ShapeError(f"{name}: {wrong} does not fit into {dtypes[-1]}, the widest dtype of this column")


def _require_list(i: int, name: str, value: object) -> None:
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise ShapeError(f"sequence {i}: {name} is {value!r}; expected a list with one value per token")


def _require_truth_values(name: str, values: Sequence[Any]) -> None:
    for i, value in enumerate(values):
        given = np.asarray(value).ravel()
        if given.dtype.kind == "b":
            continue
        wrong = given[(given != 0) & (given != 1)] if given.dtype.kind in "iuf" else given
        if len(wrong):
            raise ShapeError(f"sequence {i}: {name} has {wrong.tolist()[0]!r}; expected True or False, or 1 or 0")


def _require_tensor(name: str, values: object) -> None:
    if not isinstance(values, Tensor):
        raise ShapeError(f"{name}: expected a tensor, got {type(values).__name__}; convert it with torch.as_tensor")


def _validate(offsets: Tensor, columns: Mapping[str, Tensor]) -> None:
    _require_tensor("offsets", offsets)
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() < 2:
        raise ShapeError(f"offsets: expected int64 [N+1] with N >= 1, got {offsets.dtype} {tuple(offsets.shape)}")
    if int(offsets[0]) != 0 or bool((offsets.diff() <= 0).any()):
        raise ShapeError("offsets: must start at 0 and increase strictly; each sequence has at least one token")
    if "tokens" not in columns:
        raise ShapeError("a batch needs the column 'tokens'")
    sizes = {"T": int(offsets[-1]), "N": offsets.numel() - 1}
    for name, values in columns.items():
        field = field_of(name)
        _require_tensor(name, values)
        size = sizes.get(field.axes[0])
        if field.counted_by is not None:
            if field.counted_by not in columns:
                raise ShapeError(f"{name}: this batch has no column {field.counted_by!r}, which counts its entries")
            size = int(columns[field.counted_by].sum())
        if values.dim() != len(field.axes) or values.shape[0] != size:
            expected = f"[{field.axes}] with {field.axes[0]} = {size}"
            raise ShapeError(f"{name}: expected {expected}, got {tuple(values.shape)}")
        if values.dtype not in dtypes_of(name):
            raise ShapeError(f"{name}: expected {' or '.join(map(str, dtypes_of(name)))}, got {values.dtype}")
