"""Checks of what the methods of an environment return. All code that calls environments uses these checks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from rl_core.errors import DataError
from rl_core.interfaces.messages import Message, require_messages
from rl_core.interfaces.rollouts import StepResult

T = TypeVar("T")
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_END_INSTEAD = "; return an observation with done=False, or end the episode with done=True"


def require_awaitable(found: Awaitable[T], method: str) -> Awaitable[T]:
    """Returns `found`, the return value of an environment's method. Raises DataError if it cannot be awaited."""
    if not inspect.isawaitable(found):
        raise DataError(
            f"the environment's `{method}` returned {type(found).__name__}, expected an awaitable; define it with "
            f"`async def {method}`"
        )
    return found


def require_step_result(result: object) -> StepResult:
    """Returns the result with reward and metrics converted to floats. Raises DataError unless the result is a
    StepResult whose metrics have text as names and whose numbers are finite."""
    if not isinstance(result, StepResult):
        raise DataError(f"the environment's step returned {type(result).__name__}; expected StepResult")
    if not _is_flag(result.done):
        raise DataError(f"the environment's done is {result.done!r:.80}, expected True or False")
    reward = _number(result.reward, "reward")
    if not isinstance(result.metrics, Mapping):
        raise DataError(f"the environment's metrics are {type(result.metrics).__name__}; expected a mapping")
    if wrong := [name for name in result.metrics if not isinstance(name, str)]:
        raise DataError(f"the environment's metrics have the name {wrong[0]!r:.80}; expected text as names")
    metrics = {name: _number(value, f"metric {name!r}") for name, value in result.metrics.items()}
    return attrs.evolve(result, reward=reward, metrics=metrics)


def require_observed_text(observation: object) -> str:
    """Returns the observation of an episode that began with text. Raises DataError if the observation is not text."""
    if not isinstance(observation, str):
        raise DataError(
            f"the episode began with text, so the environment's observations must be text; got {observation!r:.200}"
            f"{_END_INSTEAD if observation is None else ''}"
        )
    return observation


def require_observed_messages(observation: object) -> Sequence[Message]:
    """Returns the observation of an episode that began with messages, with text converted to a user message. Raises
    DataError if the observation is neither text nor messages, or has a message of the assistant."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    try:
        messages = require_messages(observation, "an observation")
    except DataError as error:
        if observation is None:
            raise DataError(f"{error}{_END_INSTEAD}") from error
        raise
    if any(message["role"] == "assistant" for message in messages):
        raise DataError("an observation has a message of the role 'assistant'; only the policy writes such messages")
    return messages


def _is_flag(value: Any) -> bool:
    """Whether a value is True, False or equal to one of them, as NumPy's booleans are."""
    try:
        return value in (True, False)
    except (TypeError, ValueError, RuntimeError):  # an array or tensor of several values
        return False


def _number(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _FLOAT32_MAX:
        raise DataError(f"the environment's {name} is {value!r:.80}, expected a finite number in the range of float32")
    return number
