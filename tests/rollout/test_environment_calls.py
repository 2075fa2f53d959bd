"""Where an environment's code runs: beside the other episodes, or in a thread of the episode's own."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from rl_core.config import from_mapping, generator_spec
from rl_core.errors import ConfigError
from rl_core.interfaces import GroupRequest, SamplingParams, StepResult
from rl_core.testing.models import character_tokenizer
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.environment_calls import placement_of
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes

TOKENIZER = character_tokenizer()


class Blocks:
    """Needs `row["blocks_s"]` for a step without awaiting anything. Notes thread and loop of everything it does."""

    placement = "thread"

    def __init__(self, row: Any, options: Any) -> None:
        self._row = row
        self._note("made", None)

    async def reset(self) -> Any:
        self._note("reset", asyncio.get_running_loop())
        return self._row["prompt"]

    async def tools(self) -> list[Any]:
        self._note("tools", asyncio.get_running_loop())
        return []

    async def step(self, action: Any) -> StepResult:
        self._note("step", asyncio.get_running_loop())
        time.sleep(self._row.get("blocks_s", 0.0))
        return StepResult(reward=0.25, done=True)

    async def close(self) -> None:
        self._note("close", asyncio.get_running_loop())

    def _note(self, what: str, loop: Any) -> None:
        self._row["notes"].append((what, threading.get_ident(), loop))


class AwaitsForever(Blocks):
    async def step(self, action: Any) -> StepResult:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self._note("cancelled", None)
            raise
        raise AssertionError


class InPlace(Blocks):
    placement = "in_process"


class Raises(Blocks):
    async def step(self, action: Any) -> StepResult:
        raise KeyError("no such answer")


class CannotBeMade(Blocks):
    def __init__(self, row: Any, options: Any) -> None:
        raise OSError("no such container")


async def play(
    environment: Any, *, num_samples: int = 1, timeout_s: float = 300.0, **row: Any
) -> tuple[Any, list[Any]]:
    row = {"prompt": "2+2=", "notes": [], **row}
    generator = EnvironmentGenerator(
        ScriptedClient(lambda request: [5, TOKENIZER.eos_token_id], end_tokens=[TOKENIZER.eos_token_id]),
        TokenCodec(TOKENIZER, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment, limits=Limits(environment_timeout_s=timeout_s)),
    )
    request = GroupRequest(
        group_id=0,
        row=row,
        row_place="rows:1",
        num_samples=num_samples,
        params=SamplingParams(max_tokens=4),
        seed=0,
        start_version=0,
    )
    return await generator.generate(request), row["notes"]


def environment_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment"]


def until_threads_end() -> None:
    for thread in environment_threads():
        thread.join(timeout=30.0)
    assert not environment_threads()


async def longest_pause_during(awaitable: Any) -> float:
    """How long the event loop stood still at the most."""
    longest, last, task = 0.0, time.monotonic(), asyncio.ensure_future(awaitable)
    while not task.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await task
    return longest


async def test_a_threaded_episode_has_one_thread_and_one_loop_of_its_own_from_making_to_close():
    (trajectory,), notes = await play(Blocks)
    assert trajectory.failure is None
    assert trajectory.reward == 0.25
    assert [what for what, _, _ in notes] == ["made", "reset", "tools", "step", "close"]
    assert len({thread for _, thread, _ in notes}) == 1
    assert notes[0][1] != threading.get_ident()
    assert len({loop for _, _, loop in notes[1:]}) == 1
    until_threads_end()


async def test_environments_run_beside_the_loop_unless_they_say_otherwise():
    _, notes = await play(InPlace)
    assert {thread for _, thread, _ in notes} == {threading.get_ident()}
    assert {loop for _, _, loop in notes[1:]} == {asyncio.get_running_loop()}


async def test_episodes_that_block_in_threads_block_neither_the_loop_nor_each_other():
    start = time.monotonic()
    longest = await longest_pause_during(play(Blocks, num_samples=8, blocks_s=1.0))
    # One after the other they take 8 s.
    assert time.monotonic() - start < 4.0
    assert longest < 0.8
    assert await longest_pause_during(play(InPlace, blocks_s=1.0)) >= 1.0


async def test_a_threaded_call_that_awaits_is_cancelled_in_its_thread_at_its_deadline():
    (trajectory,), notes = await play(AwaitsForever, timeout_s=0.2)
    assert trajectory.failure == (
        "rows:1: DeadlineError: waited 0.2 s (environment.timeout_s) for the environment's `step`"
    )
    assert [what for what, _, _ in notes][-2:] == ["cancelled", "close"]
    until_threads_end()


async def test_a_thread_that_blocks_past_its_deadline_is_left_alone_and_closes_later(caplog: Any):
    start = time.monotonic()
    (trajectory,), notes = await play(Blocks, timeout_s=1.5, blocks_s=6.0)
    assert "DeadlineError: waited 1.5 s (environment.timeout_s) for the environment's `step`" in trajectory.failure
    assert time.monotonic() - start < 5.0
    assert "still busy with a call that was given up" in caplog.text
    assert [what for what, _, _ in notes][-1] == "step"
    until_threads_end()
    assert [what for what, _, _ in notes][-1] == "close"


@pytest.mark.parametrize(
    ("environment", "failure"),
    [(Raises, "rows:1: KeyError: 'no such answer'"), (CannotBeMade, "rows:1: OSError: no such container")],
)
async def test_what_goes_wrong_in_a_thread_is_the_samples_failure(environment: Any, failure: str):
    (trajectory,), _ = await play(environment)
    assert trajectory.failure == failure
    until_threads_end()


async def test_a_cancelled_group_closes_its_threaded_environments():
    notes: list[Any] = []
    task = asyncio.ensure_future(play(AwaitsForever, num_samples=3, notes=notes))
    while sum(what == "step" or what == "tools" for what, _, _ in notes) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The group's end does not wait for all of its samples.
    async with asyncio.timeout(30.0):
        while sum(what == "close" for what, _, _ in notes) < 3:
            await asyncio.sleep(0.01)
    until_threads_end()


# --- what is refused ------------------------------------------------------------------------------------------------


class InItsOwnProcess(Blocks):
    placement = "process"


class Elsewhere(Blocks):
    placement = "elsewhere"


class SaysItTooLate(Blocks):
    @property
    def placement(self) -> str:
        return "thread"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            InItsOwnProcess,
            r"InItsOwnProcess\.placement is 'process', and the generator `environment` starts no",
        ),
        (Elsewhere, r"Elsewhere\.placement is 'elsewhere'; expected one of in_process, thread, process"),
        (SaysItTooLate, r"SaysItTooLate\.placement is <property object.*it is read before an episode starts"),
    ],
)
async def test_a_placement_that_cannot_be_done_is_refused_before_anything_starts(environment: Any, message: str):
    from rl_rollout.generator_plugin import environment as plugin

    name = f"{__name__}:{environment.__name__}"
    _, spec = generator_spec(from_mapping({"environment.env_class": name, "trainer.policy.model.path": "model"}))
    with pytest.raises(ConfigError, match=rf"environment\.env_class: {message}"):
        plugin.validate(spec)
    # Rows' own environments are met later, and end the run.
    with pytest.raises(ConfigError, match=f"rows:1: {message}"):
        await play(environment)


def test_a_functions_placement_is_its_attribute():
    def factory(row: Any, options: Any) -> Any:
        return Blocks(row, options)

    assert placement_of(factory) == "in_process"
    factory.placement = "thread"  # pyright: ignore[reportFunctionMemberAccess]
    assert placement_of(factory) == "thread"
