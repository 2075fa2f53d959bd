"""Runs the generating task, which starts groups as soon as the buffer allows and adds usable results to the buffer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

import attrs

from rl_core.errors import GenerationError
from rl_core.interfaces import Generator, GroupRequest, SamplingParams, Trajectory
from rl_core.tasks import IdleTime, all_of, code_of, first_error
from rl_core.trainer.groups import DataRow, FinishedGroup, PromptSource
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.failures import FailureAccount
from rl_core.trainer.loop.group_selection import has_zero_variance
from rl_core.trainer.state.recorded_answers import GroupAnswers
from rl_core.trainer.state.stored_groups import StartedGroup, StoredGroup

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""Longest wait for the answers of aborted requests, in seconds. A request that moved to another server meanwhile is not
aborted and may take longer."""


@attrs.frozen(kw_only=True)
class RolloutSettings:
    """Settings for playing prompts: sampling, which groups are dropped, and how many failures are accepted."""

    num_samples: int
    params: SamplingParams
    seed: int
    drop_zero_variance: bool
    """Whether to drop a group whose samples all have the same reward, and play another (dynamic sampling)."""
    max_dropped_groups: int
    """The run stops if more than this many groups in a row are dropped."""
    limit_rule: str = "one batch"
    """How `max_dropped_groups` was determined, for the error message."""
    plays_greedy: bool = False
    """Whether to also play a greedy answer to each prompt. Its reward is a baseline; the answer is not trained on."""
    max_failure_rate: float = 1.0
    """Largest fraction of samples that may fail. If more fail, the run stops."""
    samples_per_step: int = 1
    """`max_failure_rate` is a fraction of this number of samples or of the number of samples that have ended since the
    last step, whichever is larger."""


class Rollouts:
    """Plays the prompts of a source, and puts the finished groups into the buffer.

    consumes     rows of `source`, in the order of group numbers
    produces     finished groups in `buffer`; for checkpoints, the answers so far of groups in progress (`started`)
    waits for    the buffer's permission to start a group, then the generator
    unblocked by the training task taking groups and publishing versions
    """

    def __init__(
        self,
        generator: Generator,
        source: PromptSource,
        buffer: GroupBuffer,
        settings: RolloutSettings,
        *,
        next_group: int,
        restart_groups: Sequence[int],
        stored: Sequence[StoredGroup] = (),
        started: Sequence[StartedGroup] = (),
        abort: Callable[[Sequence[str]], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            restart_groups: groups of an earlier run that are played again.
            stored: finished groups of an earlier run, which are already in the buffer.
            started: groups of an earlier run that were in progress, and are continued.
            abort: `InferenceClient.abort` of the engine that `generator` uses through a `RecordingSampler`; None:
                `collect_answers` does nothing.
        """
        self._generator = generator
        self._source = source
        self._buffer = buffer
        self._settings = settings
        self._restart = deque(restart_groups)
        self._abort = abort
        self._in_progress = {one.group_id: GroupAnswers(one.start_version, recorded=one.answers) for one in started}
        self.next_group = next_group
        self._dropped_in_a_row = 0
        self._dropped: dict[int, str] = {}
        """Dropped group → reason."""
        self._discarded_tokens: Counter[int] = Counter()
        """Group → number of tokens that were sampled but not trained on."""
        self._idle = IdleTime(clock)
        self._greedy_tokens: Counter[int] = Counter()
        """Group → number of tokens of its greedy answer."""
        self._failures = FailureAccount(
            "rollout", max_rate=settings.max_failure_rate, num_expected=settings.samples_per_step
        )
        for one in stored:
            self._failures.restore([*one.group.trajectories, *one.failed])
            self._greedy_tokens[one.group.group_id] = one.greedy_tokens

    async def run(self) -> None:
        """Plays groups until no step needs another one. An error is passed to the buffer, whose `take` raises it."""
        try:
            async with asyncio.TaskGroup() as playing:
                for group_id, answers in self._in_progress.items():
                    playing.create_task(self._play(group_id, answers))
                while True:
                    group_id = self._restart[0] if self._restart else self.next_group
                    start_version = await self._buffer.permission(group_id)
                    if start_version is None:
                        return
                    # Only now, so that a checkpoint written during the wait still counts this group as not started.
                    if self._restart:
                        self._restart.popleft()
                    else:
                        self.next_group += 1
                    answers = self._in_progress[group_id] = GroupAnswers(start_version)
                    playing.create_task(self._play(group_id, answers))
        except ExceptionGroup as errors:
            await self._buffer.fail(first_error(errors))

    def pending_restarts(self) -> tuple[int, ...]:
        """Groups of an earlier run that have not been restarted yet."""
        return tuple(self._restart)

    def stored(self) -> tuple[StoredGroup, ...]:
        """The buffer's finished groups that no step has trained on, with their counts for later metrics. Empty if
        generation does not run ahead: such a run, when resumed, plays all groups of its next step again, and thus
        repeats itself bit for bit."""
        if not self._buffer.runs_ahead:
            return ()
        failed: dict[int, list[Trajectory]] = {}
        for one in self._failures.pending:
            failed.setdefault(one.group_id, []).append(one)
        return tuple(
            StoredGroup(
                group=group,
                failed=tuple(failed.get(group.group_id, ())),
                greedy_tokens=self._greedy_tokens[group.group_id],
            )
            for group in self._buffer.untrained
        )

    async def collect_answers(self) -> None:
        """Aborts the running requests, so that the engines return the tokens sampled so far, which `started` then
        includes. The generator continues these responses in new requests. If aborting fails or takes too long, the
        checkpoint lacks some tokens."""
        running = {name: done for answers in self._in_progress.values() for name, done in answers.running.items()}
        if self._abort is None or not running or not self._buffer.runs_ahead:
            return
        try:
            with code_of("aborting requests for a checkpoint: the engine client"):
                await self._abort([*running])
        except Exception as error:  # engine clients may raise anything; the run continues without these tokens
            logger.warning("the next checkpoint may lack tokens of groups in progress: %s", error)
            return
        _, late = await asyncio.wait(running.values(), timeout=_ANSWER_S)
        if late:
            logger.warning(
                "the next checkpoint lacks the tokens of %d requests: they did not end within %g s of being aborted",
                len(late),
                _ANSWER_S,
            )

    def started(self) -> tuple[StartedGroup, ...]:
        """The groups in progress for which tokens have been sampled. Empty if generation does not run ahead, for the
        reason given at `stored`."""
        if not self._buffer.runs_ahead:
            return ()
        return tuple(
            StartedGroup(group_id=group_id, start_version=answers.start_version, answers=answers.so_far)
            for group_id, answers in self._in_progress.items()
            if answers.so_far
        )

    def lap(self) -> tuple[dict[str, float], tuple[Trajectory, ...]]:
        """Returns metrics since the last call, and the failed samples. The metrics count dropped groups by reason,
        tokens of dropped or discarded groups, failed samples by kind, and tokens of greedy answers. Outstanding groups
        count only in the step that accounts for them, because a resumed run would play them again."""
        later = set(self._buffer.outstanding)
        dropped = Counter(reason for group, reason in self._dropped.items() if group not in later)
        self._dropped = {group: reason for group, reason in self._dropped.items() if group in later}
        counts = {f"rollout/{reason}": float(dropped[reason]) for reason in ("dropped_failed", "dropped_zero_variance")}
        counts["rollout/discarded_tokens"] = _popped(self._discarded_tokens, later)
        if self._settings.plays_greedy:
            counts["rollout/greedy_tokens"] = _popped(self._greedy_tokens, later)
        failed_counts, failed = self._failures.lap(later=later)
        return counts | failed_counts, failed

    def idle_lap(self) -> float:
        """Seconds since the last call during which no group was being played."""
        return self._idle.lap()

    def discard(self, groups: Iterable[FinishedGroup]) -> None:
        """Counts the tokens of these finished groups, which are not trained on, as discarded."""
        for group in groups:
            self._discarded_tokens[group.group_id] += num_sampled(group.trajectories)

    def failed(self) -> tuple[Trajectory, ...]:
        """All failed samples that no `lap` has returned yet, including those of outstanding groups. A later `lap` still
        returns them."""
        return self._failures.pending

    async def _play(self, group_id: int, answers: GroupAnswers) -> None:
        row = self._source.row(group_id)
        request = group_request(row, group_id, answers.start_version, self._settings)
        baselines = [greedy_request(request)] if self._settings.plays_greedy else []
        with self._idle.busy(), answers.recording():
            trajectories, *baseline = await all_of(
                generate_group(self._generator, one) for one in (request, *baselines)
            )
        greedy = baseline[0][0] if baseline else None
        usable = tuple(trajectory for trajectory in trajectories if trajectory.failure is None)
        self._failures.add(trajectories if greedy is None else [*trajectories, greedy])
        if greedy is not None:
            self._greedy_tokens[group_id] = num_sampled([greedy])
            usable = tuple(attrs.evolve(trajectory, greedy_reward=greedy.reward) for trajectory in usable)
        if greedy is not None and greedy.failure is not None:
            await self._drop(group_id, usable, "dropped_failed", f"its greedy answer: {greedy.failure}")
        elif not usable:
            await self._drop(group_id, usable, "dropped_failed", trajectories[0].failure or "")
        elif self._settings.drop_zero_variance and has_zero_variance(usable):
            await self._drop(group_id, usable, "dropped_zero_variance", "all its samples had the same reward")
        else:
            self._dropped_in_a_row = 0
            await self._buffer.finish(group_id, usable)
        del self._in_progress[group_id]

    async def _drop(self, group_id: int, sampled: Sequence[Trajectory], reason: str, text: str) -> None:
        self._dropped[group_id] = reason
        self._discarded_tokens[group_id] += num_sampled(sampled)
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row > self._settings.max_dropped_groups:
            raise GenerationError(
                f"{self._dropped_in_a_row} groups in a row gave nothing to train on, and the limit is "
                f"{self._settings.max_dropped_groups} ({self._settings.limit_rule}); the last one (group "
                f"{group_id}): {text}"
            )
        await self._buffer.drop(group_id)


def num_sampled(trajectories: Iterable[Trajectory]) -> int:
    """Number of tokens that the policy sampled in these trajectories."""
    return sum(sum(step.sampled) for trajectory in trajectories for step in trajectory.steps)


def _popped(count_of_group: Counter[int], later: set[int]) -> float:
    """Removes the groups that are not in `later`, and returns the sum of their counts."""
    return float(sum(count_of_group.pop(group) for group in [*count_of_group] if group not in later))


async def generate_group(generator: Generator, request: GroupRequest) -> tuple[Trajectory, ...]:
    """Plays a group and returns its trajectories. Raises GenerationError if they do not match the request, or if a
    trajectory has both steps and a failure, or neither."""
    with code_of(f"{request.row_place}: the generator {type(generator).__name__}"):
        trajectories = await generator.generate(request)
    asked = [(request.group_id, index) for index in range(request.num_samples)]
    answered = [(trajectory.group_id, trajectory.sample_index) for trajectory in trajectories]
    if answered != asked:
        raise GenerationError(
            f"{request.row_place}: the generator {type(generator).__name__} must return {request.num_samples} "
            f"samples of group {request.group_id}, in order; got (group, sample) {answered}"
        )
    for trajectory in trajectories:
        if bool(trajectory.steps) == (trajectory.failure is not None):
            raise GenerationError(
                f"{request.row_place}: the generator {type(generator).__name__} returned sample "
                f"{trajectory.sample_index} with {len(trajectory.steps)} steps and failure {trajectory.failure!r}; "
                "expected either steps or a failure"
            )
    return trajectories


def group_request(row: DataRow, group_id: int, start_version: int, settings: RolloutSettings) -> GroupRequest:
    """The request for the `settings.num_samples` samples of a row's prompt."""
    return GroupRequest(
        group_id=group_id,
        row=row.row,
        row_place=row.place,
        num_samples=settings.num_samples,
        params=settings.params,
        seed=settings.seed,
        start_version=start_version,
    )


def greedy_request(request: GroupRequest) -> GroupRequest:
    """A request for one greedy answer to the same prompt."""
    return attrs.evolve(request, num_samples=1, params=attrs.evolve(request.params, temperature=0.0))
