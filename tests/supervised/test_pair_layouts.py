"""Layouts of preference rows, read as TRL's own functions read them: the same prompt, once, and the same responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

from rl_core.errors import DataError
from rl_core.trainer.before.data import read_rows
from rl_rollout.chat import TokenCodec
from rl_rollout.supervised_tokens import RowEncoder
from tests.rollout.chat_templates import tokenizer_of

ASKED = {"role": "user", "content": "0+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD, BAD = {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "no"}
LONG = [SYSTEM, ASKED, {"role": "assistant", "content": "One."}, {"role": "user", "content": "As a digit?"}]
PAIR = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "explicit": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "explicit with a long prompt": {"prompt": LONG, "chosen": [GOOD], "rejected": [BAD]},
    "implicit": PAIR,
    "implicit with a long prompt": {"chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]},
    "implicit text": {"chosen": "Q: 0+1? A: 1", "rejected": "Q: 0+1? A: no"},
    "implicit text within a word": {"chosen": "Q: 0+1? A: nine", "rejected": "Q: 0+1? A: no"},
    "implicit text, new line": {"chosen": "Human: 0+1?\nAI:\n1", "rejected": "Human: 0+1?\nAI:\nno"},
    "ultrafeedback_binarized": {
        "prompt": ASKED["content"],
        "prompt_id": "f0",
        **PAIR,
        "messages": PAIR["chosen"],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
}


def encoder() -> tuple[Any, RowEncoder]:
    tokenizer = tokenizer_of("chatml")
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    return tokenizer, RowEncoder(
        codec, response_key="completion", trained_roles=["assistant"], trained_turns="all", scored_at_end=False
    )


def read(path: Path, rows: Sequence[Any], *, parquet: bool = False) -> list[Any]:
    if parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row.row for row in read_rows([path], key="data.train_data")]


def texts(row: Any) -> tuple[list[str], list[str]]:
    """Prompt and trained text of both responses."""
    tokenizer, encode = encoder()
    pair = encode.pair(row)
    prompts = [tokenizer.decode(one.tokens[: one.prompt_length]) for one in pair]
    return prompts, [tokenizer.decode(one.tokens[one.prompt_length :]) for one in pair]


@pytest.mark.parametrize("parquet", [False, True], ids=["jsonl", "parquet"])
@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_is_read_as_trl_reads_it(tmp_path: Path, row: dict[str, Any], parquet: bool):
    (found,) = read(tmp_path / f"rows.{'parquet' if parquet else 'jsonl'}", [row], parquet=parquet)
    tokenizer, _ = encoder()
    theirs = maybe_extract_prompt({name: row[name] for name in ("prompt", "chosen", "rejected") if name in row})
    theirs = maybe_apply_chat_template(theirs, tokenizer)
    prompts, responses = texts(found)
    assert prompts == [theirs["prompt"]] * 2
    for response, name in zip(responses, ("chosen", "rejected"), strict=True):
        # A text gets an end-of-sequence token. After this token, the template writes a new line.
        assert response == theirs[name].rstrip("\n").removesuffix("<|im_end|>") + "<|im_end|>"


NAMED = {"role": "assistant", "content": "1", "name": "bot"}
WITH_NULLS: dict[str, dict[str, Any]] = {
    "null in the prompt": {"prompt": [{**ASKED, "name": None}], **PAIR},
    "null in the answers": {"prompt": [ASKED], "chosen": [{**ASKED, "name": None}, NAMED], "rejected": [ASKED, BAD]},
    "null in one answer, no prompt": {"chosen": [{**ASKED, "name": None}, NAMED], "rejected": [ASKED, BAD]},
    "another key in the prompt": {"prompt": [{**ASKED, "id": 7}], **PAIR},
    "another key in the answers": {"prompt": [ASKED], "chosen": [{**ASKED, "id": 7}, NAMED], "rejected": [ASKED, BAD]},
    "null prompt": {"prompt": None, **PAIR},
    "parts": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "0+1?"}]}], **PAIR},
    "text prompt, answers only": {"prompt": "0+1?", "chosen": [GOOD], "rejected": [BAD]},
    "messages too": {"messages": [ASKED, GOOD], **PAIR},
    "null messages": {"messages": None, **PAIR},
}


@pytest.mark.parametrize("parquet", [False, True], ids=["jsonl", "parquet"])
@pytest.mark.parametrize("row", WITH_NULLS.values(), ids=WITH_NULLS.keys())
def test_the_prompt_stands_once_whatever_keys_are_null(tmp_path: Path, row: dict[str, Any], parquet: bool):
    (plain,) = read(tmp_path / "plain.jsonl", [PAIR])
    (found,) = read(tmp_path / f"rows.{'parquet' if parquet else 'jsonl'}", [row], parquet=parquet)
    assert texts(found) == texts(plain)
    assert texts(plain)[0][0].count("0+1?") == 1


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "are the same"),
        ({"chosen": "0+1? 1", "rejected": "0+1? 1"}, "are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]}, "one begins with all the other"),
        ({"chosen": "0+1? 1", "rejected": "0+1? 10"}, "one begins with all the other"),
        ({"chosen": [ASKED, GOOD], "rejected": [SYSTEM, BAD]}, "begin differently"),
        (
            {"prompt": "Q: 0+1?", "chosen": "Q: 0+1? 1", "rejected": "Q: 0+1? no"},
            "both begin with the text in 'prompt'",
        ),
        ({"prompt": "2+2?", **PAIR}, "the text in 'prompt' is not a message of the beginning .* '2\\+2\\?'"),
        ({"prompt": [SYSTEM, ASKED], **PAIR}, "'chosen' begins with a message of the role 'user'"),
        ({"prompt": [{**ASKED, "content": "0+1 ?"}], **PAIR}, "'chosen' begins with a message of the role 'user'"),
    ],
)
def test_a_pair_whose_prompt_cannot_be_told_is_refused(tmp_path: Path, row: dict[str, Any], problem: str):
    with pytest.raises(DataError, match=problem):
        texts(read(tmp_path / "rows.jsonl", [row])[0])


def test_rows_of_two_data_sets_may_leave_out_each_others_columns(tmp_path: Path):
    rows = [{"prompt": None, "messages": [ASKED, GOOD]}, {"prompt": [ASKED], "completion": [GOOD], "messages": None}]
    _, encode = encoder()
    first, second = (encode.response(row) for row in read(tmp_path / "rows.jsonl", rows))
    assert first == second
