"""The suite of environments passes a guessing game, and fails each wrong one in the check that is named."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest

from rl_core.errors import PluginError
from rl_core.interfaces import StepResult
from rl_core.testing.environments import EnvironmentConformance
from tests.core.test_suites import REJECTED


class Guess:
    """A right environment: three turns at most to say the row's answer."""

    def __init__(self, row, options):
        self.answer, self.turns_left = row["answer"], options.get("turns", 3)

    async def reset(self):
        return [{"role": "user", "content": "guess"}]

    async def step(self, action):
        self.turns_left -= 1
        is_right = action.text == self.answer
        is_done = is_right or not self.turns_left
        return StepResult(
            reward=float(is_right),
            done=is_done,
            observation=None if is_done else "no",
            metrics={"right": float(is_right)},
        )

    async def close(self):
        pass


class TestGuess(EnvironmentConformance):
    factory = Guess
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {"4": 1.0, "5": 0.0}


class TestGuessOfSeveralTurns(EnvironmentConformance):
    factory = Guess
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {("1", "2", "4"): 1.0, ("1", "2"): 0.0, ("4", "9"): 1.0}


class RewardsEverything(Guess):
    async def step(self, action):
        return StepResult(reward=1.0, done=True)


class NeverDone(Guess):
    async def step(self, action):
        return StepResult(reward=0.0, done=False, observation="go on")


class NoObservation(Guess):
    async def step(self, action):
        return attrs.evolve(await super().step(action), observation=None)


class NotANumber(Guess):
    async def step(self, action):
        return attrs.evolve(await super().step(action), metrics={"right": float("nan")})


class ShowsMessagesAfterText(Guess):
    async def reset(self):
        return "guess"

    async def step(self, action):
        result = await super().step(action)
        return result if result.done else attrs.evolve(result, observation=[{"role": "user", "content": "again"}])


class SpeaksForThePolicy(Guess):
    async def step(self, action):
        result = await super().step(action)
        return result if result.done else attrs.evolve(result, observation=[{"role": "assistant", "content": "4"}])


class EmptyPrompt(Guess):
    async def reset(self):
        return ""


class RefusesCutOff(Guess):
    async def step(self, action):
        assert action.stop_reason == "stop"
        return await super().step(action)


class RemembersOtherEpisodes(Guess):
    seen = 0

    async def step(self, action):
        RemembersOtherEpisodes.seen += 1
        return attrs.evolve(await super().step(action), metrics={"right": float(RemembersOtherEpisodes.seen)})


class MetricsOnSuccessOnly(Guess):
    async def step(self, action):
        result = await super().step(action)
        return result if result.reward else attrs.evolve(result, metrics={})


class ChangesItsRow(Guess):
    def __init__(self, row, options):
        super().__init__(row, options)
        row["visits"] = row.get("visits", 0) + 1


class ClosesOnce(Guess):
    is_closed = False

    async def close(self):
        assert not self.is_closed
        self.is_closed = True


class ActsWithoutAction(Guess):
    async def step(self):
        return StepResult(reward=0.0, done=True)


WRONG_ENVIRONMENTS = [
    (ActsWithoutAction, "test_it_follows_this_version_of_the_contract"),
    (RewardsEverything, "test_responses_get_the_rewards_they_deserve"),
    (NeverDone, "test_responses_get_the_rewards_they_deserve"),
    (NoObservation, "test_every_answer_of_an_episode_is_whole"),
    (NotANumber, "test_every_answer_of_an_episode_is_whole"),
    (MetricsOnSuccessOnly, "test_every_answer_of_an_episode_is_whole"),
    (ShowsMessagesAfterText, "test_observations_go_on_as_the_episode_began"),
    (SpeaksForThePolicy, "test_observations_go_on_as_the_episode_began"),
    (EmptyPrompt, "test_the_first_observation_is_a_prompt"),
    (RefusesCutOff, "test_a_response_that_is_empty_or_cut_off_is_judged"),
    (RemembersOtherEpisodes, "test_the_same_response_gets_the_same_reward_again"),
    (RemembersOtherEpisodes, "test_episodes_side_by_side_do_not_touch_each_other"),
    (ChangesItsRow, "test_it_does_not_change_its_row"),
    (ClosesOnce, "test_it_can_be_closed_before_it_is_done_and_twice"),
]


@pytest.mark.parametrize(("wrong", "check"), WRONG_ENVIRONMENTS)
def test_a_wrong_environment_is_rejected(wrong, check):
    class Suite(TestGuess):
        factory = wrong
        row: ClassVar = {"answer": "4"}

    with pytest.raises((*REJECTED, PluginError)):
        getattr(Suite(), check)()
