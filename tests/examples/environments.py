"""Environments of these tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from rl_core.interfaces import Action, Row, StepResult
from rl_examples.arithmetic import ArithmeticEnvironment
from rl_examples.guess import MAX_GUESSES, GuessEnvironment


class FirstDigit(ArithmeticEnvironment):
    """Right when the first digit is: an untrained model gets it now and then, so that even a few steps have a
    gradient."""

    async def step(self, action: Action) -> StepResult:
        is_right = float(action.text[:1] == self._answer[0])
        return StepResult(reward=is_right, done=True, metrics={"accuracy": is_right})


class Spelled(FirstDigit):
    """A reward that says what the answer was: the sum of its characters' numbers."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(sum(map(ord, action.text))), done=True, metrics={"accuracy": 0.0})


class Failing(FirstDigit):
    """Raises for every problem whose first number is odd (`options.fails=odd`) or for all."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._fails = options["fails"] == "all" or int(row["prompt"][1]) % 2 == 1

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            raise ConnectionError("the judge is gone")
        return await super().step(action)


class Exits(Failing):
    """Leaves, as a script does."""

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            sys.exit(0)
        return await super().step(action)


class Cancels(Failing):
    """Lets a cancellation through that is nobody's but its own."""

    placement = "thread"

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            raise asyncio.CancelledError
        return await super().step(action)


class FailsLater(FirstDigit):
    """Fails after so many episodes of the process (`options.after`)."""

    _numbers = itertools.count()

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._after: int = options["after"]

    async def step(self, action: Action) -> StepResult:
        if next(self._numbers) >= self._after:
            raise ConnectionError("the judge is gone")
        return await super().step(action)


class PressesTheKey(FirstDigit):
    """Presses Ctrl-C once, and blocks for ten minutes."""

    placement = "thread"
    _numbers = itertools.count()

    async def step(self, action: Action) -> StepResult:
        if next(self._numbers) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
        raise AssertionError


class OddNumbers(FirstDigit):
    """A reward beyond float32's range (`options.odd=reward`) or a metric that is no number."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._odd = options["odd"]

    async def step(self, action: Action) -> StepResult:
        if self._odd == "reward":
            return StepResult(reward=1e39, done=True)
        name, value = ("reward", 1.0) if self._odd == "name" else ("accuracy", "high")
        return StepResult(reward=0.0, done=True, metrics={name: value})  # pyright: ignore[reportArgumentType]


class NotFinite(FirstDigit):
    """A reward that is no number."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float("nan"), done=True)


class Patient(GuessEnvironment):
    """Goes on for four turns whatever is said; half a point for each digit, so that an untrained model earns some."""

    async def step(self, action: Action) -> StepResult:
        await super().step(action)
        is_done = self._guesses == MAX_GUESSES
        return StepResult(
            reward=0.5 * (action.text[:1] in tuple("0123456789")),
            done=is_done,
            observation=None if is_done else [{"role": "user", "content": "<"}],
            metrics={"accuracy": 0.0},
        )
