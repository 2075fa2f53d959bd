"""The environments of the package skyrl-gym, run unchanged through `SkyrlGymEnvironment`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, ClassVar

import pytest

from rl_core.errors import ConfigError, DataError, RLError
from rl_core.interfaces import Action, StepResult
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.skyrl_gym import SkyrlGymEnvironment

ROW = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_spec": {"ground_truth": "2"}}


class TestGsm8kOfSkyrl(EnvironmentConformance):
    factory = SkyrlGymEnvironment
    row: ClassVar[dict[str, Any]] = ROW
    options: ClassVar[dict[str, Any]] = {"env": "gsm8k_multi_turn", "max_turns": 3}
    rewards: ClassVar[dict[Any, float]] = {
        "#### 2": 1.0,
        ("#### 3", "#### 2"): 1.0 + 0.2 / 3,
        ("x", "#### 3", "#### 4"): 0.4 / 3,
        "x": 0.0,
    }


class Plain:
    """A user's environment in skyrl-gym's form; the row's `output` overrides what `step` returns."""

    closed = 0

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.config, self.extras = env_config, extras

    def init(self, prompt: Any) -> Any:
        return [*prompt, {"role": "user", "content": self.config.inner.text}], {}

    def step(self, action: str) -> dict[str, Any]:
        output = {"observations": [], "reward": len(action), "done": True, "metadata": {}}
        return {**output, **self.extras.get("output", {})}

    def get_metrics(self) -> dict[str, Any]:
        return {"words": 3, "name": "left out", "broken": float("nan")}

    def close(self) -> None:
        Plain.closed += 1


@dataclasses.dataclass
class Settings:
    address: str
    topk: int = 3


class Configured(Plain):
    """A user's environment that declares its configuration."""

    def __init__(self, env_config: Settings | dict[str, Any], extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)

    def init(self, prompt: Any) -> Any:
        return [{"role": "user", "content": f"{self.config.address} {self.config.topk}"}], {}


PLAIN = {"env": "tests.environments.test_skyrl_gym:Plain", "config": {"inner": {"text": "hello"}}}


def play(row: dict[str, Any], options: dict[str, Any]) -> tuple[Any, StepResult]:
    async def steps() -> tuple[Any, StepResult]:
        environment = SkyrlGymEnvironment(row, options)
        try:
            prompt = await environment.reset()
            return prompt, await environment.step(Action(text="four", tokens=(), stop_reason="stop"))
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(steps())


def test_a_declared_configuration_has_its_defaults_and_no_other_names():
    options = {"env": "tests.environments.test_skyrl_gym:Configured", "config": {"address": "here"}}
    SkyrlGymEnvironment.require_options(options)
    prompt, _ = play({**ROW, "x": 1}, options)
    assert prompt == [{"role": "user", "content": "here 3"}]
    for config, message in (
        ({"address": "here", "top_k": 5}, r"config\.top_k: .*expected address, topk\. Did you mean 'topk'\?"),
        ({}, r"config\.address: is missing; Settings of .* has no default for it"),
    ):
        with pytest.raises(ConfigError, match=message):
            SkyrlGymEnvironment.require_options({**options, "config": config})
    search = {"env": "search", "config": {"topk": 5}}
    SkyrlGymEnvironment.require_options(search)
    assert asyncio.run(SkyrlGymEnvironment(ROW, search).reset()) == ROW["prompt"]


def test_a_users_environment_gets_its_configuration_and_row():
    before = Plain.closed
    prompt, result = play(ROW, PLAIN)
    assert prompt[-1]["content"] == "hello"
    assert result == StepResult(reward=4.0, done=True, metrics={"accuracy": 4.0, "words": 3.0})
    assert Plain.closed == before + 1


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"reward": [0.0, 1.0]}, "returned the reward .*; expected one number"),
        ({"postprocessed_action": "x"}, "postprocessed_action"),
        ({"done": False}, "done=False and no observation"),
    ],
)
def test_step_outputs_without_a_counterpart_are_an_error(output: dict[str, Any], message: str):
    with pytest.raises(RLError, match=message):
        play({**ROW, "output": output}, PLAIN)


def test_a_prompt_of_text_is_refused():
    with pytest.raises(DataError, match=r"prompt: got text, '1\+1='; environments of skyrl-gym start from messages"):
        SkyrlGymEnvironment({**ROW, "prompt": "1+1="}, PLAIN)


def test_a_name_that_skyrl_gym_does_not_know_is_refused():
    with pytest.raises(DataError, match=r"skyrl-gym has no 'gsm8'; it has .*Did you mean 'gsm8k'"):
        SkyrlGymEnvironment(ROW, {"env": "gsm8"})


@pytest.mark.parametrize(
    ("name", "column", "right", "wrong"),
    [
        ("gsm8k", "reward_spec", "1234", ["1,234", "1234 apples", "$5", "", None, 5]),
        ("gsm8k_multi_turn", "reward_spec", "-3.5", ["1,234", None]),
        ("aime", "reward_model", "33", [33, None]),
        ("search", "reward_spec", {"target": ["Jane Austen", "Austen"]}, [{"target": []}, "Jane", None]),
    ],
)
def test_a_row_whose_own_answer_earns_no_reward_is_refused_before_the_run(name, column, right, wrong):
    row = {"prompt": ROW["prompt"]}
    SkyrlGymEnvironment.require_episode({**row, column: {"ground_truth": right}}, {"env": name})
    for truth in wrong:
        with pytest.raises(DataError, match=rf"{column}\.ground_truth"):
            SkyrlGymEnvironment.require_episode({**row, column: {"ground_truth": truth}}, {"env": name})
    with pytest.raises(DataError, match=rf"{column}\.ground_truth"):
        SkyrlGymEnvironment.require_episode(row, {"env": name})


def test_a_users_environment_is_not_started_before_the_run():
    SkyrlGymEnvironment.require_episode({"prompt": ROW["prompt"]}, {"env": "nowhere:Missing"})
