"""SystemExit, CancelledError or GeneratorExit from code that the run calls becomes an error that names its source."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from rl_core.errors import ForeignCodeError
from rl_core.tasks import OwnThread, code_of
from rl_core.trainer.loop.concurrency import unless_set
from rl_core.trainer.loop.interrupts import Interrupts
from tests.core.scripted_run import Play, Script, ScriptedRun
from tests.core.virtual_time import run_virtually

ENDS = [SystemExit(0), asyncio.CancelledError(), GeneratorExit()]
NAMES = [type(error).__name__ for error in ENDS]
STALENESS = pytest.mark.parametrize("max_staleness", [0, 2])


@pytest.mark.parametrize("error", ENDS, ids=NAMES)
@STALENESS
def test_an_exit_or_cancellation_in_the_generator_is_an_error_with_a_checkpoint(
    tmp_path: Path, max_staleness: int, error: BaseException
):
    def play(group: int) -> Play:
        return Play(error=error if group == 3 else None)

    run = ScriptedRun(tmp_path, Script(max_staleness=max_staleness, play=play))
    message = rf"train:1: the generator ScriptedGenerator raised {type(error).__name__}\(.*\(scripted_run\.py:\d+\)"
    with pytest.raises(ForeignCodeError, match=message):
        run.go()
    assert run.events[-1] == f"checkpoint {run.loop.steps_done}"
    assert run.loop.steps_done > 0
    assert run.ended_at is not None
    assert run.ended_at < 100.0, "the run must not wait for the group until generation_timeout_s"
    resumed = run.resumed(play=lambda group: Play()).go()
    assert [*run.trained, *resumed.trained] == [1, 2, 3]


@pytest.mark.parametrize("error", ENDS, ids=NAMES)
def test_exits_and_cancellations_within_an_evaluation_are_errors_and_not_stops(tmp_path: Path, error: BaseException):
    script = Script(eval_rows=1, eval_play=Play(error=error), settings={"eval_before_train": True})
    with pytest.raises(ForeignCodeError, match="held_out:0: the generator ScriptedGenerator raised"):
        ScriptedRun(tmp_path, script).go()


@pytest.mark.parametrize(
    ("event", "whose", "saved"),
    [
        ("row 2", "code that the run calls", 2),
        ("checkpoint 2", "on_checkpoint of the callback RecordedReports", 2),
        ("train 2", "code that the run calls", 1),
        ("serve 2", "the engine client ScriptedEngine", 2),
        ("end 3", "on_run_end of the callback RecordedReports", 3),
    ],
)
@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()], ids=NAMES[:2])
def test_an_exit_or_cancellation_in_foreign_code_is_an_error_with_a_checkpoint(
    tmp_path: Path, event: str, whose: str, saved: int, error: BaseException
):
    run = ScriptedRun(tmp_path, Script(errors={event: error}, settings={"ckpt_interval": 1}))
    with pytest.raises(ForeignCodeError, match=f"{whose} raised {type(error).__name__}"):
        run.go()
    assert run.events_of("checkpoint")[-1] == f"checkpoint {saved}"


def raises(error: BaseException) -> Callable[[], None]:
    def code() -> None:
        raise error

    return code


def test_exceptions_keyboard_interrupts_and_a_tasks_own_cancellation_are_not_converted():
    """Negative control."""
    for error in (ValueError("wrong"), StopIteration(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, code_of("somebody's code"):
            raises(error)()
        assert caught.value is error

    async def cancelled() -> None:
        with code_of("somebody's code"):
            asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
            await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        run_virtually(cancelled())


def test_closing_an_unfinished_coroutine_raises_no_error():
    @attrs.frozen
    class Waits:
        def __await__(self):
            yield

    async def work() -> None:
        with code_of("somebody's code"):
            await Waits()

    coroutine = work()
    coroutine.send(None)
    coroutine.close()


async def test_the_result_of_unless_set_is_none_only_after_the_event():
    async def gives_up() -> int:
        raise asyncio.CancelledError

    async def waits() -> int:
        await asyncio.sleep(60)
        return 1

    stop = asyncio.Event()
    with pytest.raises(ForeignCodeError, match=r"gives_up: code that it calls raised CancelledError"):
        await unless_set(stop, gives_up())
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert await unless_set(stop, waits()) is None


def test_exits_and_cancellations_outside_the_training_loop_are_errors_too():
    async def leaves() -> None:
        sys.exit(0)

    async def gives_up() -> None:
        raise asyncio.CancelledError

    for work in (leaves, gives_up):
        with pytest.raises(ForeignCodeError, match="code that the run calls raised"):
            Interrupts().run(work)


def test_an_exit_in_a_separate_task_reaches_only_the_task_that_awaits_it():
    """asyncio would let the SystemExit leave the event loop and end everything in it."""

    async def leaves() -> None:
        await asyncio.sleep(0.01)
        sys.exit(0)

    async def works() -> str:
        await asyncio.sleep(0.05)
        return "done"

    async def work() -> str:
        other, leaving = asyncio.create_task(works()), asyncio.create_task(leaves())
        with pytest.raises(ForeignCodeError, match=r"a plug-in raised SystemExit"), code_of("a plug-in"):
            await leaving
        return await other

    assert Interrupts().run(work) == "done"


def test_code_that_exits_is_named_even_if_a_tracker_wraps_sys_exit(monkeypatch: pytest.MonkeyPatch):
    leave = sys.exit

    class Hooks:
        def exit(self, code: int) -> None:
            leave(code)

    monkeypatch.setattr(sys, "exit", Hooks().exit)

    def plug_in() -> None:
        sys.exit(0)

    line = plug_in.__code__.co_firstlineno + 1
    message = rf"raised SystemExit\(0\) \(test_foreign_errors\.py:{line}\)"
    with pytest.raises(ForeignCodeError, match=message), code_of("a plug-in"):
        plug_in()


async def test_a_late_error_of_an_abandoned_thread_is_not_logged(caplog: pytest.LogCaptureFixture):
    may_fail = threading.Event()

    def fails() -> None:
        may_fail.wait(60)
        raise ValueError("late")

    thread = OwnThread(fails)
    with pytest.raises(TimeoutError):
        await thread.within(0.01)
    asyncio.get_running_loop().call_later(0.01, may_fail.set)
    with pytest.raises(ValueError, match="late"):
        await thread.within(60)
    del thread  # when a future is deleted, asyncio logs its error if nobody has retrieved it
    gc.collect()
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert not [error for error in errors if str(error) == "late"]
