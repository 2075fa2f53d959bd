"""A thought that the prompt opened and the policy did not end earns nothing and calls nothing, in every environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_core.interfaces import Action, Environment, GroupRequest, SamplingParams, StepResult
from rl_core.testing.scripted_engine import ScriptedClient
from rl_environments.calculator import CalculatorEnvironment
from rl_environments.code import CodeEnvironment
from rl_environments.gsm8k_turns import Gsm8kTurnsEnvironment
from rl_environments.mathematics import MathematicsEnvironment
from rl_environments.skyrl_gym import SkyrlGymEnvironment
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.reward_functions import RewardFunctionsEnvironment
from tests.environments.test_judge import Judge, judge  # noqa: F401
from tests.rollout.test_turn_ends import tokenizer_of

PROMPT = [{"role": "user", "content": "?"}]
ROW = {"prompt": PROMPT, "answer": "42"}
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
PROGRAM = "```python\nprint(int(input()) + 1)\n```"


def step(environment: Any, row: dict[str, Any], text: str, opening: str, options: dict[str, Any]) -> StepResult:
    async def played() -> StepResult:
        one = environment(row, options)
        await one.reset()
        try:
            return await one.step(Action(text=text, tokens=(), stop_reason="length", opening=opening))
        finally:
            await one.close()

    return asyncio.run(played())


@pytest.mark.parametrize(
    ("environment", "row", "text", "options"),
    [
        (MathematicsEnvironment, ROW, "so \\boxed{42}", {}),
        (CalculatorEnvironment, ROW, "so 42", {}),
        (Gsm8kTurnsEnvironment, ROW, "so #### 42", {}),
        (CodeEnvironment, {"prompt": PROMPT, "tests": {"inputs": ["1"], "outputs": ["2"]}}, PROGRAM, {}),
    ],
)
@pytest.mark.parametrize("opening", ["<think>\n", "[THINK]", "<|channel|>analysis<|message|>"])
def test_an_answer_within_an_unfinished_thought_earns_nothing(
    environment: Any, row: dict[str, Any], text: str, options: dict[str, Any], opening: str
):
    if environment is CodeEnvironment and opening != "<think>\n":
        pytest.skip("one sandbox is enough")
    assert step(environment, row, text, opening, options).reward == 0.0
    assert step(environment, row, text, "", options).reward == 1.0


def test_a_call_within_an_unfinished_thought_is_no_call():
    assert step(CalculatorEnvironment, ROW, f"maybe {CALL}", "<think>\n", {}).metrics["calls"] == 0.0
    for text, opening in ((CALL, ""), (f"so</think>{CALL}", "<think>\n"), (CALL, "<think>\n\n</think>\n\n")):
        assert step(CalculatorEnvironment, ROW, text, opening, {}).metrics["calls"] == 1.0


def test_a_judge_is_not_shown_an_unfinished_thought(judge: Judge):  # noqa: F811
    from rl_environments.judge import JudgeEnvironment

    options = {"url": judge.url, "model": "m"}
    for text, shown in (("perhaps blue", False), ("perhaps</think>blue", True)):
        step(JudgeEnvironment, {"prompt": PROMPT, "reference": "red"}, text, "<think>\n", options)
        assert ("blue" in str(judge.asked[-1])) == shown
        assert "perhaps" not in str(judge.asked[-1])


class Shows:
    """An environment of skyrl-gym that rewards a response in which it sees the opening."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None: ...

    def init(self, prompt: Any) -> Any:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": float(action == "<think>\nhm"), "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def test_environments_of_skyrl_gym_see_the_opening_in_the_response():
    options = {"env": f"{__name__}:Shows"}
    assert step(SkyrlGymEnvironment, {"prompt": PROMPT}, "hm", "<think>\n", options).reward == 1.0


@pytest.mark.parametrize(
    ("env", "column", "answer"),
    [
        ("gsm8k", "reward_spec", "#### 42"),
        ("gsm8k_multi_turn", "reward_spec", "#### 42"),
        ("aime", "reward_model", "Answer: 42"),
        ("search", "reward_spec", "<answer>42</answer>"),
    ],
)
def test_skyrl_gyms_own_graders_get_the_answer_without_the_thinking(env: str, column: str, answer: str):
    truth = {"target": ["42"]} if env == "search" else "42"
    row, options = {"prompt": PROMPT, column: {"ground_truth": truth}}, {"env": env, "max_turns": 1}
    if env == "search":
        options["config"] = {"search_url": "http://127.0.0.1:9", "topk": 1}
    for text, opening in ((f"perhaps {answer}", "<think>\n"), (f"<think>\nperhaps {answer}", "")):
        assert step(SkyrlGymEnvironment, row, text, opening, options).reward < 1.0
    assert step(SkyrlGymEnvironment, row, f"it is</think>{answer}", "<think>\n", options).reward == 1.0


def sees_opening(completions: list[Any], openings: list[str], **columns: Any) -> list[float]:
    (message,), opening = completions[0], openings[0]
    return [float((opening, message["content"]) == ("<think>\n", "so \\boxed{42}"))]


class Opened(Environment):
    """Rewards an action that says what the prompt opened."""

    def __init__(self, row: Any, options: Any) -> None: ...

    async def reset(self) -> Any:
        return PROMPT

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(action.opening == "<think>\n" and not action.answer), done=True)


@pytest.mark.parametrize(
    ("environment", "options", "reward"),
    [
        (MathematicsEnvironment, {}, 0.0),
        (RewardFunctionsEnvironment, {"reward_functions": [f"{__name__}:sees_opening"]}, 1.0),
        (Opened, {}, 1.0),
    ],
)
@pytest.mark.parametrize("placement", ["thread", "process"])
async def test_the_opening_of_the_template_reaches_environments_wherever_they_run(
    environment: Any, options: dict[str, Any], reward: float, placement: Any
):
    if environment is MathematicsEnvironment and placement == "process":
        pytest.skip("this environment runs its own processes")
    tokenizer = tokenizer_of("deepseek_r1_distill", "<｜end▁of▁sentence｜>")
    response = tokenizer("so \\boxed{42}", add_special_tokens=False)["input_ids"]
    generator = EnvironmentGenerator(
        ScriptedClient(lambda request: response, end_tokens=[tokenizer.eos_token_id]),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(
            environment_of=lambda row: environment,
            environment_options=options,
            limits=Limits(max_turns=1),
            environment_placement=placement,
            environment_workers=1,
        ),
    )
    request = GroupRequest(
        group_id=0,
        row=ROW,
        row_place="rows:1",
        num_samples=2,
        params=SamplingParams(max_tokens=100),
        seed=0,
        start_version=0,
    )
    try:
        trajectories = await generator.generate(request)
    finally:
        await generator.aclose()
    assert [trajectory.failure for trajectory in trajectories] == [None, None]
    assert [trajectory.reward for trajectory in trajectories] == [reward, reward]
