from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.errors import DataError
from rl_core.trainer.data import DataRow, PromptSource, read_rows


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_all_formats_are_read_with_their_place(tmp_path: Path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", *rows)
    (tmp_path / "c.json").write_text(json.dumps(rows))
    read = read_rows([tmp_path / "a.parquet", tmp_path / "b.jsonl", tmp_path / "c.json"], key="data.train_data")
    assert [row.row for row in read] == [rows[0], *rows, *rows]
    assert read[2].place == f"{tmp_path / 'b.jsonl'}:2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"question": "b"}\n', r"d\.jsonl:2: expected a row with the column 'prompt', got question"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', r"d\.jsonl:2: 'prompt' must be text or a list of messages"),
        ('{"prompt": "a"}\n{"prompt": [{"role": "user"}]}\n', r"d\.jsonl:2: 'prompt' must be"),
        ('{"prompt": "a"}\n{"prompt": \n', r"d\.jsonl:2: not valid JSON: Expecting value \(column 11\)$"),
        ('{"prompt": "a"}\n\n  \n{"prompt": 3}\n', r"d\.jsonl:4: 'prompt' must be text"),
        ("\n\n", r"data\.train_data: .*d\.jsonl has no rows"),
        ("", r"data\.train_data: .*d\.jsonl has no rows"),
    ],
)
def test_a_bad_row_is_named_with_file_and_row(tmp_path: Path, content: str, message: str):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / "d.jsonl"], key="data.train_data")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="does not exist"):
        read_rows([tmp_path / "no.jsonl"], key="data.train_data")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=r"cut\.parquet: not a readable parquet file"):
        read_rows([tmp_path / "cut.parquet"], key="data.train_data")
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(DataError, match=r"\.csv is not a known format"):
        read_rows([tmp_path / "x.csv"], key="data.train_data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": "ä"}\n'.encode("latin-1"), r"d\.jsonl:2: not UTF-8 text \(byte 13"),
        ("d.jsonl", b"PAR1\x15\x00\xff\xfe", r"d\.jsonl:1: not UTF-8 text \(byte 7 is 0xff\)"),
        ("d.json", b'["\xe4"]', r"d\.json: not UTF-8 text"),
        ("d.json", b'[\n{"prompt": }]', r"d\.json: not valid JSON: Expecting value \(line 2, column 12\)"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / name], key="data.train_data")


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path: Path):
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    read = read_rows([tmp_path / "d.jsonl"], key="data.train_data")
    assert [row.place.rsplit(":")[-1] for row in read] == ["1", "3"]


def test_every_epoch_plays_each_row_once_in_an_order_that_depends_on_the_seed_alone():
    rows = [DataRow({"prompt": str(number)}, f"f:{number}") for number in range(20)]

    def order(seed: int, groups: range) -> list[str]:
        source = PromptSource(rows, seed=seed, shuffle=True)
        return [source.row(group).row["prompt"] for group in groups]

    first, second = order(1, range(20)), order(1, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(row.row["prompt"] for row in rows)
    assert first != second
    assert order(1, range(35, 40)) == second[15:]
    assert order(2, range(20)) != first
