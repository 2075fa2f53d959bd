"""Converts the public GSM8K files (`question` and `answer`, as JSON lines or Parquet) to rows of the recipe `gsm8k`.

python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rl_core.errors import DataError, RLError
from rl_core.trainer.before.data import has_lone_surrogate
from rl_environments.answers import number_behind_hashes
from rl_examples.data_files import write_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
HOW_TO_MAKE = (
    "make it from GSM8K's own two files: "
    "python -m rl_examples.gsm8k_data --train train.jsonl --test test.jsonl --output ~/data/gsm8k"
)


def converted(row: Any, *, place: str, split: str, index: int) -> dict[str, Any]:
    """Converts one row to the usual format: chat prompt, `env_class`, `reward_spec`, `extra_info`. Raises DataError if
    the row is not a mapping, a column is missing or not text, or there is no number after `####`."""
    if not isinstance(row, Mapping) or {"question", "answer"} - row.keys():
        got = (", ".join(map(str, row)) or "none") if isinstance(row, Mapping) else type(row).__name__
        raise DataError(f"{place}: expected the columns 'question' and 'answer', got {got}")
    for column in ("question", "answer"):
        if not isinstance(row[column], str) or has_lone_surrogate(row[column]):
            raise DataError(f"{place}: got {column} {row[column]!r:.80}; expected text that UTF-8 can encode")
    answer = number_behind_hashes(row["answer"])
    if answer is None:
        raise DataError(f"{place}: no number after #### in the answer {row['answer'][-60:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index},
    }


def convert(source: Path, target: Path, *, split: str) -> int:
    """Converts one file and returns its number of rows. Raises DataError if the file has no rows or is invalid."""
    rows = [
        converted(row, place=f"{source}:{index + 1}", split=split, index=index)
        for index, row in enumerate(_read(source))
    ]
    if not rows:
        raise DataError(f"{source} has no rows")
    write_rows(target, rows)
    return len(rows)


def write_tiny_data(target: Path, *, split: str) -> None:
    """Writes a few handwritten problems: the training part if `split` is `train`, else the validation part."""
    problems = _PROBLEMS[:8] if split == "train" else _PROBLEMS[8:]
    write_rows(target, [converted(row, place=split, split=split, index=index) for index, row in enumerate(problems)])


def _read(path: Path) -> Sequence[Any]:
    import json

    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
        with path.open("rb") as file:
            return [json.loads(line.decode("utf-8-sig")) for line in file if line.strip()]
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not readable as {path.suffix or 'JSON lines'}: {error}") from error


_PROBLEMS = [
    {"question": question, "answer": answer}
    for question, answer in (
        ("A baker fills 4 trays with 12 rolls each. How many rolls are there?", "4*12=48 rolls.\n#### 48"),
        (
            "A train has 5 cars with 60 seats; 45 seats are empty. How many are taken?",
            "5*60=300, 300-45=255.\n#### 255",
        ),
        ("Ropes cost 3 coins a metre. What do 15 metres cost?", "15*3=45 coins.\n#### 45"),
        ("A shelf holds 9 books, a case has 6 shelves, a room 2 cases. How many books fit?", "9*6*2=108.\n#### 108"),
        ("Water drips at 7 drops a minute. How many drops fall in 2 hours?", "7*120=840 drops.\n#### 840"),
        (
            "A garden of 8 by 11 metres is dug up at 4 square metres an hour. How long does it take?",
            "88/4=22.\n#### 22",
        ),
        ("A van carries 1,250 kg. It makes 3 trips. How many kg in all?", "3*1250=3750 kg.\n#### 3,750"),
        ("Half of 64 cards are red, a quarter of those are marked. How many are marked?", "32/4=8.\n#### 8"),
        ("A clock is 3 minutes slow after one day. How slow is it after two weeks?", "3*14=42 minutes.\n#### 42"),
        ("Tickets cost 6 coins, on Mondays 2 less. What do 10 cost on a Monday?", "6-2=4, 4*10=40.\n#### 40"),
    )
]


@click.command()
@click.option("--train", type=click.Path(path_type=Path), required=True, help="The public training file.")
@click.option("--test", type=click.Path(path_type=Path), required=True, help="The public test file.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Directory of the parquet files.")
def main(train: Path, test: Path, output: Path) -> None:
    """Writes OUTPUT/train.parquet and OUTPUT/validation.parquet."""
    output = output.expanduser()
    try:
        for source, split in ((train, "train"), (test, "validation")):
            count = convert(source, output / f"{split}.parquet", split=split)
            click.echo(f"{count} rows: {output / f'{split}.parquet'}")
    except (RLError, OSError) as error:  # an OSError names the file that cannot be written
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
