from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner

from rl_core.config import load
from rl_core.errors import ConfigErrors, DataError
from rl_core.interfaces import Action
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.before.preflight import preflight
from rl_core.trainer.run import run_training
from rl_environments.answers import number_behind_hashes
from rl_examples.gsm8k import Gsm8kEnvironment, ground_truth, prepare
from rl_examples.gsm8k_data import convert, converted, main


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 6*7=42.\n#### 42", "42"),
        ("#### 1,250.50", "1250.50"),
        ("#### $18", "18"),
        ("#### -3.", "-3"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### .5", "0.5"),
        ("#### 5 no, wait\n#### 7", "7"),
        ("#### 5\n#### done", "5"),
        ("#### - 5", None),
        ("the answer is 42", None),
        ("####", None),
        ("#### 1.2.3", None),
    ],
)
def test_the_answer_is_the_last_number_after_a_mark(text: str, answer: str | None):
    assert number_behind_hashes(text) == (None if answer is None else Decimal(answer))


async def test_the_right_number_in_another_notation_earns_reward_one():
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"method": "rule", "ground_truth": "1250"}}
    environment = Gsm8kEnvironment(row, {})
    assert await environment.reset() == row["prompt"]
    right = await environment.step(Action(text="#### 1,250.0", tokens=(), stop_reason="stop"))
    wrong = await environment.step(Action(text="1250", tokens=(), stop_reason="stop"))
    assert (right.reward, right.done, right.metrics["has_answer"]) == (1.0, True, 1.0)
    assert (wrong.reward, wrong.metrics["has_answer"]) == (0.0, 0.0)


@pytest.mark.parametrize("spec", [None, {}, {"ground_truth": "many"}, {"ground_truth": "nan"}])
def test_a_row_without_a_number_is_refused(spec: dict[str, str] | None):
    with pytest.raises(DataError, match=r"needs reward_spec\.ground_truth"):
        ground_truth({"prompt": "x", "reward_spec": spec})


def test_the_public_files_are_converted_to_rows_that_load(tmp_path: Path):
    public = [{"question": "What is 6*7?", "answer": "6*7=<<6*7=42>>42\n#### 42"}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in public))
    arguments = ["--train", f"{tmp_path}/train.jsonl", "--test", f"{tmp_path}/test.jsonl", "--output", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (row,) = read_rows([tmp_path / "train.parquet"], key="data.train_data")
    assert ground_truth(row.row) == 42
    assert row.row["prompt"][0]["content"].startswith("What is 6*7? ")
    assert row.row["env_class"] == "gsm8k"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": "#### 42"}))
    (tmp_path / "file").write_text("")
    arguments = ["--train", f"{tmp_path}/rows.jsonl", "--test", f"{tmp_path}/rows.jsonl", "--output"]
    result = CliRunner().invoke(main, [*arguments, f"{tmp_path}/file/below"])
    assert result.exit_code == 1
    assert f"{tmp_path}/file" in result.output
    assert isinstance(result.exception, SystemExit)


def test_only_a_line_feed_ends_a_public_row(tmp_path: Path):
    row = {"question": "one\u2028line?", "answer": "#### 42"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert convert(tmp_path / "train.jsonl", tmp_path / "train.parquet", split="train") == 1


@pytest.mark.parametrize(("text", "said"), [("\n", "has no rows"), ("[" * 100_000, "not readable as .jsonl")])
def test_a_public_file_without_rows_or_nested_too_deeply_is_named(text: str, said: str, tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(DataError, match=rf"train\.jsonl.*{said}"):
        convert(tmp_path / "train.jsonl", tmp_path / "train.parquet", split="train")
    assert not (tmp_path / "train.parquet").exists()


def test_a_public_file_with_a_bad_row_is_named():
    for row, message in (
        ([1], r"train\.jsonl:7: expected the columns 'question' and 'answer', got list"),
        ({"question": "?", "answer": 42}, r"train\.jsonl:7: got answer 42; expected text"),
        ({"question": None, "answer": "#### 1"}, r"train\.jsonl:7: got question None; expected text"),
        ({"question": "\ud800", "answer": "#### 1"}, r"train\.jsonl:7: got question '\\ud800'; expected text"),
    ):
        with pytest.raises(DataError, match=message):
            converted(row, place="train.jsonl:7", split="train", index=6)
    with pytest.raises(DataError, match=r"train\.jsonl:7: no number after ####"):
        converted({"question": "?", "answer": "none"}, place="train.jsonl:7", split="train", index=6)
    with pytest.raises(DataError, match="expected the columns 'question' and 'answer', got prompt"):
        converted({"prompt": "?"}, place="train.jsonl:7", split="train", index=6)


def test_the_recipe_trains_its_tiny_variant_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load("gsm8k", ["trainer.max_training_steps=2"], tiny=True).config
    prepare(config)
    summary = run_training(config)
    assert summary.steps == 2
    assert (tmp_path / "runs" / "gsm8k_tiny" / "model").is_dir()
    assert (tmp_path / summary.run_dir / "report.html").exists()


def test_the_recipe_makes_only_its_own_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    own = load("gsm8k", [], tiny=True)
    model, train, held_out = own.config.policy_model_path, own.config.data.train_data[0], own.config.data.val_data[0]
    prepare(load("gsm8k", ["data.train_data=[mine.parquet]", "trainer.policy.model.path=mine/model"], tiny=True).config)
    assert [path for path in (model, train, held_out, "mine.parquet", "mine") if Path(path).exists()] == [held_out]
    Path(train).write_text("mine")
    prepare(own.config)
    assert Path(train).read_text() == "mine"
    assert Path(model, "config.json").exists()
    assert own.makes == {model, train, held_out}


def test_the_error_for_missing_data_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    message = r"train\.parquet does not exist .*; make it from GSM8K's own two files: python -m rl_examples\.gsm8k_data"
    for name in ("gsm8k", "qwen3_30b_a3b"):
        with pytest.raises(ConfigErrors, match=message):
            preflight(load(name))
    with pytest.raises(ConfigErrors) as raised:
        preflight(load("gsm8k", ["data.train_data=[mine.parquet]", "data.val_data=[more.parquet]"]))
    assert "mine.parquet does not exist" in str(raised.value)
    assert "gsm8k_data" not in str(raised.value)
