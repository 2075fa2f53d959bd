"""Conformance suite of environments.

A plug-in's author writes

    class TestMyEnvironment(EnvironmentConformance):
        factory = MyEnvironment
        row = {"prompt": "2+2=", "answer": "4"}
        rewards = {"4": 1.0, "5": 0.0}

and runs pytest. `rewards` maps a response, given in every turn, to the reward of the whole episode; a tuple of
responses is given one in each turn, its last one from then on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from rl_core import plugins
from rl_core.interfaces import Action, Environment, EnvironmentFactory, Prompt, StepResult, StopReason

Responses = str | tuple[str, ...]
_MAX_TURNS = 100
_WAIT_S = 60.0


class EnvironmentConformance:
    """Subclass, set the four attributes, run pytest."""

    factory: ClassVar[EnvironmentFactory]
    row: ClassVar[Mapping[str, Any]]
    rewards: ClassVar[Mapping[Responses, float]]
    options: ClassVar[Mapping[str, Any]] = {}

    def test_it_follows_this_version_of_the_contract(self) -> None:
        plugins.fitted("rl_core.environments", type(self).factory, "factory")

    def test_the_first_observation_is_a_prompt(self) -> None:
        async def reset() -> Prompt:
            environment = self._make()
            try:
                return await environment.reset()
            finally:
                await environment.close()

        _require_prompt(_run(reset()))

    def test_responses_get_the_rewards_they_deserve(self) -> None:
        assert len(set(self.rewards.values())) > 1, "`rewards` needs a good and a bad response to prove anything"
        for response, reward in self.rewards.items():
            results = _run(self._play(response))
            assert math.isclose(sum(r.reward for r in results), reward, abs_tol=1e-9), (response, results)

    def test_every_answer_of_an_episode_is_whole(self) -> None:
        names = set()
        for response in self.rewards:
            results = _run(self._play(response))
            assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
            for result in results:
                assert math.isfinite(result.reward), result
                assert all(math.isfinite(value) for value in result.metrics.values()), result
                if result.done:
                    assert result.observation is None, "an episode that is done has nothing more to show"
                else:
                    assert result.observation is not None, "an episode that goes on must say what the policy sees"
                    _require_prompt(result.observation)
            names.add(frozenset(results[-1].metrics))
        assert len(names) == 1, f"every episode reports the same metrics, or their means are wrong: {names}"

    def test_observations_go_on_as_the_episode_began(self) -> None:
        async def reset() -> Prompt:
            return await self._make().reset()

        is_text = isinstance(_run(reset()), str)
        for response in self.rewards:
            shown = [result.observation for result in _run(self._play(response)) if result.observation is not None]
            for observation in shown:
                if not isinstance(observation, str):
                    assert not is_text, "an episode that began with text goes on with text"
                    roles = [message["role"] for message in observation]
                    assert "assistant" not in roles, "the assistant is the policy: an observation does not speak for it"

    def test_a_response_that_is_empty_or_cut_off_is_judged(self) -> None:
        for response in ("", *self.rewards):
            assert _run(self._play(response, stop_reason="length"))[-1].done

    def test_the_same_response_gets_the_same_reward_again(self) -> None:
        for response in self.rewards:
            assert _run(self._play(response)) == _run(self._play(response)), response

    def test_episodes_side_by_side_do_not_touch_each_other(self) -> None:
        responses = list(self.rewards) * 3

        async def together() -> list[list[StepResult]]:
            return await asyncio.gather(*[self._play(response) for response in responses])

        for response, results in zip(responses, _run(together()), strict=True):
            assert results == _run(self._play(response)), response

    def test_it_does_not_change_its_row(self) -> None:
        before = repr(self.row)
        for response in self.rewards:
            _run(self._play(response))
        assert repr(self.row) == before

    def test_it_can_be_closed_before_it_is_done_and_twice(self) -> None:
        async def close_twice() -> None:
            environment = self._make()
            await environment.reset()
            await environment.close()
            await environment.close()

        _run(close_twice())

    def _make(self) -> Environment:
        environment = type(self).factory(self.row, self.options)
        assert isinstance(environment, Environment)
        return environment

    async def _play(self, responses: Responses, *, stop_reason: StopReason = "stop") -> list[StepResult]:
        environment = self._make()
        said = (responses,) if isinstance(responses, str) else responses
        results: list[StepResult] = []
        try:
            await environment.reset()
            while not (results and results[-1].done):
                assert len(results) < _MAX_TURNS, f"not done after {_MAX_TURNS} turns"
                response = said[min(len(results), len(said) - 1)]
                # One token per character: environments that read tokens see their number.
                action = Action(text=response, tokens=tuple(map(ord, response)), stop_reason=stop_reason)
                # A turn gives up its place, so that episodes side by side interleave.
                await asyncio.sleep(0)
                result = await environment.step(action)
                assert isinstance(result, StepResult), result
                results.append(result)
        finally:
            await environment.close()
        return results


def _require_prompt(prompt: Prompt) -> None:
    if isinstance(prompt, str):
        assert prompt, "the prompt is empty"
        return
    assert prompt, "the list of messages is empty"
    for message in prompt:
        assert set(message) >= {"role", "content"}, f"a message has a role and a content, got {message}"


def _run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, _WAIT_S))
