"""Failures that end a run, and those that do not: errors of the run's parts, lost engines, full disks, deadlines."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_core.batch import Batch
from rl_core.errors import DeadlineError, DiskFullError, GenerationError, WeightSyncError, WorkerError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.trainer.state.checkpoint import list_checkpoints
from tests.core.loop_checks import STALENESS, require_nothing_is_lost
from tests.core.scripted_run import Play, RestartedEngine, Script, ScriptedEngine, ScriptedRun, SleepingEngine


@STALENESS
def test_an_error_of_the_generator_is_raised_after_the_step_under_way_is_saved(tmp_path: Path, max_staleness: int):
    """At staleness 0 the step waits for the failing group; otherwise the error comes during another step, which
    finishes."""
    boom = OSError("the environment is gone")
    script = Script(
        max_staleness=max_staleness, play=lambda group: Play(seconds=13.0, error=boom) if group == 3 else Play()
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(OSError, match="the environment is gone"):
        run.go()
    assert run.events_of("row", "save", "fail") == (
        ["row 1", "fail OSError", "save 1"] if max_staleness == 0 else ["fail OSError", "row 1", "save 1"]
    )
    assert not any(event.startswith("finish") for event in run.events[run.events.index("fail OSError") :])
    require_nothing_is_lost(run, run.resumed(play=lambda group: Play()))


@pytest.mark.parametrize(
    ("event", "error", "after"),
    [
        ("score", WorkerError("rank 0 died"), []),
        ("train 2", WorkerError("rank 0 died"), []),
        ("send 2", WeightSyncError("a tensor is missing"), ["row 2", "save 2", "checkpoint 2"]),
        ("evaluated 2", OSError("no space for the samples"), ["row 2", "save 2", "checkpoint 2"]),
        ("row 2", OSError("no space for the row"), ["save 2", "checkpoint 2"]),
        ("save 2", OSError("the disk is full"), []),
        ("export 2", OSError("the disk is full"), []),
    ],
)
@STALENESS
def test_a_run_that_ends_with_an_error_saves_its_last_step_if_the_weights_are_complete(
    tmp_path: Path, max_staleness: int, event: str, error: Exception, after: list[str]
):
    """After the error nothing is trained, published or evaluated, and a failed write is not tried again. An engine
    whose sync failed stays paused."""
    settings = {"ckpt_interval": 2, "eval_interval": 2, "hf_save_interval": 2}
    script = Script(max_staleness=max_staleness, errors={event: error}, settings=settings, eval_rows=1)
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(type(error), match=str(error)):
        run.go()
    found = run.events[run.events.index(event) + 1 :]
    assert [each for each in found if not each.startswith("finish")] == after
    assert run.engine.serves.is_set() == (not event.startswith("send"))
    saved = [2] if after or event == "export 2" else []
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [f"step_{step:06d}" for step in saved]
    if saved:
        resumed = run.resumed(errors={}).go()
        is_complete = event == "export 2"
        assert list(resumed.reports.rows) == ([3] if is_complete else [2, 3])
        assert resumed.events_of("evaluated")[0] == ("evaluated 3" if is_complete else "evaluated 2")
        assert resumed.buffer.outstanding == ()


@STALENESS
@pytest.mark.parametrize("num_scored", [2, 3])
def test_groups_of_a_step_that_failed_are_played_again(tmp_path: Path, max_staleness: int, num_scored: int):
    run = ScriptedRun(tmp_path, Script(steps=5, max_staleness=max_staleness))
    update: Any = run.update
    score, scored = update.score, []

    async def scored_or_raised(batch: Batch) -> Batch:
        scored.append(batch)
        if len(scored) == num_scored:
            raise WorkerError("rank 0 died")
        return await score(batch)

    update.score = scored_or_raised
    with pytest.raises(WorkerError, match="rank 0 died"):
        run.go()
    assert run.events_of("save") == [f"save {num_scored - 1}"]
    require_nothing_is_lost(run, run.resumed())


def test_an_error_is_raised_even_if_nothing_can_be_saved_after_it(tmp_path: Path, caplog: Any):
    errors = {"send 2": WorkerError("rank 0 died"), "save 2": WorkerError("the ranks have ended")}
    with pytest.raises(WorkerError, match="rank 0 died"):
        ScriptedRun(tmp_path, Script(errors=errors)).go()
    assert "step 2 could not be saved after WorkerError: the ranks have ended" in caplog.text


def test_an_evaluation_in_which_everything_fails_ends_the_run_and_the_resumed_run_repeats_it(tmp_path: Path):
    script = Script(
        eval_rows=2, eval_play=Play(rewards=(None, None)), settings={"eval_interval": 1, "ckpt_interval": 1}
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(GenerationError, match=r"evaluation: all 4 samples failed; the first: OSError: gone"):
        run.go()
    assert run.events_of("evaluated", "row", "save") == ["row 1", "save 1"]
    assert "eval/reward" not in run.reports.rows[1]
    resumed = run.resumed(eval_play=Play()).go()
    assert resumed.events_of("evaluated", "row")[:2] == ["evaluated 1", "row 1"]
    assert resumed.reports.rows[1]["eval/reward"] == 0.5


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=["one is lost", "one comes back"])
def test_a_sync_broken_by_a_changed_number_of_engines_is_repeated(tmp_path: Path, before: int, after: int):
    class TwoEngines(ScriptedEngine):
        num_alive = before

        def num_weight_receivers(self) -> int:
            return self.num_alive

        async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
            if version == 1 and self.num_alive == before:
                self.num_alive = after
                raise WeightSyncError("the sync was opened for other engines")
            return await super().update_weights(rendezvous, version)

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=TwoEngines).go()
    assert run.events_of("pause", "send", "serve", "published") == [
        "pause", "send 0", "serve 0",
        "pause", "send 1", "pause", "send 1", "serve 1", "published 1",
        "pause", "send 2", "serve 2", "published 2",
    ]  # fmt: skip


class LosesItself(ScriptedEngine):
    """The run's only engine, which dies during a sync. The sync fails first; a minute later the loss is detected and
    the engine has restarted."""

    num_losses = 1
    is_lost = False

    def num_weight_receivers(self) -> int:
        return 1

    async def has_lost_engines(self) -> bool:
        await asyncio.sleep(60.0 if self.is_lost else 10.0)
        return self.is_lost

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        self.is_lost = version == 1 and self.num_losses > 0
        if self.is_lost:
            self.num_losses -= 1
            raise WeightSyncError("the only engine did not take it")
        return await super().update_weights(rendezvous, version)


@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_run_survives_the_loss_of_its_only_engine_in_a_sync(tmp_path: Path, num_losses: int):
    class Lost(LosesItself):
        pass

    Lost.num_losses = num_losses
    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=Lost).go()
    assert run.events_of("pause", "send", "serve", "published") == [
        "pause", "send 0", "serve 0",
        *["pause", "send 1"] * (1 + num_losses), "serve 1", "published 1",
        "pause", "send 2", "serve 2", "published 2",
    ]  # fmt: skip
    assert run.time_of("serve 1") - run.time_of("send 1") > 60.0 * num_losses


def test_a_sync_that_ends_the_engine_in_every_try_ends_the_run(tmp_path: Path):
    class AlwaysLost(LosesItself):
        num_losses = 100

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=AlwaysLost)
    with pytest.raises(WeightSyncError, match=r"lost in each of 3 tries to publish it; .*did not take it"):
        run.go()
    assert run.events_of("send") == ["send 0", "send 1", "send 1", "send 1"]


def test_a_sync_that_fails_with_all_engines_alive_ends_the_run_with_its_own_error(tmp_path: Path):
    class Refuses(LosesItself):
        async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
            if version == 1:
                raise WeightSyncError("it does not fit")
            return await super().update_weights(rendezvous, version)

    run = ScriptedRun(tmp_path, Script(steps=2), engine_class=Refuses)
    with pytest.raises(WeightSyncError, match="it does not fit"):
        run.go()
    assert run.events_of("send") == ["send 0", "send 1"]


@pytest.mark.parametrize(
    ("event", "after_s", "expected", "num_syncs"),
    [
        ("start 2 at 1", 5.0, ["pause", "send 1", "serve 1", "take 2: 2 3", "score", "train 2", "pause", "send 2"], 5),
        ("train 2", 1.0, ["pause", "send 2", "serve 2", "published 2", "row 2"], 4),
        ("send 2", 1.0, ["serve 2", "published 2", "row 2", "pause", "send 2", "serve 2"], 5),
    ],
    ids=["between two steps", "while a step changes the weights", "in the middle of a sync"],
)
def test_a_restarted_engine_gets_weights_at_once_or_from_the_step_under_way(
    tmp_path: Path, event: str, after_s: float, expected: list[str], num_syncs: int
):
    run = ScriptedRun(tmp_path, Script(), engine_class=RestartedEngine)
    assert isinstance(run.engine, RestartedEngine)
    run.log.when(event, run.engine.restart, after_s=after_s)
    run.go()
    events = [each for each in run.events if not each.startswith(("start", "finish"))]
    restarted = events.index("restart") + 1
    assert events[restarted : restarted + len(expected)] == expected
    assert len(run.events_of("send")) == num_syncs


class RestartedSleepingEngine(SleepingEngine, RestartedEngine):
    """An engine on shared devices that a test can restart."""


@pytest.mark.parametrize("after_s", [0.0, 2.9, 3.0])
def test_on_shared_devices_a_restarted_engine_waits_for_the_checkpoint_and_no_syncs_overlap(
    tmp_path: Path, after_s: float
):
    script = Script(steps=2, settings={"ckpt_interval": 1})
    run = ScriptedRun(tmp_path, script, engine_class=RestartedSleepingEngine)
    assert isinstance(run.engine, RestartedSleepingEngine)
    run.log.when("save 1", run.engine.restart, after_s=after_s)
    run.go()
    events = [event for event in run.events if event != "restart"]
    assert events[events.index("save 1") + 1] == "checkpoint 1"
    syncs = [event.split()[0] for event in events if event.startswith(("pause", "send", "serve"))]
    assert syncs == ["pause", "send", "serve"] * (len(syncs) // 3)


def test_on_shared_devices_a_restarted_engine_waits_for_the_export(tmp_path: Path):
    script = Script(steps=2, export_s=3.0, settings={"hf_save_interval": 1})
    run = ScriptedRun(tmp_path, script, engine_class=RestartedSleepingEngine)
    assert isinstance(run.engine, RestartedSleepingEngine)
    run.log.when("export 1", run.engine.restart, after_s=1.0)
    run.go()
    began = run.time_of("export 1")
    assert [event for at, event in run.log.entries if began < at < began + script.export_s] == ["restart"]


@pytest.mark.parametrize(
    "engine_class", [RestartedEngine, RestartedSleepingEngine], ids=["own devices", "shared devices"]
)
def test_the_end_of_the_run_waits_for_the_sync_of_a_restarted_engine(
    tmp_path: Path, engine_class: type[RestartedEngine]
):
    run = ScriptedRun(tmp_path, Script(steps=2, settings={"ckpt_interval": 2}), engine_class=engine_class)
    assert isinstance(run.engine, RestartedEngine)
    run.log.when("save 2", run.engine.restart, after_s=2.0)
    run.go()
    syncs = [event.split()[0] for event in run.events if event.startswith(("pause", "send", "serve"))]
    assert syncs == ["pause", "send", "serve"] * 4, "versions 0 to 2, and version 2 again"


def test_a_group_that_never_ends_is_a_deadline_error_that_says_what_is_missing(tmp_path: Path):
    script = Script(
        play=lambda group: Play(seconds=1e9 if group == 3 else 10.0), settings={"generation_timeout_s": 600.0}
    )
    run = ScriptedRun(tmp_path, script)
    missing = r"step 2: still needs 2 of its 2 groups after 600 s \(.*_timeout_s\); 1 finished, 1 in progress"
    with pytest.raises(DeadlineError, match=missing):
        run.go()
    assert run.time_of("save 1") == run.time_of("row 1") + 600.0


def test_an_evaluation_that_never_ends_is_a_deadline_error_and_is_cancelled(tmp_path: Path):
    script = Script(
        eval_rows=3, eval_play=Play(seconds=1e9), settings={"eval_interval": 2, "generation_timeout_s": 90.0}
    )
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(
        DeadlineError, match=r"^not all of 3 rows were played within 90 s \(trainer\.generation_timeout_s\)$"
    ):
        run.go()
    assert run.time_of("save 2") == run.time_of("evaluate") + 90.0


@pytest.mark.parametrize(("ckpt_interval", "waits_from"), [(1, "row 2"), (3, "copy 3")], ids=["next save", "end"])
def test_a_background_save_that_never_ends_is_a_deadline_error(tmp_path: Path, ckpt_interval: int, waits_from: str):
    """The next save, and the end of the run, wait for the unfinished save until the deadline."""
    settings = {"ckpt_interval": ckpt_interval, "saves_in_background": True, "worker_timeout_s": 300.0}
    run = ScriptedRun(tmp_path, Script(save_s=1e9, settings=settings))
    partial = rf"step_00000{ckpt_interval}\.partial: waited 300 s \(trainer\.worker_timeout_s\) for the ranks to write"
    with pytest.raises(DeadlineError, match=partial):
        run.go()
    assert run.ended_at == pytest.approx(run.time_of(waits_from) + 300.0, abs=0.2), "the save is polled every 0.05 s"
    assert list_checkpoints(tmp_path / "checkpoints") == []


class Once(dict[str, BaseException]):
    """Errors that are each raised only once."""

    def __getitem__(self, event: str) -> BaseException:
        return self.pop(event)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, WeightSyncError("rank 0 could not write to /tmp/x: No space left on device")])
@STALENESS
def test_a_weight_sync_that_fails_for_lack_of_disk_space_is_repeated(
    tmp_path: Path, max_staleness: int, error: Exception, caplog: pytest.LogCaptureFixture
):
    script = Script(max_staleness=max_staleness, errors=Once({"send 2": error}))
    run = ScriptedRun(tmp_path, script).go()
    assert (run.events.count("send 2"), run.events.count("serve 2")) == (2, 1)
    assert [*run.trained] == [1, 2, 3]
    assert f"disk full: weight version 2 is sent again in 5 s ({error}). Make room there, or" in caplog.text


def test_a_weight_sync_that_never_finds_room_ends_the_run_with_a_checkpoint(tmp_path: Path):
    run = ScriptedRun(tmp_path, Script(errors={"send 2": FULL}))
    with pytest.raises(DiskFullError, match=r"full: there was no room for weight version 2 within 600 s \(.*Make room"):
        run.go()
    assert run.events[-2:] == ["save 2", "checkpoint 2"]


def test_after_a_model_export_without_disk_space_the_next_step_exports_its_own_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    script = Script(steps=6, settings={"hf_save_interval": 2}, errors=Once({"export 2": FULL, "export 3": FULL}))
    run = ScriptedRun(tmp_path, script).go()
    assert run.events_of("export") == [f"export {step}" for step in (2, 3, 4, 6)]
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step_000004", "step_000006"]
    assert caplog.text.count("the run continues, and each further step tries to export its own model") == 2


@pytest.mark.parametrize("event", ["end 3", "export model"])
@STALENESS
def test_trained_weights_are_saved_if_the_end_of_the_run_fails(tmp_path: Path, max_staleness: int, event: str):
    """The run saves no other checkpoint."""
    settings = {"ckpt_interval": -1, "model_path": tmp_path / "model"}
    script = Script(max_staleness=max_staleness, settings=settings, errors={event: OSError("the disk is gone")})
    run = ScriptedRun(tmp_path, script)
    with pytest.raises(OSError, match="the disk is gone"):
        run.go()
    assert run.events[-1] == "checkpoint 3"
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    resumed = run.resumed(errors={}).go()
    assert resumed.events_of("train", "end", "export") == ["end 3", "export model"]
