"""The training loop of synchronous and asynchronous runs.

A generating task and a training task exchange groups through a bounded buffer. With `pipeline_depth` 0 they take turns;
with a larger depth, generation runs ahead of training. When streaming, a step trains while its last groups are still
being played (module `step_training`).

    Rollouts.run                                       TrainingLoop.run
    prompt ─► episodes ─► group ──► [ buffer ] ──► a step's groups ─► scores ─► update ─► publish
       ▲                                                                                     │
       └───────────── room for another group: a batch was taken, a version published ◄───────┘

| task             | consumes        | produces                 | waits for                       | unblocked by       |
|------------------|-----------------|--------------------------|---------------------------------|--------------------|
| Rollouts.run     | prompts         | finished groups          | permission to start a group     | take, published, … |
| TrainingLoop.run | finished groups | weight versions, metrics | a step's groups, then the ranks | finish, the ranks  |

A third task publishes the current version again when a restarted engine lacks it.

An evaluation runs in the training task, before the next version is published, so all its samples come from a single
version. If engines and models share devices (`EngineTurns`), the next groups start only after the models have done all
work of the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from rl_core.interfaces import Callback, Control, Generator
from rl_core.tasks import code_of
from rl_core.trainer.groups import DataRow, FinishedGroup
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.concurrency import alongside, unless_set
from rl_core.trainer.loop.evaluation import evaluate, evaluation_failures
from rl_core.trainer.loop.group_selection import Selection, has_zero_variance
from rl_core.trainer.loop.reporter import Reporter
from rl_core.trainer.loop.rollouts import Rollouts, RolloutSettings
from rl_core.trainer.loop.step_metrics import (
    cut_episodes_warning,
    data_metrics,
    divided,
    queue_metrics,
    rollout_metrics,
)
from rl_core.trainer.loop.step_training import StepTraining, TrainedStep
from rl_core.trainer.loop.timing import PhaseTimes
from rl_core.trainer.publishing.serving import Engines
from rl_core.trainer.state.checkpoint import RunState
from rl_core.trainer.state.remote_checkpoints import CheckpointCopies
from rl_core.trainer.state.saving import CheckpointSaver
from rl_core.trainer.update.batch_update import BatchUpdate
from rl_core.trainer.update.collate import collate
from rl_core.trainer.update.models import Models

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class LoopSettings:
    """Settings of the loop: when it evaluates, saves and exports, how long it waits, and where it writes."""

    last_step: int
    eval_interval: int
    eval_before_train: bool
    eval_batch_size: int
    ckpt_interval: int
    max_ckpts_to_keep: int
    hf_save_interval: int
    run_dir: Path
    checkpoint_root: Path
    export_root: Path
    generation_timeout_s: float
    worker_timeout_s: float
    saves_in_background: bool
    merge_steps: bool
    """Whether to merge trajectory steps that continue each other into one sequence."""
    stream_groups: bool = False
    """Whether to train on the groups of a step as they finish, before all of them have finished."""
    fingerprint: Mapping[str, Any] | None = None
    """The run's fingerprint, stored in its checkpoints; None: not stored."""
    checkpoint_copies: CheckpointCopies | None = None
    """Copies each checkpoint to a remote address; None: checkpoints are not copied."""
    model_path: Path | None = None
    """Directory into which the model is written after the last step; None: the model is not written."""


class TrainingLoop:
    """Trains the steps after `steps_done`, up to `last_step`. Step numbers count from 1; step s produces policy
    version s."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        models: Models,
        update: BatchUpdate,
        rollouts: Rollouts,
        buffer: GroupBuffer,
        selection: Selection,
        generator: Generator,
        engines: Engines,
        eval_rows: Sequence[DataRow],
        eval_settings: RolloutSettings,
        reporter: Reporter,
        callbacks: Sequence[Callback],
        steps_done: int,
        unfinished_row: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._settings = settings
        self._models = models
        self._update = update
        self._rollouts = rollouts
        self._buffer = buffer
        self._selection = selection
        self._generator = generator
        self._engines = engines
        self._eval_rows = eval_rows
        self._eval_settings = eval_settings
        self._reporter = reporter
        self._callbacks = callbacks
        self._times = PhaseTimes(clock)
        self._training = StepTraining(
            update,
            selection,
            engines,
            times=self._times,
            tell_phase=reporter.phase,
            merges_steps=settings.merge_steps,
            in_parts=settings.stream_groups,
            clock=clock,
        )
        self._stop = asyncio.Event()
        self._saver = CheckpointSaver(
            settings.checkpoint_root,
            models,
            keep=settings.max_ckpts_to_keep,
            in_background=settings.saves_in_background,
            timeout_s=settings.worker_timeout_s,
            on_complete=self._checkpoint_completed,
            fingerprint=settings.fingerprint,
            copies=settings.checkpoint_copies,
        )
        self._between_versions = asyncio.Lock()
        self._saved_step: int | None = steps_done or None
        self._is_resumed = steps_done > 0
        self._row: dict[str, float] | None = None if unfinished_row is None else dict(unfinished_row)
        """Metrics of the last trained step, until its row is complete."""
        self._row_is_written = False
        self._has_warned_of_cuts = False
        self._lacks_export = False
        """Whether the last export failed because the disk was full. If so, the next step exports its model."""
        self.steps_done = steps_done

    def stop(self) -> None:
        """Ends the run at the next step boundary, with a checkpoint if a step was trained. Must be called in the event
        loop's thread."""
        self._stop.set()

    @property
    def was_stopped(self) -> bool:
        """Whether `stop` was called before the last step and its evaluation were done."""
        return self._stop.is_set() and (self.steps_done < self._settings.last_step or self._row is not None)

    async def run(self) -> None:
        """Trains until the last step or until `stop`. Then saves a checkpoint of the last finished step if checkpoints
        are enabled or the run was stopped. Writes the model if the run was not stopped. After an error, saves a
        checkpoint if the weights are those of a finished step."""
        self._tell(Callback.on_run_start, self._settings.run_dir, self.steps_done + 1, self._settings.last_step)
        await self._publish()
        await self._engines.prove()
        async with alongside(self._bring_back_engines()), self._saving_after_errors():
            await self._train()
            # `_train` cannot save after a stop, because groups may still be running there, and saving puts an engine on
            # shared devices to sleep. Here no group is being played.
            if self._settings.ckpt_interval > 0 or self._stop.is_set():
                await self._checkpoint()
            with self._times.phase("checkpoint"):
                await self._saver.finish()
            async with self._between_versions:  # a sync for a restarted engine ends first: the models take part in it
                await self._engines.to_models()
        async with self._saving_after_errors():
            self._tell(Callback.on_run_end, self.steps_done)
            if self._settings.model_path is not None and not self.was_stopped:
                self._reporter.phase("export")
                await self._models.save_model(self._settings.model_path)

    async def _train(self) -> None:
        starts = not self._is_resumed and not self._stop.is_set()
        if starts and self._settings.eval_before_train and self._eval_rows:
            metrics = await self._evaluate()
            if metrics is None:
                return
            self._reporter.step(0, metrics | self._lap())
        if self._row is not None:
            await self._finish_step()
        elif self._is_resumed and not self._export_directory.exists():
            # The earlier process may have been killed between the checkpoint and the export.
            await self._export()
        async with alongside(self._rollouts.run()):
            while self.steps_done < self._settings.last_step:
                groups = await self._next_groups()
                if groups is None:
                    break
                await self._train_on(groups)
            if self._stop.is_set():
                await self._collect_answers()  # the end of the block cancels groups in progress

    @asynccontextmanager
    async def _saving_after_errors(self) -> AsyncIterator[None]:
        try:
            with code_of("code that the run calls"):
                yield
        except Exception as error:
            await self._save_after(error)
            raise

    def _tell(self, event: Callable[Concatenate[Callback, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls the method `event` of every callback and returns their answers."""
        answers: list[R] = []
        for callback in self._callbacks:
            with code_of(f"{event.__name__} of the callback {type(callback).__name__}"):
                answers.append(getattr(callback, event.__name__)(*args, **kwargs))
        return answers

    async def _save_after(self, error: Exception) -> None:
        """Saves the last finished step before the run ends with an error, if the weights have not changed since.
        Samples that failed after that step are written under the number of the next step. If samples or metrics cannot
        be written, the step is saved nevertheless."""
        step = self.steps_done
        with _warned(error, f"the samples that failed after step {step} could not be written"):
            self._reporter.failed_samples(step + 1, self._rollouts.failed())
        if step == 0 or not self._training.weights_are_whole:
            return
        with _warned(error, f"the metrics of step {step} could not be written"):
            self._write_row()
        with _warned(error, f"step {step} could not be saved"):
            await self._checkpoint()
            with self._times.phase("checkpoint"):
                await self._saver.finish()

    async def _train_on(self, groups: list[FinishedGroup]) -> None:
        """Trains on groups taken from the buffer. If they are the step's last ones, finishes the step."""
        step = self.steps_done + 1
        queue = queue_metrics(self._buffer) if self._engines.is_sampled_from else {}
        with self._times.phase("checkpoint"):
            await self._saver.poll()
        async with self._between_versions:
            trained = await self._training.train(groups, step, is_last=not self._buffer.is_within_step)
            if trained is None:
                return
            self.steps_done = step
            row = await self._begin_row(trained, queue)
            row |= await self._publish()
        if not self._engines.are_shared:
            await self._buffer.published(step)
        self._tell(Callback.on_groups, step, trained.trajectories)
        await self._finish_step()

    async def _begin_row(self, trained: TrainedStep, queue: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics row of the step that was just trained, and reports the step's samples."""
        step, groups, batch = self.steps_done, trained.groups, trained.batch
        samples, bound = self._engines.is_sampled_from, self._buffer.max_staleness
        agreement = self._update.agreement(batch, version=step - 1) if samples else {}
        await self._buffer.trained()
        counts, failed = self._rollouts.lap()
        self._row_is_written = False
        of_samples = rollout_metrics(groups, batch, version=step - 1, bound=bound) if samples else data_metrics(batch)
        self._row = row = {**divided({**trained.metrics, **agreement}), **of_samples, **counts, **queue}
        if not self._has_warned_of_cuts and (warning := cut_episodes_warning(groups)):
            self._has_warned_of_cuts = True
            logger.warning("step %d: %s", step, warning)
        self._reporter.train_samples(step, trained.trajectories, batch)
        self._reporter.failed_samples(step, failed)
        return row

    async def _finish_step(self) -> None:
        """Evaluates if due, calls the callbacks, writes the row, then saves and exports if due. If a stop interrupts
        the evaluation, writes the row without it and returns; `run` then saves a checkpoint. The resumed run evaluates
        again and does the rest."""
        step, settings = self.steps_done, self._settings
        assert self._row is not None
        is_last = step == settings.last_step
        if not await self._evaluated(self._row, is_due=_is_due(step, settings.eval_interval, is_last)):
            return
        control = self._ask_callbacks(step, self._row)
        if not await self._evaluated(self._row, is_due=control.evaluate and not _is_evaluated(self._row)):
            return
        if control.stop:
            self.stop()
        # The row is written before the checkpoint, so only a full disk can leave a checkpoint without the row of its
        # step. The time of saving counts in the next row.
        self._write_row()
        self._row = None
        if _is_due(step, settings.ckpt_interval, is_last) or control.save or self._saver.is_behind:
            await self._checkpoint()
        await self._export()

    async def _export(self) -> None:
        """Exports the model if an export is due now, or if the last export failed because the disk was full."""
        interval = self._settings.hf_save_interval
        if interval > 0 and (self.steps_done % interval == 0 or self._lacks_export):
            self._reporter.phase("export")
            with self._times.phase("checkpoint"):
                async with self._devices_for_models():
                    self._lacks_export = not await self._saver.export(self._export_directory)

    @property
    def _export_directory(self) -> Path:
        return self._settings.export_root / f"step_{self.steps_done:06d}"

    async def _evaluated(self, row: dict[str, float], *, is_due: bool) -> bool:
        """Evaluates if `is_due`, and adds the metrics to the row. If a stop interrupted the evaluation, writes the row
        without these metrics and returns False."""
        if not is_due or not self._eval_rows:
            return True
        metrics = await self._evaluate()
        if metrics is None:
            self._write_row()
            return False
        row |= metrics
        return True

    def _lap(self) -> dict[str, float]:
        """Returns the metrics `time/…`: seconds since the last call, by phase, and idle times of generation and
        engines."""
        idle = {"time/generation_idle": self._rollouts.idle_lap()} if self._engines.is_sampled_from else {}
        return self._times.lap() | idle | self._engines.idle_lap()

    def _write_row(self) -> None:
        """Writes the row of the last trained step with the metrics that are known so far. Does nothing if the row was
        already written."""
        if self._row is None or self._row_is_written:
            return
        for name, seconds in self._lap().items():
            self._row[name] = self._row.get(name, 0.0) + seconds
        self._row["tokens_per_second"] = self._row["rollout/tokens"] / self._row["time/step"]
        self._row_is_written = True
        self._reporter.step(self.steps_done, dict(self._row))

    async def _next_groups(self) -> list[FinishedGroup] | None:
        """Waits for the groups of the next step, or of its next part, and returns those to train on. Returns None if a
        stop was requested before the groups were taken."""
        if self._stop.is_set():
            return None
        if self._engines.are_asleep:
            async with self._between_versions:
                if self._engines.are_asleep:  # a sync for a restarted engine may have woken them
                    await self._publish()
        await self._buffer.published(self.steps_done)
        self._reporter.phase("generate")
        with self._times.phase("generate"):
            while True:
                groups = await unless_set(self._stop, self._buffer.take(self._settings.generation_timeout_s))
                # A batch that was taken is trained on or rejected, even if a stop was requested meanwhile.
                if groups is None or not self._selection.replaces_groups:
                    return groups
                chosen = self._selection.chosen(groups)
                if chosen is not None:
                    self._rollouts.discard(group for group in groups if has_zero_variance(group.trajectories))
                    return chosen
                self._rollouts.discard(groups)
                await self._buffer.rejected()

    async def _publish(self) -> dict[str, float]:
        self._reporter.phase("publish")
        with self._times.phase("publish"):
            return await self._engines.publish(self.steps_done)

    @asynccontextmanager
    async def _devices_for_models(self) -> AsyncIterator[None]:
        """Context in which the models may compute between two steps. If the models share devices with the engines, puts
        the engines to sleep. Meanwhile a restarted engine gets no weights, because it would need the devices for
        them."""
        if not self._engines.are_shared:
            yield
            return
        async with self._between_versions:
            await self._engines.to_models()
            yield

    async def _bring_back_engines(self) -> None:
        """Publishes the current version to restarted engines until the run ends. An error is passed to the buffer,
        whose `take` raises it, so that the run ends."""
        try:
            with code_of("restarting an engine: the engine client"):
                await self._engines.bring_back(lambda: self.steps_done, self._between_versions)
        except Exception as error:
            await self._buffer.fail(error)

    async def _evaluate(self) -> dict[str, float] | None:
        """Evaluates, reports samples and metrics, and returns the metrics; None if a stop interrupted it."""
        self._reporter.phase("evaluate")
        failures = evaluation_failures(self._eval_rows, self._eval_settings)
        evaluation = evaluate(
            self._generator,
            self._eval_rows,
            self._eval_settings,
            version=self.steps_done,
            batch_size=self._settings.eval_batch_size,
            timeout_s=self._settings.generation_timeout_s,
            failures=failures,
        )
        try:
            with self._times.phase("evaluate"):
                result = await unless_set(self._stop, evaluation)
        except Exception:
            self._reporter.failed_samples(self.steps_done + 1, failures.lap()[1], purpose="eval")
            raise
        if result is None:
            return None
        metrics = result.metrics
        if not self._engines.is_sampled_from:
            with self._times.phase("evaluate"):
                metrics = await self._update.judged(collate(result.trajectories), step=self.steps_done)
        self._reporter.eval_samples(self.steps_done, result.trajectories)
        self._tell(Callback.on_evaluation, self.steps_done, metrics)
        return metrics

    async def _checkpoint(self) -> None:
        is_saved = self._saved_step == self.steps_done and not self._saver.is_behind
        if is_saved or self.steps_done == 0:
            return
        self._reporter.phase("checkpoint")
        await self._collect_answers()
        stored, started = self._rollouts.stored(), self._rollouts.started()
        finished = {one.group.group_id for one in stored}
        restart = {*self._buffer.outstanding, *self._rollouts.pending_restarts()} - finished
        state = RunState(
            step=self.steps_done,
            next_group=self._rollouts.next_group,
            restart_groups=tuple(sorted(restart)),
            finished_groups=tuple(sorted(finished)),
            kl_coef=self._update.kl_coef,
            nonfinite_steps=self._update.nonfinite_steps,
            critic_nonfinite_steps=self._update.critic_nonfinite_steps,
            unfinished_row=self._row,
        )
        # Set before saving: if saving fails, that error ends the run, and the save must not be tried again.
        self._saved_step = self.steps_done
        with self._times.phase("checkpoint"):
            async with self._devices_for_models():
                await self._saver.save(state, stored, started)

    async def _collect_answers(self) -> None:
        with self._times.phase("checkpoint"):
            await self._rollouts.collect_answers()

    def _checkpoint_completed(self, step: int, path: Path) -> None:
        self._tell(Callback.on_checkpoint, step, path)

    def _ask_callbacks(self, step: int, metrics: Mapping[str, float]) -> Control:
        answers = [answer or Control() for answer in self._tell(Callback.on_step_end, step, metrics)]
        return Control(
            save=any(answer.save for answer in answers),
            evaluate=any(answer.evaluate for answer in answers),
            stop=any(answer.stop for answer in answers),
        )


@contextmanager
def _warned(error: Exception, what: str) -> Iterator[None]:
    """Logs an error of its block as a warning, because `error` ends the run anyway."""
    try:
        yield
    except Exception as second:
        logger.warning("%s after %s: %s", what, type(error).__name__, second)


def _is_due(step: int, interval: int, is_last: bool) -> bool:
    return interval > 0 and (step % interval == 0 or is_last)


def _is_evaluated(row: Mapping[str, float]) -> bool:
    return any(name.startswith("eval/") for name in row)
