"""Where an environment's code runs: in a separate thread or process, or in the run's event loop; and what happens if an
environment hangs or raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import from_mapping, generator_spec
from rl_core.errors import ConfigError
from rl_core.interfaces import Action, GroupRequest, SamplingParams, StepResult
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout import environment_pool, environment_processes
from rl_rollout.chat import TokenCodec
from rl_rollout.environment_pool import HangingThreads
from rl_rollout.environment_threads import LeftThreads, ThreadedEnvironment
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer
from tests.passing_time import pass_time, until
from tests.rollout.odd_environments import (
    RAISED,
    Blocks,
    EndsItsLoop,
    HasASynchronousMethod,
    InItsOwnProcess,
    KnownOnlyHere,
    LeavesADaemon,
    Throws,
)

TOKENIZER = character_tokenizer()
TIMEOUT_S = 3600.0
"""A deadline that is reached only by `pass_time`."""


class AwaitsForever(Blocks):
    async def step(self, action: Any) -> StepResult:
        self._note("step", None)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self._note("cancelled", None)
            raise
        raise AssertionError


class BlocksUntilReleased(Blocks):
    """Blocks the thread in each step until the event `row["release"]` is set."""

    async def step(self, action: Any) -> StepResult:
        self._note("step", asyncio.get_running_loop())
        assert self._row["release"].wait(120.0)
        return StepResult(reward=0.25, done=True)


class InPlace(Blocks):
    placement = "in_process"


class Raises(Blocks):
    async def step(self, action: Any) -> StepResult:
        raise KeyError("no such answer")


class CannotBeMade(Blocks):
    def __init__(self, row: Any, options: Any) -> None:
        raise OSError("no such container")


class ReadsJson(Blocks):
    async def step(self, action: Any) -> StepResult:
        return json.loads("no JSON")


def generator_of(environment: Any, *, timeout_s: float = 300.0, placement: Any = None) -> EnvironmentGenerator:
    return EnvironmentGenerator(
        ScriptedClient(lambda request: [5, TOKENIZER.eos_token_id], end_tokens=[TOKENIZER.eos_token_id]),
        TokenCodec(TOKENIZER, chat_template_kwargs={}),
        Episodes(
            environment_of=lambda row: environment,
            limits=Limits(environment_timeout_s=timeout_s),
            environment_placement=placement,
        ),
    )


def request_of(*, num_samples: int = 1, **row: Any) -> GroupRequest:
    return GroupRequest(
        group_id=0,
        row={"prompt": "2+2=", "notes": [], **row},
        row_place="rows:1",
        num_samples=num_samples,
        params=SamplingParams(max_tokens=4),
        seed=0,
        start_version=0,
    )


async def play(
    environment: Any, *, num_samples: int = 1, timeout_s: float = 300.0, placement: Any = None, **row: Any
) -> tuple[Any, list[Any]]:
    generator, request = (
        generator_of(environment, timeout_s=timeout_s, placement=placement),
        request_of(num_samples=num_samples, **row),
    )
    try:
        return await generator.generate(request), request.row["notes"]
    finally:
        await generator.aclose()


def environment_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment"]


def until_threads_end() -> None:
    for thread in environment_threads():
        thread.join(timeout=60.0)
    assert not environment_threads()


def num_steps(notes: list[Any]) -> int:
    """The number of steps that environments have begun."""
    return sum(what == "step" for what, _, _ in notes)


async def longest_pause_during(awaitable: Any) -> float:
    """The longest time, in seconds, for which the event loop did not run while `awaitable` ran."""
    longest, last, task = 0.0, time.monotonic(), asyncio.ensure_future(awaitable)
    while not task.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await task
    return longest


async def test_a_threaded_episode_keeps_one_thread_and_one_loop():
    (trajectory,), notes = await play(Blocks)
    assert trajectory.failure is None
    assert trajectory.reward == 0.25
    assert [what for what, _, _ in notes] == ["made", "reset", "tools", "step", "close"]
    assert len({thread for _, thread, _ in notes}) == 1
    assert notes[0][1] != threading.get_ident()
    assert len({loop for _, _, loop in notes[1:]}) == 1
    until_threads_end()


@pytest.mark.parametrize(("environment", "placement"), [(InPlace, None), (Blocks, "in_process")])
async def test_environments_run_in_the_loop_if_they_or_the_configuration_say_so(environment: Any, placement: Any):
    _, notes = await play(environment, placement=placement)
    assert {thread for _, thread, _ in notes} == {threading.get_ident()}
    assert {loop for _, _, loop in notes[1:]} == {asyncio.get_running_loop()}


async def test_episodes_that_block_in_threads_block_neither_the_loop_nor_each_other():
    """The event loop ends the steps only when all eight block at the same time."""
    notes: list[Any] = []
    release = threading.Event()
    playing = asyncio.ensure_future(play(BlocksUntilReleased, num_samples=8, notes=notes, release=release))
    try:
        await until(lambda: num_steps(notes) == 8)
    finally:
        release.set()
    trajectories, _ = await playing
    assert [trajectory.reward for trajectory in trajectories] == [0.25] * 8
    # Negative control: a step in the event loop blocks it.
    assert await longest_pause_during(play(InPlace, blocks_s=0.2)) >= 0.2


async def test_a_threaded_call_that_awaits_is_cancelled_in_its_thread_at_its_deadline(monkeypatch: pytest.MonkeyPatch):
    notes: list[Any] = []
    playing = asyncio.ensure_future(play(AwaitsForever, timeout_s=TIMEOUT_S, notes=notes))
    await until(lambda: num_steps(notes) == 1)
    pass_time(monkeypatch, TIMEOUT_S)
    (trajectory,), _ = await playing
    assert trajectory.failure == (
        "rows:1: DeadlineError: waited 3600 s (environment.timeout_s) for the environment's `step`"
    )
    until_threads_end()
    assert [what for what, _, _ in notes][-2:] == ["cancelled", "close"]
    assert len({thread for _, thread, _ in notes}) == 1


async def test_a_thread_blocked_past_its_deadline_closes_its_environment_later(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
):
    notes: list[Any] = []
    release = threading.Event()
    playing = asyncio.ensure_future(play(BlocksUntilReleased, timeout_s=TIMEOUT_S, notes=notes, release=release))
    try:
        await until(lambda: num_steps(notes) == 1)
        pass_time(monkeypatch, TIMEOUT_S)
        await until(playing.done)  # although the thread still blocks
        (trajectory,), _ = playing.result()
        assert "DeadlineError: waited 3600 s (environment.timeout_s) for the environment's `step`" in trajectory.failure
        assert "still busy with a call that timed out or was cancelled" in caplog.text
        assert [what for what, _, _ in notes][-1] == "step"
    finally:
        release.set()
    until_threads_end()
    assert [what for what, _, _ in notes][-1] == "close"


@pytest.mark.parametrize(
    ("environment", "failure"),
    [
        (Raises, "rows:1: KeyError: 'no such answer' (test_environment_calls.py:{})"),
        (CannotBeMade, "rows:1: OSError: no such container (test_environment_calls.py:{})"),
    ],
)
async def test_an_error_in_a_thread_becomes_the_samples_failure_with_its_line(environment: Any, failure: str):
    (trajectory,), _ = await play(environment)
    raising = environment.step if environment is Raises else environment.__init__
    assert trajectory.failure == failure.format(raising.__code__.co_firstlineno + 1)
    until_threads_end()


async def test_a_failure_in_a_library_names_the_environments_line():
    (trajectory,), _ = await play(ReadsJson)
    line = ReadsJson.step.__code__.co_firstlineno + 1
    assert trajectory.failure is not None
    assert trajectory.failure.startswith("rows:1: JSONDecodeError: Expecting value")
    assert trajectory.failure.endswith(f"(test_environment_calls.py:{line})")
    until_threads_end()


async def test_a_cancelled_group_closes_its_threaded_environments():
    notes: list[Any] = []
    task = asyncio.ensure_future(play(AwaitsForever, num_samples=3, notes=notes))
    await until(lambda: num_steps(notes) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The group waits only 1 s for a thread to begin closing its environment.
    await until(lambda: sum(what == "close" for what, _, _ in notes) == 3)
    until_threads_end()


# --- deadlines --------------------------------------------------------------------------------------------------------


class Waits(InPlace):
    """Its step awaits in several ways before it answers."""

    async def step(self, action: Any) -> StepResult:
        await asyncio.sleep(0)
        assert await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2)) == [1, 2]
        try:
            async with asyncio.timeout(0.001):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            return await super().step(action)
        raise AssertionError


class BlocksAndHangs(InPlace):
    """Its step blocks, then awaits something that never happens. It records the loop's time at its beginning."""

    async def step(self, action: Any) -> StepResult:
        began = asyncio.get_running_loop().time()
        await super().step(action)
        self._note(began, None)
        await asyncio.get_running_loop().create_future()
        raise AssertionError


@contextlib.contextmanager
def recorded_timers() -> Iterator[list[float]]:
    """Yields a list of times on the loop's clock: one for each timer that is set on the event loop in the context."""
    loop = asyncio.get_running_loop()
    set_timer, timers = loop.call_at, []

    def recorded(when: float, *args: Any, **kwargs: Any) -> Any:
        timers.append(when)
        return set_timer(when, *args, **kwargs)

    loop.call_at = recorded
    yield timers
    del loop.call_at


async def timers_of(environment: Any) -> tuple[Any, int]:
    """Plays an episode; returns its trajectory and the number of timers that it set on the event loop."""
    with recorded_timers() as timers:
        (trajectory,), _ = await play(environment)
    return trajectory, len(timers)


async def test_only_calls_that_wait_have_a_deadline():
    trajectory, num_timers = await timers_of(InPlace)
    assert (trajectory.failure, trajectory.reward, num_timers) == (None, 0.25, 0)
    trajectory, num_timers = await timers_of(Waits)
    assert (trajectory.failure, trajectory.reward, num_timers) == (None, 0.25, 2), (
        "the only timers must be the step's own and the call's deadline"
    )


async def test_a_deadline_counts_from_the_beginning_of_the_call(monkeypatch: pytest.MonkeyPatch):
    notes: list[Any] = []
    with recorded_timers() as timers:
        playing = asyncio.ensure_future(play(BlocksAndHangs, timeout_s=TIMEOUT_S, blocks_s=0.2, notes=notes))
        await until(lambda: isinstance(notes[-1][0], float) if notes else False)
    began = notes[-1][0]
    (deadline,) = [when for when in timers if when > began + TIMEOUT_S / 2]
    assert deadline <= began + TIMEOUT_S, "the 0.2 s in which the step blocked must count"
    pass_time(monkeypatch, TIMEOUT_S)
    (trajectory,), _ = await playing
    assert trajectory.failure_kind == "DeadlineError"


# --- whatever an environment raises ---------------------------------------------------------------------------------


PLACES = ("thread", "process", "in_process")


@pytest.mark.parametrize("placement", PLACES)
async def test_a_synchronous_method_is_an_error(placement: str):
    generator = generator_of(HasASynchronousMethod, placement=placement)
    for method in ("reset", "step"):
        (trajectory,) = await generator.generate(request_of(synchronous=method))
        assert trajectory.failure is not None
        assert f"DataError: the environment's `{method}` returned " in trajectory.failure
        assert trajectory.failure.endswith(f"expected an awaitable; define it with `async def {method}`")
    await generator.aclose()
    until_threads_end()


@pytest.mark.parametrize("placement", PLACES)
async def test_any_exception_except_keyboard_interrupt_in_an_environment_fails_its_sample(placement: str):
    generator = generator_of(Throws, placement=placement)
    for kind, error in RAISED.items():
        for where in ("made", "reset", "tools", "step", "close"):
            if kind == "KeyboardInterrupt":
                continue
            for waits in (False, True) if where != "made" else (False,):
                (trajectory,) = await generator.generate(request_of(where=where, raises=kind, waits=waits))
                assert trajectory.failure_kind == kind
                assert trajectory.failure is not None
                place = "" if kind == "ConfigError" else r" \(odd_environments\.py:\d+\)"
                assert re.fullmatch(re.escape(f"rows:1: {kind}: {error}") + place, trajectory.failure)
    await generator.aclose()
    until_threads_end()


@pytest.mark.parametrize("placement", PLACES)
def test_a_keyboard_interrupt_out_of_an_environment_ends_the_run(placement: str):
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(play(Throws, placement=placement, where="step", raises="KeyboardInterrupt"))
    until_threads_end()


@pytest.mark.parametrize(("placement", "kind"), [("thread", "CancelledError"), ("process", "EnvironmentEnded")])
async def test_a_task_of_an_environment_that_exits_fails_only_its_episode(placement: str, kind: str):
    generator = generator_of(EndsItsLoop, placement=placement, timeout_s=100.0)
    healthy = asyncio.create_task(generator.generate(request_of(exits=False, blocks_s=1.0)))
    exiting = await generator.generate(request_of(num_samples=2))
    assert [trajectory.failure_kind for trajectory in exiting] == [kind] * 2
    (trajectory,) = await healthy
    assert (trajectory.failure, trajectory.reward) == (None, 0.25)
    await generator.aclose()
    until_threads_end()


async def test_an_environment_whose_loop_has_ended_counts_as_closed(
    monkeypatch: pytest.MonkeyPatch,
):
    environment = ThreadedEnvironment(lambda: EndsItsLoop({"prompt": "1+1=", "notes": []}, {}), LeftThreads())
    await environment.reset()
    with pytest.raises(asyncio.CancelledError):
        await environment.step(Action(text="", tokens=(), stop_reason="stop"))
    environment._thread.join(60)
    with monkeypatch.context() as context:
        context.setattr(environment._loop, "is_closed", lambda: False)  # as if the loop ended right after this check
        await environment.close()


# --- processes --------------------------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_environment_processes_are_reused_and_end_with_the_generator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    trajectories, _ = await play(InItsOwnProcess, num_samples=40, does="nothing")
    assert [trajectory.failure for trajectory in trajectories] == [None] * 40
    pids = {int(trajectory.reward) for trajectory in trajectories}
    assert os.getpid() not in pids
    assert len(pids) <= 4, "four processes per core must play all episodes"
    assert {trajectory.metrics["turns"] for trajectory in trajectories} == {1.0}, "each episode needs a new environment"
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("does", "kind", "failure"),
    [
        ("blocks", "DeadlineError", "waited 3600 s (environment.timeout_s) for the environment's `step`"),
        ("dies", "EnvironmentEnded", "the environment's process ended with code 7"),
    ],
)
async def test_a_process_that_hangs_or_dies_fails_its_sample_and_is_ended(
    does: str, kind: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = processes()
    playing = asyncio.ensure_future(play(InItsOwnProcess, timeout_s=TIMEOUT_S, does=does, blocks=str(tmp_path)))
    if does == "blocks":
        await until_blocked(tmp_path, 1)
        pass_time(monkeypatch, TIMEOUT_S)
    (trajectory,), _ = await playing
    assert trajectory.failure_kind == kind
    assert trajectory.failure.startswith(f"rows:1: {kind}: {failure}")
    await until(lambda: processes() == before)


async def test_the_error_of_a_process_that_starts_too_slowly_names_its_own_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_pool, "_START_S", 0.001)
    (trajectory,), _ = await play(InItsOwnProcess, does="nothing")
    assert "waited 0.001 s for a process to start and import the environment; lower environment." in trajectory.failure
    assert "environment.timeout_s" not in trajectory.failure


async def test_a_daemon_that_an_environment_leaves_behind_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_processes, "_END_S", 0.2)
    async with asyncio.timeout(120.0):  # the daemon runs for much longer
        (trajectory,), _ = await play(LeavesADaemon, does="nothing")
    os.kill(int(trajectory.metrics["daemon"]), signal.SIGKILL)


async def test_a_row_that_cannot_be_unpickled_or_an_answer_that_cannot_be_pickled_fails_its_sample():
    generator = generator_of(InItsOwnProcess)
    (trajectory,) = await generator.generate(request_of(does="nothing", value=KnownOnlyHere()))
    assert trajectory.failure_kind == "ModuleNotFoundError"
    assert "No module named 'of_the_recipe'" in (trajectory.failure or "")
    (trajectory,) = await generator.generate(request_of(does="does not pickle"))
    assert trajectory.failure_kind == "AttributeError"
    assert (trajectory.failure or "").startswith("rows:1: AttributeError: its answer cannot be pickled: ")
    await generator.aclose()


def processes() -> set[str]:
    """The ids of this process's children."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    found: set[str] = set()
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            found.update((task / "children").read_text().split())
    return found


async def until_blocked(directory: Path, num_processes: int) -> None:
    """Waits until this many processes block in a step. Each is a new interpreter."""
    await until(lambda: len(list(directory.iterdir())) == num_processes, limit_s=240.0)


async def test_a_group_that_is_cancelled_ends_its_processes(tmp_path: Path):
    before = processes()
    task = asyncio.ensure_future(play(InItsOwnProcess, num_samples=2, does="blocks", blocks=str(tmp_path)))
    await until_blocked(tmp_path, 2)
    assert len(processes() - before) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: processes() == before)


# --- threads that hang ------------------------------------------------------------------------------------------------


async def test_threads_that_hang_are_counted_and_too_many_of_them_end_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_pool, "MOST_LEFT_THREADS", 2)
    generator = generator_of(BlocksUntilReleased, timeout_s=TIMEOUT_S)
    row: dict[str, Any] = {"notes": [], "release": threading.Event()}
    hanging = asyncio.ensure_future(generator.generate(request_of(num_samples=2, **row)))
    message = r"rows:1: 2 threads of environments hang.*environment\.placement=process"
    try:
        await until(lambda: num_steps(row["notes"]) == 2)
        pass_time(monkeypatch, TIMEOUT_S)
        assert [trajectory.failure_kind for trajectory in await hanging] == ["DeadlineError"] * 2
        with pytest.raises(HangingThreads, match=message):
            await generator.generate(request_of(num_samples=2, **row))
    finally:
        row["release"].set()
    until_threads_end()
    again = await generator.generate(request_of(num_samples=2, **row))
    assert [trajectory.failure for trajectory in again] == [None, None], "threads that returned must no longer count"
    until_threads_end()


# --- what is refused ------------------------------------------------------------------------------------------------


class OnlyHere(Blocks):
    """A class that cannot be pickled for another process."""

    placement = "process"


OnlyHere.__qualname__ = "nowhere.OnlyHere"  # as if made inside a function


class Elsewhere(Blocks):
    placement = "elsewhere"


class PlacementIsAProperty(Blocks):
    @property
    def placement(self) -> str:
        return "thread"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            OnlyHere,
            r"OnlyHere has placement 'process', but cannot be pickled for another process: .*nowhere.OnlyHere",
        ),
        (Elsewhere, r"Elsewhere\.placement is 'elsewhere'; expected one of in_process, thread, process"),
        (
            PlacementIsAProperty,
            r"PlacementIsAProperty\.placement is <property object.*it is read before an episode starts",
        ),
    ],
)
async def test_an_impossible_placement_is_refused_before_anything_starts(environment: Any, message: str):
    from rl_rollout.generator_plugin import environment as plugin

    name = f"{__name__}:{environment.__name__}"
    _, spec = generator_spec(from_mapping({"environment.env_class": name, "trainer.policy.model.path": "model"}))
    with pytest.raises(ConfigError, match=rf"environment\.env_class: {message}"):
        plugin.validate(spec)
    # If only a row names the environment, the placement is checked when the row is played, and the error ends the run.
    with pytest.raises(ConfigError, match=f"rows:1: {message}"):
        await play(environment)
