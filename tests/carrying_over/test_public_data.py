"""Small files in the layout of public data sets for mathematics and programs: read, checked before the run, and judged,
a right answer with 1 and a wrong one with 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rl_core import plugins
from rl_core.errors import ConfigError, Mistakes
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.before.environment_checks import gather_unplayable
from rl_environments.sandbox import probe_sandbox
from tests.environments.episodes import judged

ADD = "class Solution:\n    def add(self, a: int, b: int, more: List[int] = []) -> int:\n        return a + b"
SUM = "print(sum(map(int, input().split())))"
LEETCODE = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
TACO = {"input_output": json.dumps({"inputs": ["1 2\n", "0 0\n"], "outputs": ["3\n", "0\n"]}), "starter_code": ""}
APPS = {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}), "difficulty": "interview"}
TRUTH = json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"})
DEEPCODER = [{**LEETCODE[0], "metadata": {"func_name": "add"}}]
BOX = "So the answer is $\\boxed{%s}$."


def _verl(truth: str) -> dict[str, Any]:
    return {
        "data_source": "some",
        "prompt": [{"role": "user", "content": "?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
    }


MATHEMATICS = {
    # name: (file's kind, column of the prompt, row, right answers, wrong answers)
    "gsm8k": ("jsonl", "question", {"question": "?", "answer": "It is <<1000+234=1234>>1,234.\n#### 1,234"},
              ["1234", "1,234", "\\$1{,}234"], ["234", "1"]),
    "math": ("jsonl", "problem", {"problem": "?", "level": "Level 5", "type": "Algebra", "solution":
             "Since $x^2 = \\boxed{1}$ is wrong, the probability is $\\boxed{\\dfrac{1}{2}}.$"},
             ["\\frac12", "0.5", "50\\%"], ["1", "2"]),
    "math_500": ("jsonl", "problem", {"problem": "?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "solution": "…"},
                 ["(3, \\frac{\\pi}{2})"], ["(\\frac{\\pi}{2}, 3)"]),
    "aime": ("parquet", "problem", {"problem": "?", "answer": "033", "year": "2024"}, ["33", "033"], ["3"]),
    "aime_as_number": ("parquet", "problem", {"problem": "?", "answer": 33}, ["33", "033"], ["330"]),
    "skywork_or1": ("parquet", "prompt", _verl('["34"]'), ["34", "34.0"], ["35"]),
    "dapo": ("parquet", "prompt", _verl("34"), ["34"], ["43"]),
    "json_number": ("jsonl", "prompt", {"prompt": "?", "answer": 0.00001}, ["10^{-5}", "0.00001"], ["0.00002", "0"]),
}  # fmt: skip
CODE = {
    "livecodebench": ("jsonl", "question_content", {
        "question_content": "?", "platform": "leetcode", "starter_code": "class Solution:", "metadata":
        '{"func_name": "add"}', "public_test_cases": json.dumps(LEETCODE), "private_test_cases": json.dumps(LEETCODE),
    }, ADD),
    "livecodebench_stdin": ("parquet", "question_content", {
        "question_content": "?", "platform": "atcoder", "starter_code": "", "metadata": "{}",
        "public_test_cases": json.dumps(STDIN), "private_test_cases": json.dumps(STDIN),
    }, SUM),
    "deepcoder": ("parquet", "problem", {"problem": "?", "tests": json.dumps(DEEPCODER)}, ADD),
    "deepcoder_nested": ("parquet", "problem", {"problem": "?", "tests": DEEPCODER}, ADD),
    "taco": ("parquet", "question", {"question": "?", **TACO}, SUM),
    "apps": ("jsonl", "question", {"question": "?", **APPS}, ADD),
    "prime": ("parquet", "prompt", _verl(TRUTH), ADD),
    "eurus": ("parquet", "prompt", _verl(TACO["input_output"]), SUM),
}  # fmt: skip


@pytest.mark.parametrize("name", MATHEMATICS)
async def test_mathematics_of_a_public_layout_is_judged(tmp_path, name):
    kind, prompt_key, given, right, wrong = MATHEMATICS[name]
    row = _read(tmp_path / f"{name}.{kind}", given, prompt_key, "mathematics")
    environment: Any = plugins.load("rl_core.environments", "mathematics")
    for answer, reward in [*((each, 1.0) for each in right), *((each, 0.0) for each in wrong)]:
        result = await judged(environment, row, BOX % answer, processes=1, cpu_s=60.0)
        assert result.reward == reward, answer


@pytest.mark.parametrize("name", CODE)
async def test_programs_of_a_public_layout_are_judged(tmp_path, name):
    try:
        await probe_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))
    kind, prompt_key, given, right = CODE[name]
    row = _read(tmp_path / f"{name}.{kind}", given, prompt_key, "code")
    environment: Any = plugins.load("rl_core.environments", "code")
    for program, reward in ((right, 1.0), (right.replace("+", "-").replace("sum", "max"), 0.0)):
        assert (await judged(environment, row, f"```python\n{program}\n```", limits={"cpu_s": 10})).reward == reward


def test_an_unusable_row_of_each_kind_is_named_with_its_line(tmp_path):
    rows = {
        "mathematics": [{"prompt": "?", "answer": "1/0"}, {"prompt": "?", "answer": True}, {"prompt": "?"}],
        "code": [{"prompt": "?", "tests": []}, {"prompt": "?", "tests": [{"input": "", "output": "", "limit": 3}]}],
    }
    for environment, bad in rows.items():
        for row in bad:
            path = tmp_path / "rows.jsonl"
            good = {"prompt": "?", "answer": "5", "tests": [{"input": "", "output": ""}]}
            path.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
            mistakes = Mistakes()
            factory: Any = plugins.load("rl_core.environments", environment)
            gather_unplayable(environment, factory, {}, read_rows([path], key="data.train_data"), mistakes)
            with pytest.raises(Exception, match=r"rows.jsonl:2: "):
                mistakes.raise_found()


def _read(path: Path, row: dict[str, Any], prompt_key: str, environment: str) -> Any:
    """Writes the row twice, reads the file as a run does, and returns the row after the checks of a dry run."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    else:
        path.write_text(f"{json.dumps(row)}\n" * 2)
    rows = read_rows([path], key="data.train_data", prompt_key=prompt_key)
    mistakes = Mistakes()
    gather_unplayable(environment, plugins.load("rl_core.environments", environment), {}, rows, mistakes)
    mistakes.raise_found()
    return rows[0].row
