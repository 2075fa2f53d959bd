"""Implements the environment `reward_functions`: functions with TRL's signature score single-turn episodes.

Every argument of a function is a list of one element. A function gets `completions`, the sampled text, as in TRL. It
also gets `prompts`, `completion_ids`, `openings` (`Action.opening`, such as `<think>` if the chat template opens the
thinking) and the row's columns, if it has parameters with these names or `**kwargs`. It returns a list with one number,
or with None to give no reward for this completion. Async functions are awaited. A sample to which no function gives a
reward fails.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs

from rl_core.errors import ConfigError, DataError, PluginError, nearest
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_core.plugins import import_object

_OF_EPISODE = ("prompts", "completions", "completion_ids", "openings")
_ONLY_IN_TRL = ("trainer_state", "log_extra", "log_metric")
KEY, WEIGHTS = "environment.reward_functions", "environment.reward_weights"


@attrs.frozen(kw_only=True)
class RewardFunction:
    """A function and the arguments that it takes by name."""

    call: Callable[..., Any]
    names: frozenset[str] | None
    """None: any names, because the function has `**kwargs` or, like some functions in C, does not show its
    parameters."""
    required: tuple[str, ...]
    """The names without a default."""

    @classmethod
    def of(cls, function: Callable[..., Any], path: str) -> RewardFunction:
        """Reads the function's parameters. Raises ConfigError if it does not take `completions`, or requires an
        argument by position."""
        try:
            parameters = _parameters(function)
        except (TypeError, ValueError):  # C code without a signature; TRL, too, would pass it everything
            return cls(call=function, names=None, required=())
        by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        names = frozenset(one.name for one in by_name)
        takes_any = _takes_any(parameters)
        for one in parameters:
            if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
                raise ConfigError(
                    f"{path!r} requires {one.name!r} by position, but functions get their arguments by name; remove "
                    "the `/` from its parameters",
                    key=KEY,
                )
        if not takes_any and "completions" not in names:
            raise ConfigError(
                f"{path!r} does not take `completions`; expected a function such as def reward(completions, **kwargs) "
                "that returns a list of numbers",
                key=KEY,
            )
        required = tuple(one.name for one in by_name if one.default is one.empty)
        return cls(call=function, names=None if takes_any else names, required=required)


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Returns the parameters of a function. For a decorator's wrapper that takes any names, returns the decorated
    function's parameters if they accept `completions`."""
    own = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    decorated = list(inspect.signature(function).parameters.values())
    fits = _takes_any(decorated) or "completions" in [one.name for one in decorated]
    return decorated if _takes_any(own) and fits else own


def _takes_any(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(one.kind is one.VAR_KEYWORD for one in parameters)


class RewardFunctionsEnvironment(Environment):
    """Plays one turn, and rewards it with the weighted sum of the functions' rewards. Each function's reward is also
    logged as `reward_<function>`."""

    placement = "process"  # one function that never returns, such as a regular expression, would stop all threads

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._row = row
        require_functions(options)
        self._functions = functions_at(_paths(options))
        self._weights = tuple(options.get("reward_weights", ())) or (1.0,) * len(self._functions)

    @staticmethod
    def scored_by(options: Mapping[str, Any]) -> str:
        """Names what scores, for messages."""
        paths = _paths(options)
        return f"the reward function{'s' * (len(paths) > 1)} {', '.join(paths)}"

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        require_functions(options)

    @classmethod
    def require_episode(cls, row: Row, options: Mapping[str, Any]) -> None:
        """See `Environment.require_episode`. The functions' parameters must be columns of the row."""
        given = dict.fromkeys([*row, *_OF_EPISODE])
        for name, function in functions_at(_paths(options)).items():
            _wanted(name, function, given)

    async def reset(self) -> Prompt:
        return self._row["prompt"]

    async def step(self, action: Action) -> StepResult:
        prompt = self._row["prompt"]
        completion = action.text if isinstance(prompt, str) else [{"role": "assistant", "content": action.text}]
        columns = {name: [value] for name, value in self._row.items()}
        given = {
            **columns,
            "prompts": [prompt],
            "completions": [completion],
            "completion_ids": [list(action.tokens)],
            "openings": [action.opening],
        }
        metrics: dict[str, float] = {}
        total = 0.0
        for (name, function), weight in zip(self._functions.items(), self._weights, strict=True):
            answer = function.call(**_wanted(name, function, given))
            reward = _number(name, await answer if inspect.isawaitable(answer) else answer)
            if reward is not None:
                total += weight * reward
                metrics[f"reward_{name}"] = reward
        if not metrics:
            names = ", ".join(self._functions)
            raise DataError(
                f"no reward function gives this completion a reward: {names} returned None. A reward of 0 would be "
                "trained on like any other; let one of them return a number for every row"
            )
        return StepResult(reward=total, done=True, metrics=metrics)


@cache
def functions_at(paths: tuple[str, ...]) -> dict[str, RewardFunction]:
    """Imports the functions and returns them by name, in order. If two functions have the same name, the name of the
    later function gets a number.

    Raises:
        ConfigError: no function is named, a path has no colon, or a function cannot be called by name with
            `completions`.
        PluginError: a path cannot be imported, or does not name a function.
    """
    if not paths:
        raise ConfigError(f"got no function; set e.g. {KEY}=[my_module:reward]", key=KEY)
    functions: dict[str, RewardFunction] = {}
    for path in paths:
        if ":" not in path:
            module, _, name = path.rpartition(".")
            raise ConfigError(f"got {path!r}; expected package.module:function, e.g. {module or path}:{name}", key=KEY)
        function = import_object(path, KEY)
        if not callable(function) or inspect.isclass(function):
            raise PluginError(f"{path!r} is of type {type(function).__name__}; expected a function", key=KEY)
        name = path.partition(":")[2]
        names = (name, *(f"{name}_{number}" for number in range(2, len(functions) + 2)))
        functions[next(each for each in names if each not in functions)] = RewardFunction.of(function, path)
    return functions


def _wanted(name: str, function: RewardFunction, given: Mapping[str, Any]) -> dict[str, Any]:
    missing = [one for one in function.required if one not in given]
    if missing:
        others = [key for key in given if key not in function.required and key not in (function.names or ())]
        raise DataError(f"the reward function {name} needs {missing[0]!r}; {_what_there_is(missing[0], given, others)}")
    return {key: value for key, value in given.items() if function.names is None or key in function.names}


def _what_there_is(name: str, given: Mapping[str, Any], others: Sequence[str]) -> str:
    """Returns the end of the error message about the parameter `name`, for which there is no value. `others` are the
    names that the function does not take yet."""
    if name in _ONLY_IN_TRL:
        return f"only TRL passes it, so give it a default, such as {name}=None"
    columns = ", ".join(key for key in given if key not in _OF_EPISODE)
    return f"the row has {columns}.{nearest(name, others)} Rename the parameter or the column"


def _number(name: str, answer: Any) -> float | None:
    """Returns the single number in a function's result, or None. Raises DataError if the result is not a list of one
    number or None, or if the number is not finite."""
    not_one_number = f"the reward function {name} returned {answer!r:.80}; expected a list of one number"
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 1:
        raise DataError(not_one_number)
    if values[0] is None:
        return None
    if isinstance(values[0], str | bytes):
        raise DataError(not_one_number)
    try:
        reward = float(values[0])
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(not_one_number) from error
    if not math.isfinite(reward):
        raise DataError(f"the reward function {name} returned {reward}; expected a finite number, or None")
    return reward


def require_functions(options: Mapping[str, Any]) -> None:
    """Imports all functions. Checks that there are no other options and, if weights are given, that each function has
    one. Raises ConfigError, and the errors of `functions_at`."""
    others = [name for name in options if f"environment.{name}" not in (KEY, WEIGHTS)]
    if others:
        raise ConfigError(
            "has no effect, because reward functions do not get the options; remove it, or pass the value to the "
            "functions in a column of the rows",
            key=f"environment.options.{others[0]}",
        )
    for key, kind, example in ((KEY, str, "[my_module:reward]"), (WEIGHTS, int | float, "[1.0]")):
        given = options.get(key.removeprefix("environment."), ())
        if not isinstance(given, list | tuple) or not all(isinstance(one, kind) for one in given):
            raise ConfigError(f"got {given!r:.80}; expected a list, such as {example}", key=key)
    paths, weights = _paths(options), tuple(options.get("reward_weights", ()))
    functions_at(paths)
    if weights and len(weights) != len(paths):
        raise ConfigError(f"got {len(weights)} weights for {len(paths)} functions; set one for each", key=WEIGHTS)


def _paths(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(options.get("reward_functions", ()))
