"""The one training loop.

Two tasks, joined by a bounded buffer. With `max_staleness` 0 they take turns; with more, generation runs ahead.

| task             | consumes        | produces                | waits for                       | unblocked by        |
|------------------|-----------------|-------------------------|---------------------------------|---------------------|
| Rollouts.run     | prompts         | finished groups         | permission to start a group     | take, published     |
| TrainingLoop.run | finished groups | weight versions, a row  | a step's groups, then the ranks | finish, the ranks   |

A third one publishes the current version again when an engine that was started again lacks it.

An evaluation runs within the training task, before the next version is published: it sees one version. Where engine and
models share devices (`EngineTurns`), the next groups are started after all that a step does with the models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from rl_core.batch import Batch
from rl_core.errors import WeightSyncError
from rl_core.interfaces import (
    Callback,
    Control,
    Generator,
    InferenceClient,
    Metrics,
    Recovering,
    Trajectory,
    WeightReceivers,
    WeightTransport,
)
from rl_core.trainer.buffer import FinishedGroup, GroupBuffer
from rl_core.trainer.checkpoint import RunState
from rl_core.trainer.collate import collate, merged
from rl_core.trainer.colocation import EngineTurns
from rl_core.trainer.data import DataRow
from rl_core.trainer.evaluation import Evaluation, evaluate, trajectory_means
from rl_core.trainer.group_selection import Selection
from rl_core.trainer.models import Models
from rl_core.trainer.publish import PauseMode, publish_weights
from rl_core.trainer.rollouts import Rollouts, RolloutSettings
from rl_core.trainer.saving import CheckpointSaver
from rl_core.trainer.timing import PhaseTimes
from rl_core.trainer.update import BatchUpdate, rollout_agreement
from rl_core.trainer.verification import VerificationSettings, verification_of

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Who is told what happened; `rl_core.reports.run_reporter` writes it into the run directory."""

    def phase(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None: ...

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...


@attrs.frozen(kw_only=True)
class LoopSettings:
    """When the loop does what besides training."""

    last_step: int
    eval_interval: int
    eval_before_train: bool
    eval_batch_size: int
    ckpt_interval: int
    max_ckpts_to_keep: int
    hf_save_interval: int
    checkpoint_root: Path
    export_root: Path
    max_bucket_bytes: int
    num_engines: int
    pause_mode: PauseMode
    verification: VerificationSettings
    generation_timeout_s: float
    worker_timeout_s: float
    saves_in_background: bool
    merge_steps: bool
    """Steps that continue each other are trained as one sequence."""


class TrainingLoop:
    """Trains from `first_step` to `last_step`; step numbers count from 1, and step s makes policy version s."""

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
        client: InferenceClient,
        transport: WeightTransport,
        eval_rows: Sequence[DataRow],
        eval_settings: RolloutSettings,
        reporter: Reporter,
        callbacks: Sequence[Callback],
        turns: EngineTurns,
        steps_done: int,
    ):
        self._settings = settings
        self._models = models
        self._update = update
        self._rollouts = rollouts
        self._buffer = buffer
        self._selection = selection
        self._generator = generator
        self._client = client
        self._transport = transport
        self._eval_rows = eval_rows
        self._eval_settings = eval_settings
        self._reporter = reporter
        self._callbacks = callbacks
        self._turns = turns
        self._times = PhaseTimes()
        self._stop = asyncio.Event()
        self._saver = CheckpointSaver(
            settings.checkpoint_root,
            models,
            keep=settings.max_ckpts_to_keep,
            in_background=settings.saves_in_background,
            timeout_s=settings.worker_timeout_s,
            on_complete=self._checkpoint_completed,
        )
        self._between_versions = asyncio.Lock()
        self._saved_step: int | None = steps_done or None
        self._is_resumed = steps_done > 0
        self._verification = verification_of(settings.verification, models.policy, client, self._publish_weights)
        self.steps_done = steps_done

    def stop(self) -> None:
        """Ends the run at the next step boundary, with a checkpoint. Callable from a signal handler."""
        self._stop.set()

    @property
    def was_stopped(self) -> bool:
        """`stop` was called before the last step was done."""
        return self._stop.is_set() and self.steps_done < self._settings.last_step

    async def run(self) -> None:
        """Trains until the last step, or until `stop`; either way a checkpoint of the last finished step is there."""
        for callback in self._callbacks:
            callback.on_run_start(self._settings.checkpoint_root.parent, self.steps_done + 1, self._settings.last_step)
        await self._publish()
        if self._verification is not None and self._settings.verification.prove_at_start:
            await self._verification.prove()
            await self._turns.to_engine()
        async with _alongside(self._bring_back_engines()):
            starts = not self._is_resumed and not self._stop.is_set()
            if starts and self._settings.eval_before_train and self._eval_rows:
                metrics = await self._evaluate()
                self._reporter.step(0, metrics | self._times.lap())
            async with _alongside(self._rollouts.run()):
                while self.steps_done < self._settings.last_step:
                    groups = await self._next_groups()
                    if groups is None:
                        break
                    await self._step(groups)
            # Only now: after a stop groups were under way, and an engine on shared devices goes to sleep for this.
            if self._settings.ckpt_interval > 0 or self._stop.is_set():
                await self._checkpoint()
            with self._times.phase("checkpoint"):
                await self._saver.finish()
            await self._turns.to_models()
        for callback in self._callbacks:
            callback.on_run_end(self.steps_done)

    async def _step(self, groups: list[FinishedGroup]) -> None:
        step = self.steps_done + 1
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch, merging = self._batch(trajectories)
        with self._times.phase("checkpoint"):
            await self._saver.poll()
        async with self._between_versions:
            self._reporter.phase("score")
            with self._times.phase("score"):
                await self._turns.to_models()
                batch = await self._update.score(batch)
            agreement = rollout_agreement(batch, version=self.steps_done)
            batch = self._selection.masked(batch, trajectories)
            batch, prepared = self._update.prepare(batch)
            self._reporter.phase("train")
            with self._times.phase("train"):
                trained = await self._update.train(batch, step)
            self.steps_done = step
            agreed = await self._publish()
        if not self._turns.are_shared:
            await self._buffer.published(step)

        metrics = _divided({**merging, **agreement, **prepared, **trained, **self._selection.lap()})
        metrics |= _rollout_metrics(groups, batch, version=step - 1) | self._rollouts.lap() | agreed
        for callback in self._callbacks:
            callback.on_groups(step, trajectories)
        self._reporter.train_samples(step, trajectories, batch)
        await self._finish_step(step, metrics)

    def _batch(self, trajectories: Sequence[Trajectory]) -> tuple[Batch, Metrics]:
        return merged(collate(trajectories)) if self._settings.merge_steps else (collate(trajectories), {})

    async def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        settings = self._settings
        is_last = step == settings.last_step
        if self._eval_rows and _is_due(step, settings.eval_interval, is_last):
            metrics |= await self._evaluate()
        control = self._ask_callbacks(step, metrics)
        if control.evaluate and self._eval_rows and "eval/reward" not in metrics:
            metrics |= await self._evaluate()
        if control.stop:
            self.stop()
        # The row is written before the checkpoint, so a checkpoint never lacks the row of its step; saving counts in
        # the next row.
        times = self._times.lap()
        tokens_per_second = {"tokens_per_second": metrics["rollout/tokens"] / times["time/step"]}
        self._reporter.step(step, metrics | tokens_per_second | times)
        if _is_due(step, settings.ckpt_interval, is_last) or control.save:
            await self._checkpoint()
        if settings.hf_save_interval > 0 and step % settings.hf_save_interval == 0:
            with self._times.phase("checkpoint"):
                await self._turns.to_models()
                await self._models.save_model(settings.export_root / f"step_{step:06d}")

    async def _next_groups(self) -> list[FinishedGroup] | None:
        """The groups of the next step; None when the run is to stop."""
        if self._stop.is_set():
            return None
        if self._turns.engine_sleeps:
            await self._publish()
        await self._buffer.published(self.steps_done)
        self._reporter.phase("generate")
        with self._times.phase("generate"):
            while True:
                taking = asyncio.create_task(self._buffer.take(self._settings.generation_timeout_s))
                stopping = asyncio.create_task(self._stop.wait())
                try:
                    await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    taking.cancel()
                    await asyncio.wait({taking})
                    # A batch that was taken all the same is trained on: no checkpoint would list its groups.
                    if taking.cancelled():
                        return None
                    groups = taking.result()
                    if self._selection.replaces_groups:
                        groups = self._selection.chosen(groups)
                finally:
                    for task in (taking, stopping):
                        task.cancel()
                if groups is not None:
                    return groups
                await self._buffer.rejected()

    async def _publish(self) -> dict[str, float]:
        self._reporter.phase("publish")
        with self._times.phase("publish"):
            await self._publish_weights()
            if self._verification is None:
                return {}
            agreed = await self._verification.after_sync(self.steps_done)
            await self._turns.to_engine()
            return agreed

    async def _publish_weights(self) -> None:
        """Once; again, to the engines that are left, where one was lost under way and broke the sync for all."""
        while True:
            num_receivers = self._num_receivers()
            try:
                async with self._turns.handover():
                    await publish_weights(
                        self._models.policy,
                        self._client,
                        self._transport,
                        self.steps_done,
                        max_bucket_bytes=self._settings.max_bucket_bytes,
                        num_engines=self._settings.num_engines,
                        pause_mode=self._settings.pause_mode,
                    )
                return
            except WeightSyncError as error:
                if self._num_receivers() >= num_receivers:
                    raise
                logger.warning("publishing again, because an engine was lost: %s", error)

    def _num_receivers(self) -> int:
        return self._client.num_weight_receivers() if isinstance(self._client, WeightReceivers) else 1

    async def _bring_back_engines(self) -> None:
        """Publishes the current version again whenever an engine that was started again needs it; ends with the run.

        It waits for the weights to be a whole version: while a step changes them, its own publishing serves as well.
        """
        if not isinstance(self._client, Recovering):
            return
        try:
            while True:
                await self._client.needs_weights()
                async with self._between_versions:
                    if self._client.lacks_weights:
                        await self._publish_weights()
                        if self._verification is not None:
                            await self._verification.probe(self.steps_done)
                            await self._turns.to_engine()
        except Exception as error:
            await self._buffer.fail(error)

    async def _evaluate(self) -> dict[str, float]:
        self._reporter.phase("evaluate")
        with self._times.phase("evaluate"):
            result: Evaluation = await evaluate(
                self._generator,
                self._eval_rows,
                self._eval_settings,
                version=self.steps_done,
                batch_size=self._settings.eval_batch_size,
                timeout_s=self._settings.generation_timeout_s,
            )
        self._reporter.eval_samples(self.steps_done, result.trajectories)
        for callback in self._callbacks:
            callback.on_evaluation(self.steps_done, result.metrics)
        return result.metrics

    async def _checkpoint(self) -> None:
        if self._saved_step == self.steps_done or self.steps_done == 0:
            return
        self._reporter.phase("checkpoint")
        state = RunState(
            step=self.steps_done,
            next_group=self._rollouts.next_group,
            restart_groups=tuple(sorted({*self._buffer.outstanding, *self._rollouts.pending_restarts()})),
            kl_coef=self._update.kl_coef,
            nonfinite_steps=self._update.nonfinite_steps,
            critic_nonfinite_steps=self._update.critic_nonfinite_steps,
        )
        with self._times.phase("checkpoint"):
            await self._turns.to_models()
            await self._saver.save(state)
        self._saved_step = self.steps_done

    def _checkpoint_completed(self, step: int, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(step, path)

    def _ask_callbacks(self, step: int, metrics: Mapping[str, float]) -> Control:
        answers = [callback.on_step_end(step, metrics) or Control() for callback in self._callbacks]
        return Control(
            save=any(answer.save for answer in answers),
            evaluate=any(answer.evaluate for answer in answers),
            stop=any(answer.stop for answer in answers),
        )


@contextlib.asynccontextmanager
async def _alongside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` as a task of its own until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _is_due(step: int, interval: int, is_last: bool) -> bool:
    return interval > 0 and (step % interval == 0 or is_last)


def _divided(metrics: Metrics) -> dict[str, float]:
    return {name: total / weight for name, (total, weight) in metrics.items() if weight}


def _rollout_metrics(groups: Sequence[FinishedGroup], batch: Batch, *, version: int) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    means = trajectory_means(trajectories)
    mean = means.pop("reward")
    spread = (sum((trajectory.reward - mean) ** 2 for trajectory in trajectories) / len(trajectories)) ** 0.5
    return {
        "reward/mean": mean,
        "reward/std": spread,
        "rollout/tokens": float(batch.num_tokens),
        "rollout/sampled_tokens": float(batch["sampled"].sum()),
        "rollout/response_length": means.pop("response_length"),
        "rollout/turns": sum(len(trajectory.turns) or len(trajectory.steps) for trajectory in trajectories)
        / len(trajectories),
        "rollout/cut": sum(trajectory.is_cut for trajectory in trajectories) / len(trajectories),
        "rollout/max_turns": sum(trajectory.end == "max_turns" for trajectory in trajectories) / len(trajectories),
        "rollout/staleness_max": float(max(version - group.start_version for group in groups)),
        "rollout/staleness_mean": sum(version - group.start_version for group in groups) / len(groups),
        **{f"environment/{name}": value for name, value in means.items()},
    }
