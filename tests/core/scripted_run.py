"""A training run in virtual time: the real loop, buffer and rollouts, with a scripted engine, policy and environment
that only wait and record.

`ScriptedRun.events` lists what happened, in order; `timeline` adds the virtual seconds:

    start 3 at 1     group 3 starts, at policy version 1              finish 3, drop 3    group 3 is usable, is dropped
    greedy 3 at 1    its greedy answer starts
    take 2: 3 4      step 2 takes groups 3 and 4                      score, train 2      step 2 scores, trains
    add 2: 3            streamed: group 3 is added to step 2's gradient; `train 2` is then its optimizer step
    pause, send 2, serve 2    a weight sync of version 2              published 2         groups may start with it
    evaluate, evaluated 2     an evaluation begins and ends           row 2               the metrics of step 2
    save 2, copy 2, checkpoint 2    a checkpoint begins, in the foreground or in the background, and is complete
    export 2, export model    the model of step 2, and of the run     restart             the engine lost its weights
    sleep, wake …, offload    engine and policy hand over shared devices
    fail GenerationError      no more groups can be generated         end 2               the run ends after step 2
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from rl_core.batch import Batch
from rl_core.interfaces import (
    Callback,
    Completion,
    Control,
    EngineHealth,
    GenerateRequest,
    Generator,
    GroupRequest,
    InferenceClient,
    Manifest,
    Metrics,
    Rendezvous,
    SamplingParams,
    Trajectory,
    TrajectoryEnd,
    TrajectoryStep,
    WeightSender,
    WeightTransport,
)
from rl_core.layout.mesh import Mesh
from rl_core.trainer.groups import DataRow, FinishedGroup, PromptSource
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.group_selection import Selection
from rl_core.trainer.loop.rollouts import Rollouts, RolloutSettings
from rl_core.trainer.loop.training_loop import LoopSettings, TrainingLoop
from rl_core.trainer.publishing.colocation import EngineTurns
from rl_core.trainer.publishing.serving import ServedEngines, ServingSettings
from rl_core.trainer.publishing.verification import VerificationSettings
from rl_core.trainer.state.checkpoint import RunState, list_checkpoints, load_state
from rl_core.trainer.state.resumed_groups import within_the_bound
from rl_core.trainer.state.stored_groups import StartedGroup, StoredGroup, read_groups, read_started_groups
from rl_core.trainer.update.batch_update import rollout_agreement
from rl_core.trainer.update.models import Models
from rl_core.workers import MicroBatchLimits
from tests.core.virtual_time import run_virtually


@attrs.frozen(kw_only=True)
class Play:
    """The scripted course of a group: its duration and the rewards of its samples."""

    seconds: float = 10.0
    rewards: tuple[float | None, ...] = (0.0, 1.0)
    """One per sample; None: the sample fails."""
    error: BaseException | None = None
    """Raised by the generator after `seconds`; None: no error."""
    end: TrajectoryEnd = "done"
    """How the episodes of the group end."""
    greedy: float | None = 0.5
    """The greedy answer's reward; None: it fails."""
    greedy_seconds: float = 4.0


@attrs.frozen(kw_only=True)
class Script:
    """The settings of a scripted run, and the virtual seconds that its parts take."""

    steps: int = 3
    groups_per_step: int = 2
    max_staleness: int = 0
    pipeline_depth: int | None = None
    """None: as far as `max_staleness` allows."""
    play: Callable[[int], Play] = lambda group: Play()
    """The course of a training group, by its number."""
    eval_rows: int = 0
    eval_play: Play = Play(seconds=6.0)
    score_s: float = 1.0
    train_s: float = 5.0
    send_s: float = 2.0
    save_s: float = 3.0
    export_s: float = 0.0
    errors: Mapping[str, BaseException] = attrs.field(factory=dict)
    """Event → the error that is raised as soon as the event is recorded."""
    answers: Mapping[int, Control] = attrs.field(factory=dict)
    """Step → the `Control` that a callback returns at its end."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Overrides of `LoopSettings` fields."""
    streams: bool = False
    """Groups are trained on as they finish."""
    plays_greedy: bool = False
    drop_zero_variance: bool = False
    max_dropped_groups: int = 4
    min_replace_ratio: float | None = None
    max_failure_rate: float = 1.0

    @property
    def depth(self) -> int:
        """The number of steps that generation may run ahead."""
        return self.max_staleness if self.pipeline_depth is None else self.pipeline_depth


class EventLog:
    """Records events, raises the error that the script sets for an event, and calls the reactions registered for it."""

    def __init__(self, errors: Mapping[str, BaseException]) -> None:
        self.entries: list[tuple[float, str]] = []
        self._errors: list[Mapping[str, BaseException]] = [errors]
        self._reactions: dict[str, list[tuple[float, Callable[[], object]]]] = {}

    def __call__(self, event: str) -> None:
        clock = asyncio.get_running_loop()
        self.entries.append((clock.time(), event))
        for delay_s, reaction in self._reactions.pop(event, ()):
            clock.call_later(delay_s, reaction)
        for errors in self._errors:
            if event in errors:
                raise errors[event]

    def raise_too(self, errors: Mapping[str, BaseException]) -> None:
        """Adds errors to raise; the mapping may be filled later."""
        self._errors.append(errors)

    def when(self, event: str, reaction: Callable[[], object], *, after_s: float = 0.0) -> None:
        """Calls `reaction` `after_s` seconds after the next `event`."""
        self._reactions.setdefault(event, []).append((after_s, reaction))


class RecordedBuffer(GroupBuffer):
    """A buffer that records its events."""

    log: EventLog

    async def finish(self, group_id: int, trajectories: tuple[Trajectory, ...]) -> None:
        self.log(f"finish {group_id}")
        await super().finish(group_id, trajectories)

    async def drop(self, group_id: int) -> None:
        self.log(f"drop {group_id}")
        await super().drop(group_id)

    async def fail(self, error: BaseException) -> None:
        self.log(f"fail {type(error).__name__}")
        await super().fail(error)

    async def published(self, version: int) -> None:
        if version != self.version:
            self.log(f"published {version}")
        await super().published(version)

    async def take(self, timeout_s: float) -> list[FinishedGroup]:
        groups = await super().take(timeout_s)
        step = self._next_step + self.is_within_step
        self.log(f"take {step}: {' '.join(str(group.group_id) for group in groups)}")
        return groups


class ScriptedEngine(InferenceClient):
    """An engine that serves or is paused; requests under way cannot end during a pause."""

    def __init__(self, log: EventLog, script: Script) -> None:
        self.log = log
        self._script = script
        self.version = -1
        self.serves = asyncio.Event()
        self.num_under_way = 0

    async def pause(self, mode: str = "keep") -> None:
        self.log("pause")
        self.serves.clear()

    async def resume(self) -> None:
        self.log(f"serve {self.version}")
        self.serves.set()

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        raise AssertionError("the scripted generator sends no requests")

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        raise AssertionError("the scripted generator sends no requests")

    async def health(self) -> EngineHealth:
        raise AssertionError("the loop does not ask for it")

    async def close(self) -> None:
        raise AssertionError("the loop does not close its engine")

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        await asyncio.sleep(self._script.send_s)
        self.version = version
        return Manifest(version=version, tensors={})

    def generator(self) -> Generator:
        """The generator that plays training groups on this engine."""
        return ScriptedGenerator(self.log, self._script.play, self)


class SleepingEngine(ScriptedEngine):
    """An engine that shares devices with the policy."""

    can_sleep = True

    async def sleep(self) -> None:
        self.log("sleep")
        assert self.num_under_way == 0, "no request may be under way when the engine falls asleep"
        self.serves.clear()

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        self.log(f"wake {' '.join(tags or ())}")


class RestartedEngine(ScriptedEngine):
    """An engine that a test can restart, after which it lacks weights."""

    def __init__(self, log: EventLog, script: Script) -> None:
        super().__init__(log, script)
        self._lost = asyncio.Event()

    def restart(self) -> None:
        self.log("restart")
        self._lost.set()

    @property
    def lacks_weights(self) -> bool:
        return self._lost.is_set()

    async def needs_weights(self) -> None:
        await self._lost.wait()

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        self._lost.clear()
        return await super().update_weights(rendezvous, version)


class ScriptedGenerator(Generator):
    """Plays groups as scripted; each sample ends with a token of the version that the engine serves at that moment."""

    def __init__(self, log: EventLog | None, play: Callable[[int], Play], engine: ScriptedEngine) -> None:
        self._log = log
        self._play = play
        self._engine = engine

    def prompt_length(self, row: object) -> int:
        return 1

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        play = self._play(request.group_id)
        if request.params.temperature == 0.0:
            assert request.num_samples == 1
            play = attrs.evolve(play, rewards=(play.greedy,), seconds=play.greedy_seconds)
            if self._log:
                self._log(f"greedy {request.group_id} at {request.start_version}")
        elif self._log:
            self._log(f"start {request.group_id} at {request.start_version}")
        self._engine.num_under_way += 1
        try:
            await asyncio.sleep(play.seconds)
            await self._engine.serves.wait()
        finally:
            self._engine.num_under_way -= 1
        if play.error is not None:
            raise play.error
        return tuple(self._trajectory(request, index, reward, play.end) for index, reward in enumerate(play.rewards))

    def _trajectory(
        self, request: GroupRequest, sample_index: int, reward: float | None, end: TrajectoryEnd = "done"
    ) -> Trajectory:
        step = TrajectoryStep(
            tokens=[1, 2],
            sampled=[False, True],
            rollout_logprobs=[0.0, -1.0],
            policy_version=[-1, self._engine.version],
            reward=reward or 0.0,
            stop_reason="stop",
        )
        return Trajectory(
            group_id=request.group_id,
            sample_index=sample_index,
            steps=() if reward is None else (step,),
            prompt_text="",
            response_text="",
            start_version=request.start_version,
            failure="OSError: gone" if reward is None else None,
            failure_kind="OSError",
            end=end,
        )


class ScriptedPolicy:
    """The ranks of the policy: they send weights and save."""

    adapter = None
    mesh = Mesh(world_size=1)

    def __init__(self, log: EventLog, script: Script) -> None:
        self._log = log
        self._script = script
        self._saved_at = 0.0

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        self._log(f"send {version}")
        await asyncio.sleep(self._script.send_s)
        return Manifest(version=version, tensors={})

    async def save_state(self, directory: Path) -> None:
        self._log(f"save {_step_of(directory)}")
        await asyncio.sleep(self._script.save_s)
        directory.mkdir()

    async def start_saving(self, directory: Path) -> None:
        self._log(f"copy {_step_of(directory)}")
        directory.mkdir()
        self._saved_at = asyncio.get_running_loop().time() + self._script.save_s

    async def has_saved(self) -> bool:
        return asyncio.get_running_loop().time() >= self._saved_at

    async def save_model(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        name = directory.name.removesuffix(".partial")
        self._log(f"export {int(name[5:])}" if name.startswith("step_") else f"export {name}")
        await asyncio.sleep(self._script.export_s)

    async def offload(self) -> None:
        self._log("offload")


def _step_of(directory: Path) -> int:
    return int(directory.parent.name.removeprefix("step_").removesuffix(".partial"))


class ScriptedUpdate:
    """Stands in for `BatchUpdate`: scores and trains by waiting."""

    kl_coef = 0.0
    nonfinite_steps = 0
    critic_nonfinite_steps = 0

    def __init__(self, log: EventLog, script: Script) -> None:
        self._log = log
        self._script = script

    async def score(self, batch: Batch) -> Batch:
        self._log("score")
        share = len(batch["group_id"].unique()) / self._script.groups_per_step if self._script.streams else 1.0
        await asyncio.sleep(self._script.score_s * share)
        return batch.with_columns(old_logprobs=batch["rollout_logprobs"])

    def prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        return batch, {}

    async def train(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        self._log(f"train {step}")
        await asyncio.sleep(self._script.train_s)
        return batch, {"policy/loss": (1.0, 1.0)}

    async def add(self, batch: Batch, step: int) -> Batch:
        groups = dict.fromkeys(batch["group_id"].tolist())
        self._log(f"add {step}: {' '.join(str(group) for group in groups)}")
        await asyncio.sleep(self._script.train_s * len(groups) / self._script.groups_per_step)
        return batch

    async def finish(self, step: int) -> Metrics:
        self._log(f"train {step}")
        return {"policy/loss": (1.0, 1.0)}

    def observed(self, batch: Batch, metrics: Metrics) -> Metrics:
        return {}

    def agreement(self, batch: Batch, version: int) -> Metrics:
        return rollout_agreement(batch, version)


class ScriptedTransport(WeightTransport):
    """Transfers nothing; engine and policy wait as long as the script says."""

    name = "scripted"
    is_staged = False

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        return Rendezvous(transport=self.name, receiver="", data={})

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> WeightSender:
        raise AssertionError("the scripted policy sends nothing")

    def close(self, rendezvous: Rendezvous) -> None:
        pass


class RecordedReports(Callback):
    """Reporter and callback in one: records `rows` by step, and the trained samples as `groups`."""

    def __init__(self, log: EventLog, script: Script) -> None:
        self._log = log
        self._script = script
        self.rows: dict[int, Mapping[str, float]] = {}
        self.groups: dict[int, tuple[Trajectory, ...]] = {}
        self.failed: list[tuple[int, int, int]] = []
        """Step, group and index of each failed training sample."""
        self.failed_in_evaluation = 0

    def phase(self, name: str) -> None:
        if name == "evaluate":
            self._log("evaluate")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(f"row {step}")
        assert step not in self.rows
        self.rows[step] = metrics

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
        self.groups[step] = tuple(trajectories)

    def failed_samples(self, step: int, trajectories: Sequence[Trajectory], *, purpose: str = "train") -> None:
        if purpose == "eval":
            self.failed_in_evaluation += len(trajectories)
            return
        self.failed += [(step, trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        self._log(f"evaluated {step}")

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control | None:
        return self._script.answers.get(step)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._log(f"checkpoint {step}")

    def on_run_end(self, step: int) -> None:
        self._log(f"end {step}")


class ScriptedRun:
    """One run, from step 1 or from a checkpoint's state."""

    def __init__(
        self,
        directory: Path,
        script: Script,
        *,
        state: RunState | None = None,
        engine_class: type[ScriptedEngine] = ScriptedEngine,
        buffer_class: type[RecordedBuffer] = RecordedBuffer,
        loop_class: type[TrainingLoop] = TrainingLoop,
        clock: Callable[[], float] = time.perf_counter,
        stored: Sequence[StoredGroup] = (),
        started: Sequence[StartedGroup] = (),
    ) -> None:
        state = state or RunState(step=0, next_group=0, restart_groups=(), kl_coef=0.0, nonfinite_steps=0)
        self.script = script
        self.directory = directory
        self.ended_at: float | None = None
        self.log = log = EventLog(script.errors)
        self.engine = engine_class(log, script)
        self.buffer = buffer_class(
            groups_per_step=script.groups_per_step,
            max_staleness=script.max_staleness,
            pipeline_depth=script.depth,
            version=state.step,
            last_version=script.steps - 1,
            finished=[one.group for one in stored],
            started={one.group_id: one.start_version for one in started},
            in_parts=script.streams,
        )
        self.buffer.log = log
        self.reports = RecordedReports(log, script)
        rollout_settings = RolloutSettings(
            num_samples=len(script.eval_play.rewards),
            params=SamplingParams(),
            seed=0,
            plays_greedy=script.plays_greedy,
            drop_zero_variance=script.drop_zero_variance,
            max_dropped_groups=script.max_dropped_groups,
            max_failure_rate=script.max_failure_rate,
            samples_per_step=script.groups_per_step * len(script.eval_play.rewards),
        )
        parts: dict[str, Any] = {
            "models": Models(policy=ScriptedPolicy(log, script)),  # pyright: ignore[reportArgumentType]
            "update": ScriptedUpdate(log, script),
            "rollouts": Rollouts(
                self.engine.generator(),
                PromptSource([DataRow({"prompt": "?"}, "train:1")], seed=0, shuffle=False),
                self.buffer,
                rollout_settings,
                next_group=state.next_group,
                restart_groups=state.restart_groups,
                stored=stored,
                started=started,
                abort=self.engine.abort,
                clock=clock,
            ),
            "buffer": self.buffer,
            "selection": Selection(
                min_replace_ratio=script.min_replace_ratio,
                max_rejected_batches=3,
                mask_zero_variance=False,
                mask_overlong=False,
                seed=0,
            ),
            "generator": ScriptedGenerator(None, lambda group: script.eval_play, self.engine),
            "eval_rows": [DataRow({"prompt": "?"}, f"held_out:{number}") for number in range(script.eval_rows)],
            "eval_settings": attrs.evolve(rollout_settings, drop_zero_variance=False),
            "reporter": self.reports,
            "callbacks": [self.reports],
        }
        policy, shared = parts["models"].policy, isinstance(self.engine, SleepingEngine)
        engines = ServedEngines(
            _SERVING,
            policy=policy,
            client=self.engine,
            transport=ScriptedTransport(),
            turns=EngineTurns(self.engine, policy, are_shared=shared),
        )
        self.update: ScriptedUpdate = parts["update"]
        self.loop = loop_class(
            _settings(script, directory),
            **parts,
            engines=engines,
            steps_done=state.step,
            unfinished_row=state.unfinished_row,
            clock=clock,
        )

    def go(self, *, on_turn: Callable[[int], None] = lambda turn: None) -> Self:
        """Runs to the end and raises the run's error, if any. In either case, fails if a task is left."""
        run_virtually(self.work(), on_turn=on_turn)
        return self

    async def work(self) -> None:
        """Does the work of `go` in an event loop that is already running."""
        others = asyncio.all_tasks()
        try:
            await self.loop.run()
        finally:
            self.ended_at = asyncio.get_running_loop().time()
            for _ in range(3):  # cancelled tasks end in the next turns of the loop
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - others
            assert not left, f"the run left tasks behind: {left}"

    def resumed(self, **changes: Any) -> ScriptedRun:
        """A run that continues from the newest checkpoint, with some fields of the script changed."""
        checkpoint = list_checkpoints(self.directory / "checkpoints")[-1]
        state, stored, started = load_state(checkpoint), read_groups(checkpoint), read_started_groups(checkpoint)
        assert state.finished_groups == tuple(sorted(one.group.group_id for one in stored))
        script = attrs.evolve(self.script, **changes)
        kept = within_the_bound(
            {one.group.group_id: one.group.start_version for one in stored}
            | {one.group_id: one.start_version for one in started},
            version=state.step,
            last_version=script.steps - 1,
            groups_per_step=script.groups_per_step,
            max_staleness=script.max_staleness,
        )
        again = {*state.restart_groups, *state.finished_groups} - kept
        state = attrs.evolve(state, restart_groups=tuple(sorted(again)))
        return ScriptedRun(
            self.directory,
            script,
            state=state,
            engine_class=type(self.engine),
            stored=[one for one in stored if one.group.group_id in kept],
            started=[one for one in started if one.group_id in kept],
        )

    @property
    def timeline(self) -> list[str]:
        """`second event` strings, in order."""
        return [f"{time:g} {event}" for time, event in self.log.entries]

    @property
    def events(self) -> list[str]:
        """The recorded events, in order."""
        return [event for _, event in self.log.entries]

    def events_of(self, *kinds: str) -> list[str]:
        """The events that begin with one of these words."""
        return [event for event in self.events if event.split(maxsplit=1)[0] in kinds]

    def time_of(self, event: str) -> float:
        """Virtual second of the first occurrence of the event."""
        return next(time for time, each in self.log.entries if each == event)

    @property
    def taken(self) -> list[tuple[int, list[int]]]:
        """Steps with the groups that each took; a step that took its groups in parts appears once per part."""
        takes = [event.removeprefix("take ").split(":") for event in self.events_of("take")]
        return [(int(step), [int(group) for group in groups.split()]) for step, groups in takes]

    @property
    def trained(self) -> dict[int, list[int]]:
        """Finished steps with the groups that each was trained on."""
        trained: dict[int, list[int]] = {}
        for step, groups in self.taken:
            if step in self.reports.rows:
                trained.setdefault(step, []).extend(groups)
        return trained


_SERVING = ServingSettings(
    max_bucket_bytes=1,
    pause_mode="keep",
    verification=VerificationSettings(
        prove_at_start=False, interval=0, num_tokens=1, limit=1.0, seed=0, limits=MicroBatchLimits(max_sequences=1)
    ),
)


def _settings(script: Script, directory: Path) -> LoopSettings:
    settings = LoopSettings(
        last_step=script.steps,
        eval_interval=-1,
        eval_before_train=False,
        eval_batch_size=8,
        ckpt_interval=-1,
        max_ckpts_to_keep=-1,
        hf_save_interval=-1,
        run_dir=directory,
        checkpoint_root=directory / "checkpoints",
        export_root=directory / "exports",
        generation_timeout_s=600.0,
        worker_timeout_s=600.0,
        saves_in_background=False,
        merge_steps=False,
        stream_groups=script.streams,
    )
    return attrs.evolve(settings, **script.settings)
