"""Small recipes: mathematics, programs, puzzles, word problems, skyrl-gym's environments, and a judge. Tests their
problems, their demonstrations, and their tiny runs.
"""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import load
from rl_core.interfaces import Action, StepResult
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from rl_environments.code import CodeEnvironment
from rl_environments.gsm8k_turns import Gsm8kTurnsEnvironment
from rl_environments.judge import JudgeEnvironment
from rl_environments.mathematics import MathematicsEnvironment
from rl_environments.reasoning_gym import ReasoningGymEnvironment
from rl_environments.skyrl_gym import SkyrlGymEnvironment
from rl_examples import arithmetic, code, gsm8k_turns, judge, mathematics, reasoning_gym, skyrl_gym, small_runs
from tests import rule_judge

pytestmark = [
    # cellpylib, which reasoning-gym imports, uses `is` with a literal.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Problems = dict[str, list[dict[str, Any]]]
RECIPES = {
    "mathematics": mathematics,
    "code": code,
    "reasoning_gym": reasoning_gym,
    "gsm8k_turns": gsm8k_turns,
    "skyrl_gym": skyrl_gym,
    "judge": judge,
}


@pytest.fixture(scope="module")
def problems() -> Problems:
    """Recipe → its problems."""
    return {name: module.problems() for name, module in RECIPES.items()}


def results(environment: Any, row: dict[str, Any], *texts: str, **options: Any) -> list[StepResult]:
    async def played() -> list[StepResult]:
        episode = environment(row, options)
        await episode.reset()
        return [await episode.step(Action(text=text, tokens=(), stop_reason="stop")) for text in texts]

    return asyncio.run(played())


def reward(environment: Any, row: dict[str, Any], text: str, **options: Any) -> float:
    return results(environment, row, text, **options)[0].reward


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_can_read_prompts_and_sample_demonstrations(name: str, problems: Problems, tmp_path: Path):
    from transformers import AutoConfig, AutoTokenizer

    module, rows = RECIPES[name], problems[name]
    assert len({str(row["prompt"]) for row in rows}) == len(rows) > 2 * module.NUM_HELD_OUT
    getattr(module, "write_model", arithmetic.write_model)(tmp_path, seed=0)
    tokenizer, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(0)
    max_positions = AutoConfig.from_pretrained(tmp_path).max_position_embeddings
    longest_input = module.recipe.config["generator.max_input_length"]
    longest_answer = module.recipe.config["generator.sampling_params.max_generate_length"]
    for row in rows[:300]:
        shown = module.demonstrated(row, rng)
        lengths = []
        for text in (shown["prompt"], shown["answer"]):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(tokens) == text
            lengths.append(len(tokens))
        assert lengths[0] <= longest_input
        assert lengths[1] < longest_answer
        assert sum(lengths) < max_positions


def test_a_quarter_of_the_demonstrated_products_are_right(problems: Problems):
    rng = random.Random(0)
    shown = [(row, mathematics.demonstrated(row, rng)["answer"]) for row in problems["mathematics"]]
    right = [Fraction(answer) == Fraction(row["answer"]) for row, answer in shown]
    assert 0.22 < sum(right) / len(right) < 0.28


def test_any_equal_fraction_is_right_and_a_repeated_question_is_too_long(problems: Problems):
    problem = {"prompt": "3/4*2/5=", "answer": "6/20"}
    assert [reward(MathematicsEnvironment, problem, text) for text in ("6/20", "3/10", ".3", "15/8")] == [1, 1, 1, 0]
    limit = mathematics.recipe.config["generator.sampling_params.max_generate_length"]
    assert min(len(row["prompt"]) for row in problems["mathematics"]) - 1 > limit


def test_a_program_gets_the_fraction_of_tests_that_its_coefficients_pass(problems: Problems):
    row = next(row for row in problems["code"] if row["prompt"] == "f(0,0)=4,f(1,0)=6,f(0,1)=7\n")
    option = code.recipe.config["environment.options.reward"]
    programs = {"2*x+3*y+4": 1.0, "6*x+3*y+4": 0.5, "2*x+7*y+4": 0.5, "6*x+7*y+4": 0.25, "1*x+1*y+1": 0.0}
    rewards = {
        program: reward(CodeEnvironment, row, f"```\nf=lambda x,y:{program}\n```", reward=option)
        for program in programs
    }
    assert rewards == programs
    rng = random.Random(0)
    shown = {code.demonstrated(row, rng)["answer"] for _ in range(100)}
    assert shown == {f"```\nf=lambda x,y:{a}*x+{b}*y+4\n```" for a in (2, 6) for b in (3, 7)}


def test_a_word_backward_is_right_and_no_word_is_both_held_out_and_trained_on(problems: Problems):
    rows = problems["reasoning_gym"]
    words = [row["prompt"].split()[-1] for row in rows]
    assert len({word.lower() for word in words}) == len(words)
    row, word = rows[0], words[0]
    assert reward(ReasoningGymEnvironment, row, f"<answer>{word[::-1]}</answer>") == 1.0
    assert reward(ReasoningGymEnvironment, row, f"<answer>{word}</answer>") < 1.0
    assert reward(ReasoningGymEnvironment, row, word[::-1]) == 0.0


def test_a_conversation_is_shown_as_the_environment_plays_it(problems: Problems):
    rng = random.Random(0)
    options = {"max_tries": gsm8k_turns.MAX_TRIES}
    for problem in problems["gsm8k_turns"][:100]:
        shown = gsm8k_turns.demonstrated(problem, rng)
        said = [*shown["prompt"].removeprefix(problem["prompt"]).split("$")[:-1], shown["answer"]]
        said = [f"####{text.rpartition('####')[2]}" for text in said]
        *earlier, last = results(Gsm8kTurnsEnvironment, problem, *said, **options)
        assert not any(result.done for result in earlier)
        heard = [str(result.observation) for result in earlier]
        turns = "".join(f"{text}${observation}" for text, observation in zip(said, heard, strict=False))
        assert shown["prompt"] == problem["prompt"] + turns
        assert last.reward == float(last.metrics["accuracy"]) == float(said[-1] == f"#### {problem['answer']}")


def test_a_conversation_is_shown_as_skyrl_gym_plays_it(problems: Problems, tmp_path: Path):
    from transformers import AutoTokenizer

    skyrl_gym.write_model(tmp_path, seed=0)
    tokenizer, rng = AutoTokenizer.from_pretrained(tmp_path), random.Random(0)
    options = {"env": "gsm8k_multi_turn", "max_turns": skyrl_gym.MAX_TURNS}
    lengths = set()
    for problem in problems["skyrl_gym"][:50]:
        shown = skyrl_gym.demonstrated(problem, rng)
        wrong = gsm8k_turns.with_wrong_operation(problem["prompt"][0]["content"], right := right_number(problem))
        first, last = results(SkyrlGymEnvironment, problem, f"#### {wrong}", f"#### {right}", **options)
        assert (first.reward, first.done, last.reward, last.done) == (0.1, False, 1.0, True)
        turns = [{"role": "assistant", "content": f"#### {wrong}"}, *first.observation]  # pyright: ignore
        rendered = [
            tokenizer.apply_chat_template(messages, tokenize=False)
            for messages in (problem["prompt"], [*problem["prompt"], *turns])
        ]
        lengths.add(rendered.index(shown["prompt"]))
        assert shown["answer"] in (f"#### {wrong}", f"#### {right}")
    assert lengths == {0, 1}


def right_number(problem: dict[str, Any]) -> str:
    return problem["reward_spec"]["ground_truth"]


def test_a_rule_based_judge_prefers_the_sentence_to_the_number(problems: Problems):
    row = next(row for row in problems["judge"] if row["prompt"] == "Mia has 46 pens and loses 2. How many?\n")
    with rule_judge.serving() as url:
        texts = ("Mia has 44 pens.", "44", "Mia has 48 pens.", "48", "4", "Score: 10", "")
        rewards = [reward(JudgeEnvironment, row, text, url=url, model="judge") for text in texts]
    assert rewards == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    shown = {judge.demonstrated(row, random.Random(seed))["answer"] for seed in range(100)}
    assert shown == {"Mia has 44 pens.", "44", "Mia has 48 pens.", "48"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_tiny_run_completes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with rule_judge.serving() as url:
        keys = [f"environment.options.url={url}"] if name == "judge" else []
        assert run_training(load(name, keys, tiny=True)).steps == 2
    metrics = list(read_rows(Path(f"runs/{name}_tiny/metrics.jsonl")))
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in metrics)
    assert not any(row.get("rollout/failed", 0.0) for row in metrics)


def test_only_missing_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load("mathematics", [], tiny=True).config
    mathematics.prepare(config)
    made = {path: path.stat().st_mtime_ns for path in sorted(Path("runs").rglob("*")) if path.is_file()}
    assert {path.parent.name for path in made} == {"mathematics_data", "start_model_seed0.untrained"}
    mathematics.prepare(config)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    elsewhere = small_runs.SmallRun(name="elsewhere")
    small_runs.write_problems(config, elsewhere, [{"prompt": "1/2*1/3=", "answer": "1/6"}] * 2, num_held_out=1)
    assert not Path(elsewhere.directory).exists()
