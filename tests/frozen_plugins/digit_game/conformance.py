"""What the package's author runs. Not collected with this repository's tests: it is installed first."""

from __future__ import annotations

from typing import ClassVar

from digit_game.environment import DigitGame

from rl_core.testing.environments import EnvironmentConformance


class TestDigitGame(EnvironmentConformance):
    factory = DigitGame
    row: ClassVar = {"prompt": "12+34=", "answer": "64"}
    rewards: ClassVar = {"64": 1.0, "60": 0.5, "46": 0.0}


class TestTheWholeAnswerOnly(EnvironmentConformance):
    factory = DigitGame
    row: ClassVar = {"prompt": "12+34=", "answer": "64"}
    rewards: ClassVar = {"64": 1.0, "60": 0.0}
    options: ClassVar = {"whole_only": True}
