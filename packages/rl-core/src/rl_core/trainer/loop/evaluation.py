"""Plays rows with one policy version, and evaluates the version on the held-out rows."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import attrs

from rl_core.errors import DeadlineError, GenerationError
from rl_core.interfaces import Generator, Trajectory
from rl_core.tasks import first_error
from rl_core.trainer.groups import DataRow
from rl_core.trainer.loop.failures import FailureAccount
from rl_core.trainer.loop.rollouts import RolloutSettings, generate_group, group_request


@attrs.frozen(kw_only=True, eq=False)
class Evaluation:
    """The results of one evaluation of the policy on held-out prompts."""

    metrics: dict[str, float]
    """`eval/reward`, `eval/<environment metric>` and `eval/response_length` are means over samples that did not fail.
    `eval/failed` and `eval/failed/<kind>` count the samples that failed."""
    trajectories: tuple[Trajectory, ...]


async def evaluate(
    generator: Generator,
    rows: Sequence[DataRow],
    settings: RolloutSettings,
    *,
    version: int,
    batch_size: int,
    timeout_s: float,
    failures: FailureAccount | None = None,
) -> Evaluation:
    """Plays every row (`play_rows`), and returns the samples and their mean metrics. Raises the errors of `play_rows`,
    and GenerationError if all samples failed."""
    failures = failures or evaluation_failures(rows, settings)
    trajectories = await play_rows(
        generator, rows, settings, version=version, batch_size=batch_size, timeout_s=timeout_s, failures=failures
    )
    good = [trajectory for trajectory in trajectories if trajectory.failure is None]
    if not good:
        raise GenerationError(
            f"evaluation: all {len(trajectories)} samples failed; the first: {trajectories[0].failure}"
        )
    metrics = {f"eval/{name}": value for name, value in trajectory_means(good).items()}
    return Evaluation(metrics=metrics | failures.lap()[0], trajectories=trajectories)


async def play_rows(
    generator: Generator,
    rows: Sequence[DataRow],
    settings: RolloutSettings,
    *,
    version: int,
    batch_size: int,
    timeout_s: float,
    failures: FailureAccount | None = None,
    finished: dict[int, tuple[Trajectory, ...]] | None = None,
) -> tuple[Trajectory, ...]:
    """Plays every row `settings.num_samples` times. Returns the samples in the order of the rows; a sample's `group_id`
    is the index of its row.

    Args:
        version: the policy version that the engines serve.
        batch_size: largest number of rows in flight at a time.
        timeout_s: deadline for all rows together.
        failures: account that records failed samples, so that the caller knows them even if this call raises. None: a
            new account.
        finished: dictionary that gets the samples of each finished row, under the row's index, so that the caller has
            them even if this call raises. None: a new dictionary.

    Raises:
        GenerationError: more samples failed than `settings.max_failure_rate` allows, or the generator's answer does not
            match the request.
        DeadlineError: not all rows were played in time.
    """
    room = asyncio.Semaphore(batch_size)
    failures = failures or evaluation_failures(rows, settings)
    played = {} if finished is None else finished

    async def play(number: int, row: DataRow) -> None:
        async with room:
            trajectories = await generate_group(generator, group_request(row, number, version, settings))
        played[number] = trajectories
        failures.add(trajectories)

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as playing:
            for number, row in enumerate(rows):
                playing.create_task(play(number, row))
    except TimeoutError as error:
        raise DeadlineError(
            f"not all of {len(rows)} rows were played within {timeout_s:g} s (trainer.generation_timeout_s)"
        ) from error
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return tuple(trajectory for number in range(len(rows)) for trajectory in played[number])


def evaluation_failures(rows: Sequence[DataRow], settings: RolloutSettings) -> FailureAccount:
    """Creates the account that records the failed samples of one evaluation."""
    return FailureAccount("eval", max_rate=settings.max_failure_rate, num_expected=len(rows) * settings.num_samples)


def trajectory_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Computes means over trajectories: `reward`, `response_length` (sampled tokens), and each environment metric. The
    mean of an environment metric is over the trajectories that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        values["reward"].append(trajectory.reward)
        values["response_length"].append(sum(sum(step.sampled) for step in trajectory.steps))
        for name, value in trajectory.metrics.items():
            values[name].append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
