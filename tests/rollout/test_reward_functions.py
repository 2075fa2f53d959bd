"""Reward functions in TRL's form replace an environment."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rl_core.config import from_mapping, generator_spec
from rl_core.config.value_checks import check_values
from rl_core.errors import ConfigError, DataError, PluginError
from rl_core.interfaces import Action
from rl_rollout.generator_plugin import environment
from rl_rollout.reward_functions import RewardFunctionsEnvironment

HERE = "tests.rollout.test_reward_functions"


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    """The number of characters of each completion, which is text or a list of messages."""
    return [float(len(one if isinstance(one, str) else one[0]["content"])) for one in completions]


async def right(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    assert len(prompts) == len(completions) == len(answer) == 1
    return [float(completions[0] == answer[0])]


def tokens(completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
    return [float(sum(completion_ids[0]))]


def silent(completions: list[Any]) -> list[None]:
    return [None]


def wrong(completions: list[Any]) -> float:
    return 1.0


def wordy(completions: list[Any]) -> list[str]:
    return ["good"]


def not_a_number(completions: list[Any]) -> list[float]:
    return [float("nan")]


def blind(prompts: list[Any]) -> list[float]:
    return [1.0]


def needy(completions: list[Any], anser: list[str]) -> list[float]:
    return [1.0]


def stateful(completions: list[Any], trainer_state: Any) -> list[float]:
    return [float(trainer_state.global_step)]


def by_position(completions: list[Any], /) -> list[float]:
    return [1.0]


class Scaled:
    """A reward function that is an object with `__call__`."""

    def __call__(self, completions: list[Any], *, scale: list[float]) -> list[float]:
        return scale


def logged(function: Any) -> Any:
    """A decorator that passes on all arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def for_texts(function: Any) -> Any:
    """A decorator for functions of texts: passes on only the completions."""

    @functools.wraps(function)
    def call(completions: list[Any], **_: Any) -> Any:
        return function(completions)

    return call


@logged
def decorated(completions: list[Any]) -> list[float]:
    return [7.0]


@for_texts
def adapted(texts: list[str]) -> list[float]:
    return [float(len(texts[0]))]


def lettered(completions: list[str], **columns: Any) -> list[str]:
    return ["1.0"]


def solved(completions: list[str], solution: list[str]) -> list[float]:
    return [1.0]


def solved_of_any(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return [1.0]


scaled = functools.partial(Scaled(), scale=[3.0])
formatted = "{completions[0]}".format
"""A callable in C that does not show its parameters, and takes any names."""


async def played(row: dict[str, Any], *names: str, weights: tuple[float, ...] = ()) -> Any:
    options = {"reward_functions": [f"{HERE}:{name}" for name in names], "reward_weights": list(weights)}
    episode = RewardFunctionsEnvironment(row, options)
    assert await episode.reset() == row["prompt"]
    return await episode.step(Action(text="42", tokens=(4, 2), stop_reason="stop"))


async def test_rewards_are_summed_by_weight_and_reported_by_name():
    row = {"prompt": "6*7=", "answer": "42"}
    result = await played(row, "length", "right", "tokens", weights=(0.5, 10.0, 1.0))
    assert (result.reward, result.done) == (0.5 * 2 + 10.0 + 6.0, True)
    assert result.metrics == {"reward_length": 2.0, "reward_right": 1.0, "reward_tokens": 6.0}


async def test_functions_of_the_same_name_are_numbered(monkeypatch: pytest.MonkeyPatch):
    for name in ("length_2", "length_3"):
        monkeypatch.setitem(globals(), name, tokens)
    result = await played({"prompt": "x"}, "length_3", "length", "length", "length_2", "length")
    values = {"length_3": 6.0, "length": 2.0, "length_2": 2.0, "length_2_2": 6.0, "length_4": 2.0}
    assert result.metrics == {f"reward_{name}": value for name, value in values.items()}
    assert result.reward == sum(values.values())


async def test_partials_decorated_functions_and_callable_objects_are_accepted():
    result = await played({"prompt": "x", "scale": 5}, "scaled")
    assert result.metrics == {"reward_scaled": 5.0}, "a column replaces the value of the same name"
    assert (await played({"prompt": "x"}, "scaled")).metrics == {"reward_scaled": 3.0}
    decorations = await played({"prompt": "x", "answer": "y"}, "decorated", "adapted")
    assert decorations.metrics == {"reward_decorated": 7.0, "reward_adapted": 2.0}


async def test_completions_of_a_chat_prompt_are_messages():
    chat = {"prompt": [{"role": "user", "content": "6*7="}]}
    assert (await played(chat, "length")).reward == 2.0


async def test_a_function_that_returns_a_list_of_none_gives_no_reward():
    result = await played({"prompt": "x"}, "silent", "length")
    assert (result.reward, result.metrics) == (2.0, {"reward_length": 2.0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"returned 1\.0; expected a list of one number"),
        ("wordy", r"the reward function wordy returned \['good'\]; expected a list of one number"),
        ("lettered", r"the reward function lettered returned \['1\.0'\]; expected a list of one number"),
        ("not_a_number", "returned nan; expected a finite number"),
        ("formatted", "the reward function formatted returned '42'; expected a list of one number"),
        ("stateful", r"needs 'trainer_state'; only TRL passes it, so give it a default, such as trainer_state=None$"),
        ("needy", r"needs 'anser'; the row has prompt, answer\. Did you mean 'answer'\?"),
    ],
)
async def test_an_error_names_the_functions_fault(name: str, message: str):
    with pytest.raises(DataError, match=message):
        await played({"prompt": "x", "answer": "y"}, name)


def config_of(*overrides: str) -> Any:
    return from_mapping({"trainer.policy.model.path": "model"}, list(overrides))


def validate(config: Any) -> None:
    check_values(config)
    plugin, spec = generator_spec(config)
    assert plugin is environment
    plugin.validate(spec)


def test_reward_functions_select_their_environment():
    config = config_of(f"environment.reward_functions=[{HERE}:length]")
    assert config.environment.env_class == "reward_functions"
    validate(config)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ([f"environment.reward_functions={HERE}:lenght"], PluginError, "has no 'lenght'. Did you mean 'length'"),
        ([f"environment.reward_functions={HERE}.length"], ConfigError, f"e.g. {HERE}:length"),
        ([f"environment.reward_functions={HERE}:blind"], ConfigError, "does not take `completions`"),
        ([f"environment.reward_functions={HERE}:HERE"], PluginError, "is of type str; expected a function"),
        ([f"environment.reward_functions={HERE}:Scaled"], PluginError, "is of type type; expected a function"),
        ([f"environment.reward_functions={HERE}:by_position"], ConfigError, "requires 'completions' by position"),
        (
            [f"environment.reward_functions={HERE}:length", "environment.reward_weights=[1, 2]"],
            ConfigError,
            "got 2 weights for 1 functions",
        ),
        (
            [f"environment.reward_functions={HERE}:length", "environment.options.scale=2"],
            ConfigError,
            "environment.options.scale: has no effect, because reward functions do not get the options",
        ),
        (["environment.reward_weights=[1]"], ConfigError, "there are no functions to weigh"),
        (
            [f"environment.reward_functions={HERE}:length", "environment.env_class=gsm8k"],
            ConfigError,
            "environment.env_class=gsm8k are set, but only one of them can score; set environment.env_class=null",
        ),
    ],
)
def test_unusable_reward_functions_are_refused_before_a_run(overrides: list[str], error: type[Exception], message: str):
    with pytest.raises(error, match=message.replace(".", r"\.").replace("(", r"\(")):
        validate(config_of(*overrides))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("needy", {"prompt": "x", "answer": "y"}, r"needs 'anser'; the row has prompt, answer\. Did you mean 'answer'"),
        ("stateful", {"prompt": "x"}, "needs 'trainer_state'; only TRL passes it"),
        ("right", {"prompt": "x"}, "needs 'answer'; the row has prompt"),
        ("solved", {"prompt": "x"}, r"needs 'solution'; the row has prompt\. Rename the parameter or the column$"),
        ("solved_of_any", {"prompt": "x"}, r"needs 'solution'; the row has prompt\. Rename the parameter or"),
    ],
)
def test_parameters_that_are_not_columns_are_refused_before_a_run(name: str, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        RewardFunctionsEnvironment.require_episode(row, {"reward_functions": [f"{HERE}:{name}"]})


@pytest.mark.parametrize("name", ["length", "right", "tokens", "silent", "scaled", "formatted", "decorated", "adapted"])
def test_functions_that_fit_the_row_pass_the_check_before_a_run(name: str):
    options = {"reward_functions": [f"{HERE}:{name}"]}
    RewardFunctionsEnvironment.require_options(options)
    RewardFunctionsEnvironment.require_episode({"prompt": "x", "answer": "y"}, options)
