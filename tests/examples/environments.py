"""Environments that the tests of runs use."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_core.interfaces import Action, Row, StepResult
from rl_examples.arithmetic import ArithmeticEnvironment
from rl_examples.guess import MAX_GUESSES, GuessEnvironment


class FirstDigit(ArithmeticEnvironment):
    """Rewards a right first digit: an untrained model samples it now and then, so even a few steps have a gradient."""

    async def step(self, action: Action) -> StepResult:
        is_right = float(action.text[:1] == self._answer[0])
        return StepResult(reward=is_right, done=True, metrics={"accuracy": is_right})


class Spelled(FirstDigit):
    """The reward is the sum of the response's character codes, so that different responses mostly differ in reward."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(sum(map(ord, action.text))), done=True, metrics={"accuracy": 0.0})


class SeesFile(FirstDigit):
    """Reports whether the file `options.file` exists, as the metric `is_there`."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._is_there = float(Path(options["file"]).exists())

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        return attrs.evolve(result, metrics={"is_there": self._is_there})


class Interrupting(FirstDigit):
    """At the problem `options.prompt`, sends SIGINT to the process, as Ctrl-C does; that step never ends."""

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._interrupts = row["prompt"] == options["prompt"]

    async def step(self, action: Action) -> StepResult:
        if self._interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return await super().step(action)


class Failing(FirstDigit):
    """Raises for every problem whose first number is odd (`options.fails=odd`), or for every problem
    (`options.fails=all`).
    """

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._fails = options["fails"] == "all" or int(row["prompt"][1]) % 2 == 1

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            raise ConnectionError("the judge is gone")
        return await super().step(action)


class Exits(Failing):
    """Calls sys.exit(0), as a script does."""

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            sys.exit(0)
        return await super().step(action)


class Cancels(Failing):
    """Raises CancelledError although nobody cancelled the step."""

    placement = "thread"

    async def step(self, action: Action) -> StepResult:
        if self._fails:
            raise asyncio.CancelledError
        return await super().step(action)


class FailsLater(FirstDigit):
    """Fails every step after the first `options.after` steps in this process."""

    _numbers = itertools.count()

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._after: int = options["after"]

    async def step(self, action: Action) -> StepResult:
        if next(self._numbers) >= self._after:
            raise ConnectionError("the judge is gone")
        return await super().step(action)


class PressesTheKey(FirstDigit):
    """Sends SIGINT to the process once, as Ctrl-C does; every step blocks until `released`, for at most ten minutes."""

    placement = "thread"
    released = threading.Event()
    _numbers = itertools.count()

    async def step(self, action: Action) -> StepResult:
        if next(self._numbers) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        self.released.wait(600)
        raise ConnectionError("the test has ended")


class OddNumbers(FirstDigit):
    """Returns a reward outside float32's range (`options.odd=reward`), a metric with a reserved name (`name`) or with a
    name that is not text (`tuple`), or a metric that is not a number (`metric`).
    """

    def __init__(self, row: Row, options: Mapping[str, Any]):
        super().__init__(row, options)
        self._odd = options["odd"]

    async def step(self, action: Action) -> StepResult:
        if self._odd == "reward":
            return StepResult(reward=1e39, done=True)
        metrics = {"name": {"reward": 1.0}, "tuple": {("a", 1): 1.0}, "metric": {"accuracy": "high"}}[self._odd]
        return StepResult(reward=0.0, done=True, metrics=metrics)  # pyright: ignore[reportArgumentType]


class NotFinite(FirstDigit):
    """Returns NaN as the reward."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float("nan"), done=True)


class Patient(GuessEnvironment):
    """Lasts four turns whatever the policy says. Each turn that begins with a digit earns 0.5, so that an untrained
    model earns something.
    """

    async def step(self, action: Action) -> StepResult:
        await super().step(action)
        is_done = self._guesses == MAX_GUESSES
        return StepResult(
            reward=0.5 * (action.text[:1] in tuple("0123456789")),
            done=is_done,
            observation=None if is_done else [{"role": "user", "content": "<"}],
            metrics={"accuracy": 0.0},
        )
