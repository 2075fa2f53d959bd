"""Reads the rows of data files and data sets."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from rl_core.data_sets import is_data_set, read_data_set
from rl_core.errors import DataError
from rl_core.interfaces import decoded_messages, require_messages, split_pair
from rl_core.remote_files import is_remote, opened
from rl_core.stored_files import is_found
from rl_core.trainer.groups import DataRow

logger = logging.getLogger(__name__)


FORMATS = (".parquet", ".jsonl", ".json", ".csv")
"""File name suffixes of data files."""
_ROWS_READ = 128
"""Rows that are read at a time from a Parquet file. pyarrow reads a nested column only up to 2 GiB at a time."""
_STRUCTURED = ("messages", "reward_spec", "reward_model", "extra_info")
"""Columns that hold nested values. In CSV files, their cells are parsed as JSON."""


_PADDED = ("tools", "functions", "chat_template_kwargs")
"""Columns of Parquet files and data sets in which a field that is None is missing."""


def is_at_hand(path: str) -> bool:
    """Whether the path is an existing local file, a remote file or a data set, so that no recipe has to create it."""
    return (is_found(path) and Path(path).is_file()) or is_remote(path) or is_data_set(path)


def read_rows(
    paths: Sequence[str | Path],
    *,
    key: str,
    prompt_key: str = "prompt",
    asks_in_chat: bool = False,
    refused: list[DataError] | None = None,
) -> list[DataRow]:
    """Reads, in order, all rows of files and of data sets (`rl_core.data_sets`). Files have the format Parquet,
    JSON-lines, JSON or CSV, and are local or at an address that fsspec supports.

    Args:
        paths: files and names of data sets.
        key: the configuration key that names the files, for messages.
        prompt_key: the column that holds the prompt.
        asks_in_chat: whether a prompt of text becomes the user's message of a conversation.
        refused: a list that gets the errors of rows without a usable prompt, which are left out; None: such an error is
            raised.

    Raises:
        DataError: a file is missing, unreadable or empty; a row has no usable prompt; or `paths` is empty. The message
            names the file and, if a single row is at fault, the row.
        ConfigError: a package needed to read the data is not installed, a data set does not exist or cannot be loaded,
            or the store of a remote file cannot be accessed.
    """
    rows: list[DataRow] = []
    for path in map(str, paths):
        if not is_at_hand(path):
            raise DataError(
                f"{path} does not exist. Set {key} to the path of a {', '.join(FORMATS[:-1])} or .csv file", key=key
            )
        count = len(rows)
        try:
            read = _unpadded(_read(path, key)) if _pads(path) else _read(path, key)
            for number, row in read:
                try:
                    rows.append(checked_row(row, f"{path}:{number}", prompt_key, asks_in_chat=asks_in_chat))
                except DataError as error:
                    if refused is None:
                        raise
                    refused.append(error)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}", key=key) from error
        if len(rows) == count:
            raise refused[0] if refused else DataError(f"{path} has no rows", key=key)
    if not rows:
        raise DataError("got no file; set it to one or more data files", key=key)
    return rows


def _read(path: str, key: str) -> Iterator[tuple[int, Any]]:
    """Yields rows with their numbers as in `DataRow.place`. Skips blank lines of JSON-lines files."""
    if is_data_set(path):
        yield from enumerate(read_data_set(path, key=key), start=1)
        return
    read = {".parquet": _read_parquet, ".jsonl": _read_lines, ".json": _read_json, ".csv": _read_csv}
    suffix = PurePosixPath(path).suffix
    if suffix not in read:
        raise DataError(
            f"{path}: the suffix {suffix!r} is not a known format; use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        )
    with opened(path) as file:
        yield from read[suffix](file, path)


def _pads(path: str) -> bool:
    """Whether the file or data set stores structures in columns: then all structures of a column have the same fields,
    and a field that one lacks is None."""
    return is_data_set(path) or PurePosixPath(path).suffix == ".parquet"


def _unpadded(rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Removes fields that are None from tools, template settings and messages with calls, where even arguments have the
    same names for all functions."""
    for number, row in rows:
        yield (
            number,
            {
                name: _without_none(value) if name in _PADDED or _has_calls(value) else value
                for name, value in row.items()
            },
        )


def _has_calls(value: Any) -> bool:
    keys = ("tool_calls", "function_call")
    return isinstance(value, list) and any(isinstance(part, dict) and any(map(part.get, keys)) for part in value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _read_lines(file: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        text = _decoded(line, f"{path}:{number}").strip()
        if text:
            yield number, _parse_json(text, f"{path}:{number}")


def _read_json(file: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    parsed = _parse_json(_decoded(file.read(), path), path)
    if not isinstance(parsed, list):
        raise DataError(f"{path}: expected a list of rows, got {type(parsed).__name__}")
    yield from enumerate(parsed, start=1)


def _read_csv(file: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    """Reads cells as text, or as JSON in the columns of `_STRUCTURED`. An empty cell in such a column counts as
    missing."""
    lines = io.StringIO(_decoded(file.read(), path), newline="")
    try:
        for number, row in enumerate(csv.DictReader(lines, strict=True), start=1):
            place = f"{path}:{number}"
            if None in row or None in row.values():
                raise DataError(f"{place}: has more or fewer cells than the first line has names")
            cells = {name: cell for name, cell in row.items() if cell or name not in _STRUCTURED}
            yield (
                number,
                {
                    name: _parse_json(cell, f"{place}, column {name}") if name in _STRUCTURED else cell
                    for name, cell in cells.items()
                },
            )
    except csv.Error as error:
        raise DataError(f"{path}: not a readable CSV file: {error}") from error


def _read_parquet(file: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        stored = pyarrow.parquet.ParquetFile(file)
        columns = stored.schema_arrow.names
        repeated = next((name for name in columns if columns.count(name) > 1), None)
        if repeated is not None:
            raise DataError(f"{path}: got two columns {repeated!r}; expected different names, so rename or remove one")
        number = 0
        for batch in stored.iter_batches(batch_size=_ROWS_READ):
            for row in batch.to_pylist():
                yield (number := number + 1), row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith(b"PAR1"):
            raise DataError(f"{place}: is a Parquet file; rename it to .parquet") from error
        raise DataError(
            f"{place}: not UTF-8 text (byte {error.start + 1} is {data[error.start]:#04x}); save the file as UTF-8"
        ) from error


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if "\n" not in text else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{place}: not valid JSON: {error.msg} ({where})") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or thousands of nested levels
        raise DataError(f"{place}: JSON that cannot be read: {error}") from error


def checked_row(row: Any, place: str, prompt_key: str = "prompt", *, asks_in_chat: bool = False) -> DataRow:
    """Returns the row with a column `prompt`. Raises DataError, with the place, if it has no usable prompt."""
    if isinstance(row, dict):
        row = _with_messages(row, place, prompt_key)
        if prompt_key == "prompt" and row.get("prompt") is None:
            row = _with_prompt(row, place)
    if not isinstance(row, dict) or prompt_key not in row:
        columns = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise DataError(
            f"{place}: expected a row with the column {prompt_key!r}, got {columns or 'an empty row'}"
            + (
                "; rename the prompt's column, or set data.prompt_key in a run; a conversation's column is 'messages'"
                if isinstance(row, dict) and row
                else ""
            )
        )
    prompt = row[prompt_key]
    if not isinstance(prompt, str) or prompt == "":
        prompt = require_messages(prompt, f"{place}: {prompt_key!r}")
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if any(has_lone_surrogate(text) for text in texts):
        shown = ascii(prompt)[:80]
        raise DataError(
            f"{place}: {prompt_key!r} has half of a surrogate pair, which no tokenizer can encode, got {shown}; remove "
            "it, or write both halves"
        )
    if asks_in_chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    row = {**row, "prompt": prompt}
    if "reward_model" in row and row.get("reward_spec") is None:
        row = {**row, "reward_spec": row["reward_model"]}  # verl's data sets call this column `reward_model`
    return DataRow(row, place)


def has_lone_surrogate(text: str) -> bool:
    """Whether text has a code point that UTF-8 cannot represent. In JSON, half of an emoji is such a code point, for
    example `\\ud83d`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _with_messages(row: dict[str, Any], place: str, prompt_key: str) -> dict[str, Any]:
    """Decodes conversations that are JSON text, as in CSV files; a completion only if the prompt is such text. Calls
    OpenAI's former `functions` `tools`, and ShareGPT's `conversations` `messages`; a column `system` beside them is the
    first message."""
    names = [name for name in (prompt_key, "messages", "conversations", "chosen", "rejected") if name in row]
    decoded = {**row, **{name: decoded_messages(row[name], f"{place}: {name!r}") for name in names}}
    if "completion" in row and decoded.get(prompt_key) is not row.get(prompt_key):
        decoded["completion"] = decoded_messages(row["completion"], f"{place}: 'completion'")
    row = decoded
    if row.get("tools") is None and _are_functions(row.get("functions")):
        row = {**row, "tools": row["functions"]}
    if row.get("conversations") is None or row.get("messages") is not None or row.get(prompt_key) is not None:
        return row
    messages = require_messages(row["conversations"], f"{place}: 'conversations'")
    if row.get("system") and messages[0]["role"] != "system":
        messages = require_messages([{"role": "system", "content": row["system"]}, *messages], f"{place}: 'system'")
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return {**row, "prompt": messages}
    return {**row, "messages": messages}


def _are_functions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and {"name", "parameters"} <= one.keys() for one in value
    )


def _with_prompt(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Adds `prompt` to a row that holds the prompt in another form, as in TRL's data sets: a whole conversation, two
    responses with the same beginning, or token ids. Token ids are not decoded: `prompt` only says how many there are.
    Returns other rows unchanged."""
    # In data with several layouts, a column that a row lacks is None.
    if row.get("messages") is not None:
        return _opened_conversation(row, place)
    if row.get("chosen") is not None and row.get("rejected") is not None:
        try:
            prompt, chosen, rejected = split_pair(row["chosen"], row["rejected"])
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        return {**row, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    if isinstance(row.get("input_ids"), list):
        return {**row, "prompt": f"{len(row['input_ids'])} token ids"}
    return row


def _opened_conversation(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Splits a whole conversation, as in TRL's data sets. If the last message is the assistant's, it is the completion,
    and the messages before it are the prompt. Otherwise, all messages are the prompt."""
    messages = require_messages(row["messages"], f"{place}: 'messages'")
    is_answered = messages[-1]["role"] == "assistant"
    prompt = messages[:-1] if is_answered else messages
    if not prompt:
        raise DataError(f"{place}: 'messages' has no message before the assistant's; add the prompt before it")
    is_completed = row.get("completion") is not None
    return {**row, "prompt": prompt, **({"completion": messages[-1:]} if is_answered and not is_completed else {})}
