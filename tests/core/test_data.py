from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_dataset

from rl_core.config import from_mapping
from rl_core.config.file_checks import gather_data
from rl_core.errors import ConfigError, DataError, Mistakes
from rl_core.trainer.before.data import _read_parquet, read_rows
from rl_core.trainer.groups import DataRow, PromptSource


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_parquet_and_json_files_are_read_with_their_place(tmp_path: Path):
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
        (
            '{"prompt": "a"}\n{"prompt": "\\ud83d"}\n',
            r"d\.jsonl:2: 'prompt' has half of a surrogate pair.* got '.ud83d'",
        ),
        (
            '{"prompt": [{"role": "user", "content": "\\ude00"}]}\n',
            r"d\.jsonl:1: 'prompt' has half of a surrogate pair",
        ),
        ('{"prompt": "a"}\n{"prompt": \n', r"d\.jsonl:2: not valid JSON: Expecting value \(column 11\)$"),
        ('{"prompt": "a"}\n{"prompt": ' + "9" * 5000 + "}", r"d\.jsonl:2: JSON that cannot be read: .*limit"),
        ('{"prompt": "a"}\n' + "[" * 100_000, r"d\.jsonl:2: JSON that cannot be read: .*recursion"),
        ('{"prompt": "a"}\n\n  \n{"prompt": 3}\n', r"d\.jsonl:4: 'prompt' must be text"),
        ("\n\n", r"data\.train_data: .*d\.jsonl has no rows"),
        ("", r"data\.train_data: .*d\.jsonl has no rows"),
    ],
)
def test_a_bad_row_or_a_file_without_rows_is_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / "d.jsonl"], key="data.train_data")


def test_two_columns_of_the_same_name_are_refused(tmp_path: Path):
    columns = [pa.array(["1+1="]), pa.array(["2"]), pa.array(["3"])]
    table = pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: got two columns 'answer'; expected different names"):
        read_rows([tmp_path / "d.parquet"], key="data.train_data")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="does not exist"):
        read_rows([tmp_path / "no.jsonl"], key="data.train_data")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match=r"cut\.parquet: not a readable parquet file"):
        read_rows([tmp_path / "cut.parquet"], key="data.train_data")
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"'\.txt' is not a known format; use \.parquet, \.jsonl, \.json or \.csv"):
        read_rows([tmp_path / "x.txt"], key="data.train_data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": "ä"}\n'.encode("latin-1"), r"d\.jsonl:2: not UTF-8 text \(byte 13"),
        ("d.jsonl", b"PAR1\x15\x00\xff\xfe", r"d\.jsonl:1: is a Parquet file; rename it to \.parquet"),
        ("d.json", b'["\xe4"]', r"d\.json: not UTF-8 text"),
        ("d.json", b'[\n{"prompt": }]', r"d\.json: not valid JSON: Expecting value \(line 2, column 12\)"),
    ],
)
def test_a_file_that_is_not_utf_8_or_not_json_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / name], key="data.train_data")


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path: Path):
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    read = read_rows([tmp_path / "d.jsonl"], key="data.train_data")
    assert [row.place.rsplit(":")[-1] for row in read] == ["1", "3"]


def test_every_epoch_plays_each_row_once_in_an_order_that_depends_on_seed_and_epoch_alone():
    rows = [DataRow({"prompt": str(number)}, f"f:{number}") for number in range(20)]

    def order(seed: int, groups: range) -> list[str]:
        source = PromptSource(rows, seed=seed, shuffle=True)
        return [source.row(group).row["prompt"] for group in groups]

    first, second = order(1, range(20)), order(1, range(20, 40))
    assert sorted(first) == sorted(second) == sorted(row.row["prompt"] for row in rows)
    assert first != second
    assert order(1, range(35, 40)) == second[15:]
    assert order(2, range(20)) != first


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
]


def test_a_whole_conversation_is_cut_before_the_last_answer(tmp_path: Path):
    parquet = tmp_path / "a.parquet"
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "thinking": "…"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), parquet)
    (row,) = read_rows([parquet], key="data.train_data")
    assert row.row["prompt"] == CONVERSATION[:2]
    assert row.row["completion"] == messages[2:]
    file = write_lines(tmp_path / "b.jsonl", {"messages": CONVERSATION[:2]}, {"prompt": "x", "messages": CONVERSATION})
    open_one, own = read_rows([file], key="data.train_data")
    assert (open_one.row["prompt"], "completion" in open_one.row) == (CONVERSATION[:2], False)
    assert own.row["prompt"] == "x"


def test_a_conversation_is_split_even_if_other_rows_have_a_completion(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", {"messages": CONVERSATION, "completion": None})
    (row,) = read_rows([file], key="data.train_data")
    assert (row.row["prompt"], row.row["completion"]) == (CONVERSATION[:2], CONVERSATION[2:])


def test_token_ids_that_are_no_list_are_refused_with_the_place(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", {"input_ids": 5})
    with pytest.raises(DataError, match=r"a\.jsonl:1: expected a row with the column 'prompt', got input_ids"):
        read_rows([file], key="data.train_data")


def test_prompt_and_completion_columns_are_kept(tmp_path: Path):
    row = {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]}
    assert read_rows([write_lines(tmp_path / "a.jsonl", row)], key="data.train_data")[0].row == row


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "'messages' must be"), ("hi", "'messages' must be"), (CONVERSATION[2:], "no message before the assistant's")],
)
def test_a_conversation_without_a_prompt_is_named(tmp_path: Path, messages: object, message: str):
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{message}"):
        read_rows([write_lines(tmp_path / "a.jsonl", {"messages": messages})], key="data.train_data")


def test_the_prompts_column_may_have_another_name(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", {"question": "1+1=", "answer": "2"})
    (row,) = read_rows([file], key="data.train_data", prompt_key="question")
    assert row.row == {"question": "1+1=", "answer": "2", "prompt": "1+1="}
    with pytest.raises(
        DataError,
        match=r"the column 'prompt', got question, answer; rename the prompt's column, or set data\.prompt_key",
    ):
        read_rows([file], key="data.train_data")


def test_cells_of_a_csv_file_are_text_except_json_in_structured_columns(tmp_path: Path):
    text = 'prompt,answer,reward_spec\n"1+1=\n?",007,"{""ground_truth"": ""2""}"\n2+2=,4,\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    first, second = read_rows([tmp_path / "a.csv"], key="data.train_data")
    assert first.row == {"prompt": "1+1=\n?", "answer": "007", "reward_spec": {"ground_truth": "2"}}
    assert second.row == {"prompt": "2+2=", "answer": "4"}
    assert second.place.endswith("a.csv:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na\n", r"a\.csv:1: has more or fewer cells"),
        ("prompt\na,b\n", r"a\.csv:1: has more or fewer cells"),
        ("prompt,extra_info\na,{\n", r"a\.csv:1, column extra_info: not valid JSON"),
        ("question\na\n", r"a\.csv:1: expected a row with the column 'prompt'"),
        ("prompt\n", r"a\.csv has no rows"),
    ],
)
def test_a_bad_line_of_a_csv_file_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / "a.csv"], key="data.train_data")


def test_remote_files_are_read_like_local_ones(tmp_path: Path):
    import fsspec

    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    fsspec.filesystem("memory").pipe("/bucket/a.parquet", (tmp_path / "a.parquet").read_bytes())
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    read = read_rows(["memory://bucket/a.parquet", f"file://{lines}"], key="data.train_data")
    assert [row.row for row in read] == [*rows, *rows]
    assert read[1].place == "memory://bucket/a.parquet:2"
    with pytest.raises(DataError, match=r"data\.train_data: memory://bucket/b\.parquet cannot be read"):
        read_rows(["memory://bucket/b.parquet"], key="data.train_data")
    with pytest.raises(ConfigError, match="fsspec cannot open this address"):
        read_rows(["nowhere://bucket/b.parquet"], key="data.train_data")


def test_data_sets_are_read_by_directory_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", *rows)

    def read(place: str) -> list[dict[str, object]]:
        return [dict(row.row) for row in read_rows([place], key="data.train_data")]

    assert read(f"{tmp_path}/one") == rows
    assert read(f"{tmp_path}/two@test") == rows[:1]
    assert read(f"{tmp_path}/files") == rows
    with pytest.raises(DataError, match=r"two: choose one of the splits train, test, e\.g\. .*two@train"):
        read(f"{tmp_path}/two")
    with pytest.raises(DataError, match="has no splits; remove @train"):
        read(f"{tmp_path}/one@train")
    (tmp_path / "broken").mkdir()
    write_lines(tmp_path / "broken" / "a.jsonl", *rows)
    write_lines(tmp_path / "broken" / "b.jsonl", {"other": {"column": 1}})
    with pytest.raises(ConfigError, match=r"broken cannot be loaded: (?!DatasetGenerationError).*column"):
        read(f"{tmp_path}/broken")


def test_a_data_set_of_the_hub_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    (tmp_path / "sums").mkdir()
    write_lines(tmp_path / "sums" / "train.jsonl", *rows)
    load_dataset(str(tmp_path / "sums"))
    # If a data set comes from the hub, its cache folder's name begins with the owner's name.
    (stored,) = (tmp_path / "cache").glob("sums/*/*/*/")
    of_the_hub = tmp_path / "cache" / "org___sums" / "default" / "0.0.0" / stored.name
    of_the_hub.parent.mkdir(parents=True)
    stored.rename(of_the_hub)
    for place in ("org/sums", "org/sums@train", "org/sums:default@train"):
        assert [dict(row.row) for row in read_rows([place], key="data.train_data")] == rows
    with pytest.raises(ConfigError, match=r"org/sums:other: .* the data set is not in the local cache"):
        read_rows(["org/sums:other"], key="data.train_data")


def test_the_error_for_a_missing_data_set_names_files_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"org/no-such-set@train: there is no such file .* HF_HUB_OFFLINE"):
        read_rows(["org/no-such-set@train"], key="data.train_data")


def test_a_store_that_cannot_be_reached_or_read_is_an_error_with_its_address():
    import fsspec
    from fsspec.spec import AbstractFileSystem

    class Unreachable(AbstractFileSystem):
        """Connects when it is created, as the file system of sftp does."""

        def __init__(self, **_: object):
            raise RuntimeError("authentication failed")

    class Forbidden(AbstractFileSystem):
        def info(self, path: str, **_: object) -> NoReturn:
            raise PermissionError("Forbidden")

        exists = info

    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    fsspec.register_implementation("forbidden", Forbidden, clobber=True)
    message = r"^unreachable://host/a\.jsonl: the store failed: RuntimeError: authentication failed$"
    with pytest.raises(ConfigError, match=message):
        read_rows(["unreachable://host/a.jsonl"], key="data.train_data")
    mistakes = Mistakes()
    config = from_mapping({"data.train_data": "forbidden://bucket/a.jsonl"})
    gather_data(config, ["data.train_data"], mistakes, makes=())
    assert [str(error) for error in mistakes.errors] == [
        "data.train_data: forbidden://bucket/a.jsonl cannot be read: Forbidden"
    ]


def write_nested(file: Path, num_rows: int, characters: int) -> None:
    """Writes rows with a nested column of equal texts, which take little room in the file, in one row group."""
    schema = pa.schema([("prompt", pa.string()), ("tests", pa.struct([("inputs", pa.list_(pa.string()))]))])
    with pq.ParquetWriter(file, schema, write_batch_size=64) as writer:
        rows = [{"prompt": f"{number}", "tests": {"inputs": ["x" * characters]}} for number in range(num_rows)]
        writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=num_rows)


def test_a_nested_column_is_read_in_parts(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    write_nested(file, 4096, 65_536)  # 256 MiB in memory
    assert pq.ParquetFile(file).num_row_groups == 1
    code = f"""
import pyarrow
from rl_core.trainer.before.data import _read_parquet
with open({str(file)!r}, "rb") as opened:
    for count, row in _read_parquet(opened, "rows.parquet"):
        assert row["prompt"] == str(count - 1) and len(row["tests"]["inputs"][0]) == 65_536
print(count, pyarrow.default_memory_pool().max_memory() // 2**20)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    count, peak = map(int, found.stdout.split())
    assert count == 4096
    assert peak < 128, "the column was read at once"


@pytest.mark.soak
def test_a_nested_column_of_more_than_2_gib_is_read(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    part = tmp_path / "part.parquet"
    write_nested(part, 103, 2**20)
    table = pq.read_table(part)
    with pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(pa.concat_tables([table] * 20), row_group_size=2060)
    with pytest.raises(pa.ArrowNotImplementedError, match="Nested data conversions not implemented"):
        pq.read_table(file)
    with file.open("rb") as opened:
        assert sum(len(row["tests"]["inputs"][0]) for _, row in _read_parquet(opened, "rows.parquet")) == 2060 * 2**20
