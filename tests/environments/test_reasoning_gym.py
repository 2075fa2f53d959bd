"""Tasks of reasoning-gym: rows, scores, and the faults for which some tasks are refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet
import pytest

from rl_core.errors import DataError
from rl_core.interfaces import Action
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.reasoning_gym import FAULTY_TASKS, ReasoningGymEnvironment, rows_of

pytestmark = [
    # cellpylib, which reasoning-gym imports, compares with `is`.
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
def test_it_passes_the_suite_of_environments(check: str):
    getattr(suite()(), check)()


def test_every_row_asks_what_the_environment_scores():
    for task in ("gcd", "spell_backward", "rush_hour"):
        for row in rows_of(task, 3):
            ReasoningGymEnvironment.require_row(row)
            ReasoningGymEnvironment(row, {})


def test_a_row_of_another_version_is_refused():
    row = {**rows_of("gcd", 1)[0], "prompt": [{"role": "user", "content": "What is 1+1?"}]}
    with pytest.raises(DataError, match="made by another version of reasoning-gym"):
        ReasoningGymEnvironment(row, {})


def test_data_is_made_by_a_command_and_a_setting_that_is_none_is_refused(tmp_path: Path):
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


def test_the_faults_are_still_there():
    """When one is gone, its task can be allowed."""
    import reasoning_gym

    assert score("game_of_life_halting", "nonsense") == 1.0
    assert score("propositional_logic", "nonsense") > 0.0
    with pytest.raises(ValueError):
        score("prime_factorization", "nonsense")
    with pytest.raises(TypeError):
        score("boxnet", "-987654")
    with pytest.raises(AssertionError, match="at least one dataset"):
        score("composite", "")
    functions = reasoning_gym.create_dataset("list_functions", size=60, seed=1)
    assert any(functions[index] != functions[index] for index in range(60))


def test_an_episode_without_answer_is_scored_zero_and_reported():
    async def play() -> Any:
        environment = ReasoningGymEnvironment(rows_of("gcd", 1)[0], {})
        await environment.reset()
        return await environment.step(Action(text="12", tokens=(), stop_reason="stop"))

    result = asyncio.run(play())
    assert (result.reward, result.metrics) == (0.0, {"accuracy": 0.0, "is_right": 0.0, "has_answer": 0.0})
