"""The environment suite passes a correct guessing game and fails each faulty one in the named check."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import ClassVar

import attrs
import pytest

from rl_core.errors import PluginError
from rl_core.interfaces import Environment, StepResult
from rl_core.testing import environments
from rl_core.testing.environments import EnvironmentConformance
from tests.core.test_suites import REJECTED


class Guess(Environment):
    """A correct environment: the answer of the row has to be guessed within three turns."""

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


class Counted(Guess):
    """Records which environments are not closed."""

    unclosed: ClassVar[set[Counted]] = set()

    def __init__(self, row, options):
        super().__init__(row, options)
        self.unclosed.add(self)

    async def close(self):
        self.unclosed.discard(self)


class TestGuess(EnvironmentConformance):
    factory = Counted
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {"4": 1.0, "5": 0.0}

    @pytest.fixture(autouse=True)
    def all_are_closed(self):
        yield
        assert not Counted.unclosed, "the suite must close every environment that it creates"


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


# --- optional parts of an environment ---------------------------------------------------------------------------------

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class GuessWithEverything(Guess):
    """Offers a tool, runs in a thread and may block."""

    placement = "thread"
    offers_tools = True

    async def tools(self):
        return [ADD]

    async def step(self, action):
        time.sleep(0.001)
        result = await super().step(action)
        return result if result.done else attrs.evolve(result, observation=f"no, {self.turns_left} left")


class TestGuessWithEverything(EnvironmentConformance):
    factory = GuessWithEverything
    row: ClassVar = {"answer": "4"}
    rewards: ClassVar = {("1", "2", "4"): 1.0, ("1", "2"): 0.0, ("4", "9"): 1.0}


class ToolWithoutName(GuessWithEverything):
    async def tools(self):
        return [{"type": "function", "function": {"description": "adds"}}]


class ToolThatRequiresWhatItHasNot(GuessWithEverything):
    async def tools(self):
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
        return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


class ToolThatIsNoJson(GuessWithEverything):
    async def tools(self):
        return [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": object()}}}
        ]


class ToolsThatAreNotAwaited(GuessWithEverything):
    def tools(self):
        return [ADD]


class ToolsOfItsOwnForEachEpisode(GuessWithEverything):
    episodes = 0

    async def tools(self):
        ToolsOfItsOwnForEachEpisode.episodes += 1
        return [{"type": "function", "function": {"name": f"add{ToolsOfItsOwnForEachEpisode.episodes}"}}]


class ToolsForText(GuessWithEverything):
    async def reset(self):
        return "guess"


class LivesElsewhere(GuessWithEverything):
    placement = "elsewhere"


class NeedsTheMainThread(GuessWithEverything):
    async def step(self, action):
        assert threading.current_thread() is threading.main_thread()
        return await super().step(action)


class HidesItsTools(GuessWithEverything):
    offers_tools = False


class CannotBeSent(GuessWithEverything):
    placement = "process"


CannotBeSent.__qualname__ = "nowhere.CannotBeSent"  # as if made inside a function: pickle cannot find it


class HoldsUpTheOthers(Guess):
    placement = "in_process"

    async def step(self, action):
        time.sleep(0.4)
        return await super().step(action)


class AwaitsAsLong(Guess):
    placement = "in_process"

    async def step(self, action):
        await asyncio.sleep(2.2)  # the suite allows a block of 2 s
        return await super().step(action)


class SpeaksWithABrokenCall(Guess):
    async def reset(self):
        return [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]


WRONG_ENVIRONMENTS = [
    (ActsWithoutAction, "test_it_follows_the_contract"),
    (HidesItsTools, "test_it_follows_the_contract"),
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
    (SpeaksWithABrokenCall, "test_the_first_observation_is_a_prompt"),
    (ToolWithoutName, "test_its_tools_are_functions_that_a_template_can_show"),
    (ToolThatRequiresWhatItHasNot, "test_its_tools_are_functions_that_a_template_can_show"),
    (ToolThatIsNoJson, "test_its_tools_are_functions_that_a_template_can_show"),
    (ToolsThatAreNotAwaited, "test_its_tools_are_functions_that_a_template_can_show"),
    (ToolsOfItsOwnForEachEpisode, "test_its_tools_are_functions_that_a_template_can_show"),
    (ToolsForText, "test_an_episode_with_tools_begins_with_messages"),
    (LivesElsewhere, "test_it_runs_where_its_placement_says"),
    (NeedsTheMainThread, "test_it_runs_where_its_placement_says"),
    (CannotBeSent, "test_it_runs_where_its_placement_says"),
    (HoldsUpTheOthers, "test_it_does_not_hold_up_other_episodes"),
]


@pytest.mark.parametrize(("wrong", "check"), WRONG_ENVIRONMENTS)
def test_a_wrong_environment_is_rejected(wrong, check, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "_LONGEST_PAUSE_S", 0.3)  # a block of 2 s would take too long here

    class Suite(TestGuess):
        factory = wrong
        row: ClassVar = {"answer": "4"}

    with pytest.raises((*REJECTED, PluginError)):
        getattr(Suite(), check)()


@pytest.mark.slow
def test_an_environment_that_awaits_does_not_delay_others():
    class Suite(TestGuess):
        factory = AwaitsAsLong
        rewards: ClassVar = {"4": 1.0}

    Suite().test_it_does_not_hold_up_other_episodes()
