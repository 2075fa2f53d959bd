"""Conformance suite of environments.

A plug-in's author writes

    class TestMyEnvironment(EnvironmentConformance):
        factory = MyEnvironment
        row = {"prompt": "2+2=", "answer": "4"}
        rewards = {"4": 1.0, "5": 0.0}

and runs pytest. `rewards` maps a response, which is repeated in every turn, to the total reward of the episode. A tuple
contains one response per turn, and its last response is repeated.

Checks of tools are skipped unless the environment's `offers_tools` is true.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args

import pytest

from rl_core import plugins
from rl_core.errors import DataError
from rl_core.interfaces import (
    Action,
    Environment,
    PlacementKind,
    Prompt,
    StepResult,
    StopReason,
    ToolSchema,
    as_environment,
    require_awaitable,
    require_messages,
    require_tools,
)

T = TypeVar("T")
Responses = str | tuple[str, ...]
_MAX_TURNS = 100
_WAIT_S = 240.0
_LONGEST_PAUSE_S = 2.0
"""Longest allowed pause of the event loop: much longer than fast scoring takes, and longer than most stalls of a busy
machine."""


class EnvironmentConformance:
    """Base class of the suite. A subclass sets `factory`, `row` and `rewards` (and `options` if needed); pytest then
    runs the tests on it."""

    factory: ClassVar[type]
    """The environment's class."""
    row: ClassVar[Mapping[str, Any]]
    """The data row of all episodes."""
    rewards: ClassVar[Mapping[Responses, float]]
    """A response that is repeated in every turn, or a tuple of one response per turn → total reward of the episode."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the environment, as in the configuration key `environment.options`."""

    def test_it_follows_the_contract(self) -> None:
        plugins.require_plugin("rl_core.environments", type(self).factory, "factory")

    def test_the_first_observation_is_a_prompt(self) -> None:
        async def reset() -> Prompt:
            environment = self._make()
            try:
                return await environment.reset()
            finally:
                await environment.close()

        _require_prompt(_run(reset()))

    def test_responses_get_the_rewards_they_deserve(self) -> None:
        assert len(set(self.rewards.values())) > 1, "`rewards` must contain responses with different rewards"
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
                    assert result.observation is None, "the last result of an episode must have no observation"
                else:
                    assert result.observation is not None, "a result before the last must have an observation"
                    _require_prompt(result.observation)
            names.add(frozenset(results[-1].metrics))
        assert len(names) == 1, f"all episodes must report the same metrics, so that their means are right: {names}"

    def test_observations_go_on_as_the_episode_began(self) -> None:
        is_text = isinstance(_run(self._opened(lambda environment, prompt: _value(prompt))), str)
        for response in self.rewards:
            shown = [result.observation for result in _run(self._play(response)) if result.observation is not None]
            for observation in shown:
                if not isinstance(observation, str):
                    assert not is_text, "an episode that begins with text must continue with text"
                    roles = [message["role"] for message in observation]
                    assert "assistant" not in roles, "an observation must not contain messages of the assistant"

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

    # --- what an environment may add ----------------------------------------------------------------------------------

    def test_its_tools_are_functions_that_a_template_can_show(self) -> None:
        offered = [self._offered_tools() for _ in range(2)]
        assert offered[0] == offered[1], "two episodes of one row offer different tools"
        try:
            require_tools(offered[0])
        except DataError as error:
            raise AssertionError(str(error)) from error
        for tool in offered[0]:
            parameters = tool["function"].get("parameters", {"type": "object"})
            assert parameters.get("type") == "object", (
                f"a function's parameters must be the JSON schema of an object: {tool}"
            )
            unknown = set(parameters.get("required", ())) - set(parameters.get("properties", ()))
            assert not unknown, f"required parameters that are not among the properties: {unknown}"

    def test_an_episode_with_tools_begins_with_messages(self) -> None:
        if self._offered_tools():
            assert not isinstance(_run(self._opened(lambda environment, prompt: _value(prompt))), str), (
                "an environment with tools must begin with messages, because only the chat template shows tools"
            )

    def test_it_runs_where_its_placement_says(self) -> None:
        factory = type(self).factory
        placement = as_environment(factory).placement
        assert placement in get_args(PlacementKind), (
            f"got placement {placement!r}; expected one of {get_args(PlacementKind)}"
        )
        if placement == "process":
            _require_pickles({"factory": factory, "row": dict(self.row), "options": dict(self.options)})
        if placement != "in_process":
            for response in self.rewards:
                assert _in_thread(lambda response=response: self._play(response)) == _run(self._play(response)), (
                    response
                )

    def test_it_does_not_hold_up_other_episodes(self) -> None:
        if as_environment(type(self).factory).placement != "in_process":
            pytest.skip("the environment runs in a separate thread or process")
        for response in self.rewards:
            # The first run is not measured, because it may import modules. A busy machine is unlikely to stall all
            # three measured runs.
            _run(self._play(response))
            pause_s = min(_run(_longest_pause(self._play(response))) for _ in range(3))
            assert pause_s < _LONGEST_PAUSE_S, (
                f"the environment blocked all episodes for {pause_s:.1f} s: await slow operations, or remove "
                "placement = 'in_process'"
            )

    def _offered_tools(self) -> Sequence[ToolSchema]:
        async def tools(environment: Environment, _: Prompt) -> Sequence[ToolSchema]:
            offered = environment.tools()
            assert isinstance(offered, Awaitable), "`tools` must be an async method"
            return json.loads(json.dumps(await offered, default=repr))

        if not as_environment(type(self).factory).offers_tools:
            pytest.skip("the environment offers no tools")
        return _run(self._opened(tools))

    # --- what the tests share -----------------------------------------------------------------------------------------

    async def _opened(self, ask: Callable[[Environment, Prompt], Awaitable[T]]) -> T:
        """Returns the result of `ask` for an environment after `reset`."""
        environment = self._make()
        try:
            return await ask(environment, await environment.reset())
        finally:
            await environment.close()

    def _make(self) -> Environment:
        return as_environment(type(self).factory)(self.row, self.options)

    async def _play(
        self,
        responses: Responses,
        *,
        stop_reason: StopReason = "stop",
    ) -> list[StepResult]:
        """Plays an episode and returns the results of its steps."""
        environment = self._make()
        said = (responses,) if isinstance(responses, str) else responses
        results: list[StepResult] = []
        try:
            await environment.reset()
            while not (results and results[-1].done):
                assert len(results) < _MAX_TURNS, f"not done after {_MAX_TURNS} turns"
                response = said[min(len(results), len(said) - 1)]
                # One token per character, because environments may read the number of tokens.
                action = Action(text=response, tokens=tuple(map(ord, response)), stop_reason=stop_reason)
                # Yields to the event loop in each turn, so that concurrent episodes interleave.
                await asyncio.sleep(0)
                result = await require_awaitable(environment.step(action), "step")
                assert isinstance(result, StepResult), result
                results.append(result)
        finally:
            await environment.close()
        return results


def _require_prompt(prompt: Prompt) -> None:
    if isinstance(prompt, str):
        assert prompt, "the prompt is empty"
        return
    try:
        require_messages(prompt, "a prompt")
    except DataError as error:
        raise AssertionError(str(error)) from error


def _require_pickles(parts: Mapping[str, object]) -> None:
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            # An object's own pickling code may raise anything.
            raise AssertionError(
                f"the {name} cannot be sent to another process: {type(error).__name__}: {error}"
            ) from error


async def _value(value: T) -> T:
    return value


async def _longest_pause(call: Awaitable[object]) -> float:
    """Awaits `call`. Returns the longest pause of the event loop during the call, in seconds."""
    task = asyncio.ensure_future(call)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    await task
    return longest


def _in_thread(make: Callable[[], Awaitable[T]]) -> T:
    """Creates and runs a coroutine in a new thread; returns its result."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(_run(make()))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, _WAIT_S))
