"""The environment `reasoning_gym`: puzzles of reasoning-gym, a library of about a hundred puzzle generators, each
with a scoring function. Needs the extra `reasoning-gym`.

Data:      python -m rl_environments.reasoning_gym chain_sum --count 2000 --output train.parquet --set max_terms=3
Row:       `prompt` (messages), `task`, `difficulty` (the task's own settings as JSON text), and `entry`, the puzzle as
           reasoning-gym made it, as a Python literal; also `seed` and `index`, from which it was made. The puzzle is
           stored because some tasks make another one in another process, if the text hashes differ (PYTHONHASHSEED)
Reward:    the task's score for the text between the last `<answer>` and `</answer>`, from 0 to 1; 0 without these tags
Metrics:   `accuracy` (the score), `is_right` (a score of 1), `has_answer`

The environment refuses the tasks in `FAULTY_TASKS`, most of which have a faulty scoring function.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, DataError, install, nearest
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_environments.answers import require_prompt
from rl_environments.options import own_options

FAULTY_TASKS = {
    "boxnet": "its scoring function raises an error for answers that are JSON of an unexpected type",
    "coin_flip": "its scoring function raises an error for numbers that are infinite",
    "composite": "it is a mixture that needs a list of tasks; name one of them",
    "game_of_life": "its scoring function raises an error for answers that are JSON of an unexpected type",
    "game_of_life_halting": "its scoring function gives every wrong answer the score 1",
    "list_functions": "it generates another puzzle when it is asked for the same one again",
    "prime_factorization": "its scoring function raises an error for answers that are not numbers",
    "propositional_logic": "its scoring function gives a part of the score to meaningless answers",
}
"""Refused tasks, with the faults that they have in reasoning-gym 0.1.25. tests/environments/test_reasoning_gym.py shows
each fault, and fails when one is fixed."""
ASK_FOR_MARKS = "Think first if you need to, then give the answer alone between <answer> and </answer>."
_SIZE = 2**31 - 1
_SIZES = {"acre": 2_000, "gsm_symbolic": 100_000, "word_ladder": 20_000}
"""Data set sizes of tasks that generate all puzzles in advance or limit their number; a row's `difficulty` may set
another `size`."""
_one_at_a_time = threading.Lock()


class ReasoningGymEnvironment(Environment):
    """See the module."""

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        self.require_options(options)
        self._prompt: Prompt = row["prompt"]
        self._entry = _entry_of(row)
        self._dataset = _dataset(row["task"], json.dumps({**_settings_of(row), "seed": 0, "size": 1}, sort_keys=True))
        if not _is_asked(self._entry, self._prompt):
            raise DataError("the row's prompt is not the puzzle in its entry: the row was changed; make the data again")

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        own_options(options, "reasoning_gym", [])

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`. Does not import reasoning-gym, so an unknown task is noticed only when the
        row is played."""
        require_prompt(row, "reasoning_gym")
        if not isinstance(row.get("task"), str):
            raise DataError(
                "a row of reasoning_gym needs task and entry (text), as `python -m rl_environments.reasoning_gym` "
                f"writes them; the row has {', '.join(map(str, row))}"
            )
        _require_sound(row["task"])
        _settings_of(row)
        _entry_of(row)

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        found = re.findall(r"<answer>(.*?)</answer>", action.answer, re.DOTALL)
        score = float(self._dataset.score_answer(answer=found[-1].strip(), entry=self._entry)) if found else 0.0
        metrics = {"accuracy": score, "is_right": float(score >= 1), "has_answer": float(bool(found))}
        return StepResult(reward=score, done=True, metrics=metrics)


def rows_of(
    task: str, count: int, *, seed: int = 0, difficulty: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Generates rows of one task.

    Args:
        task: `python -c "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"` lists all tasks.
        count: number of rows.
        seed: seed of the puzzles; use another one for held-out rows.
        difficulty: settings of the task, such as `max_terms` of `chain_sum`.

    Raises:
        DataError: the task or a setting does not exist, a setting has an invalid value, the task is one of
            `FAULTY_TASKS`, the task has fewer than `count` puzzles per seed, or `count` is below 1.
        ConfigError: the extra `reasoning-gym` is not installed.
    """
    settings = dict(difficulty or {})
    dataset = _dataset(task, json.dumps({"size": _SIZES.get(task, _SIZE), **settings, "seed": seed}, sort_keys=True))
    shared = {"task": task, "seed": seed, "difficulty": json.dumps(settings, sort_keys=True)}
    if count < 1:
        raise DataError(f"got a count of {count} rows; expected at least 1")
    if count > len(dataset):
        raise DataError(
            f"reasoning-gym's task {task!r} has {len(dataset)} puzzles per seed, got a count of {count}; make the "
            "rest with another seed"
        )
    rows = []
    for index in range(count):
        entry = _plain(dataset[index])
        prompt = [{"role": "user", "content": f"{entry['question']}\n\n{ASK_FOR_MARKS}"}]
        rows.append({"prompt": prompt, "entry": repr(entry), "index": index, "env_class": "reasoning_gym", **shared})
    return rows


def _dataset(task: str, settings: str) -> Any:
    with _one_at_a_time:
        return _made(task, settings)


@lru_cache(256)
def _made(task: str, settings: str) -> Any:
    _require_sound(task)
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"reasoning-gym is not installed: {install('rl-environments[reasoning-gym]')}") from error
    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}.{nearest(task, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(task, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym's task {task!r} does not take {settings}: {error}") from error


def _plain(value: Any) -> Any:
    """Converts subclasses of Python's types, such as NumPy's text, to those types, whose `repr` is a literal."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    if isinstance(value, bool) or value is None:
        return value
    kinds = [kind for kind in (int, float, str) if isinstance(value, kind)]
    if not kinds:
        raise DataError(f"the puzzle has a value of type {type(value).__name__}, which cannot be stored in a row")
    return kinds[0](value)


def _entry_of(row: Row) -> dict[str, Any]:
    """Returns the puzzle, from the row's `entry`. Raises DataError unless it is a puzzle as a Python literal."""
    given = row.get("entry")
    try:
        entry = ast.literal_eval(given) if isinstance(given, str) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not isinstance(entry.get("question"), str) or "answer" not in entry:
        raise DataError(
            f"entry: got {given!r:.80}; expected the puzzle as `python -m rl_environments.reasoning_gym` writes "
            "it; make the data again"
        )
    return entry


def _settings_of(row: Row) -> dict[str, Any]:
    """Returns the task's settings, from the row's `difficulty`. Raises DataError unless it is a JSON object as text."""
    given = row.get("difficulty")
    try:
        settings = {} if given is None or given == "" else json.loads(given)
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise DataError(
            f"difficulty: got {given!r:.80}; expected the task's settings as JSON text, such as '{{\"max_terms\": 3}}'"
        )
    return settings


def _require_sound(task: str) -> None:
    if task in FAULTY_TASKS:
        raise DataError(f"reasoning-gym's task {task!r} is refused: {FAULTY_TASKS[task]}")


def _is_asked(entry: Mapping[str, Any], prompt: Prompt) -> bool:
    said = [prompt] if isinstance(prompt, str) else [str(message.get("content")) for message in prompt]
    return any(entry["question"] in text for text in said)


def _setting(word: str) -> tuple[str, Any]:
    """Parses `NAME=JSON`."""
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise ConfigError(
            f"--set {word}: expected NAME=JSON, such as max_terms=3 or name='\"text\"' ({error})"
        ) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes rows of one task as a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    parser = argparse.ArgumentParser(prog="python -m rl_environments.reasoning_gym", description=main.__doc__)
    parser.add_argument("task")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting of the task")
    given = parser.parse_args(arguments)
    try:
        difficulty = dict(map(_setting, given.set))
        rows = rows_of(given.task, given.count, seed=given.seed, difficulty=difficulty)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), given.output)
    except (ConfigError, DataError, OSError) as error:  # an OSError names the file that cannot be written
        parser.error(str(error))
    print(f"{len(rows)} rows of {given.task}: {given.output}")


if __name__ == "__main__":
    main()
