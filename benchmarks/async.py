"""Asynchronous generation in virtual time, for several pipeline depths, staleness bounds and scheduling rules.

The real loop, buffer and rollouts run with simulated engines and a simulated trainer. The engines generate 10,000
prompts × 8 samples in 1,000 slots, each for one sample at a time. A sample takes 25 s on average (log-normal, at most
150 s). One group in 100 waits for its environment for 250 s, one sample in 1,000 is lost with its engine and generated
again, and one group in 200 fails and is replaced. A step scores and trains 500 prompts in 90 s, a weight sync takes
5 s, and fully busy engines need 100 s for the 500 prompts of a step. Every row of the output uses the same groups.

Printed for each depth and bound, and for two scheduling rules of other projects:

    time      duration of the run, divided by the time that the slower side needs for 10,000 prompts if it never waits;
              the two sides are the engines, and the trainer with its weight syncs
    arrivals  duration of all steps, divided by a lower bound that follows from the times at which their groups finish:
              if n groups of a step finish at time t or later, the step cannot end before t + n · (scoring and training
              of one group) + one weight sync. A step's bound is the latest of these ends, for all t since the previous
              step ended. In rows that are not streamed, the excess over 1 is an upper bound on what streaming could
              save
    idle      share of the run's time in which the trainer waits for groups; share of the slots' time in which they
              generate nothing
    age       policy versions between a group's start and its training: mean, share of groups above one, maximum
    wasted    groups that finished but were not trained on, as a share of all groups that finished without failing

Rows marked as streamed train groups as they finish (`trainer.stream_groups`). There, a batch is scored and trained in
parts. A part needs one call for scoring and one for training; a call takes the part's share of the whole batch's time,
and 0.25 s more.

The rate rule keeps at most (bound + 1) batches of groups under way: in generation, waiting or in training. It trains
groups in the order in which they finish, so only the average age keeps to the bound. The rule "drop by age" does not
count the batch in training. When a step begins, it drops every group that is older than the bound.

    PYTHONPATH=. python benchmarks/async.py [--most 8] [--seed 0] [--streamed]      (about four minutes of one core)
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rl_core.batch import Batch
from rl_core.interfaces import Generator, GroupRequest, Metrics, SamplingParams, Trajectory, TrajectoryStep
from rl_core.trainer.groups import DataRow, FinishedGroup, PromptSource
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.failures import logger as failures
from rl_core.trainer.loop.group_selection import Selection
from rl_core.trainer.loop.rollouts import Rollouts, RolloutSettings
from rl_core.trainer.loop.training_loop import LoopSettings, TrainingLoop
from rl_core.trainer.update.models import Models
from tests.core.scripted_run import EventLog, Script, ScriptedPolicy
from tests.core.virtual_time import run_virtually, virtual_now

PROMPTS, SAMPLES, GROUPS_PER_STEP = 10_000, 8, 500
SLOTS = 1_000
MEAN_S, SPREAD, LONGEST_S = 25.0, 0.8, 150.0
STRAGGLERS, STRAGGLER_S, LOST, FAILED = 0.01, 250.0, 0.001, 0.005
SCORE_S, TRAIN_S, SYNC_S, CALL_S = 15.0, 75.0, 5.0, 0.25
STEPS = PROMPTS // GROUPS_PER_STEP


@attrs.frozen(kw_only=True)
class Play:
    """The simulated course of one group, the same under every rule."""

    seconds: tuple[float, ...]
    """Seconds for which each sample occupies a slot."""
    waits_s: float
    """Seconds for which the group waits for its environment after its last sample."""
    fails: bool


def play_of(seed: int, group: int) -> Play:
    """The random course of a group; it depends only on the seed and the group's number."""
    dice = np.random.default_rng([seed, group])
    lengths = np.minimum(MEAN_S * np.exp(SPREAD * dice.standard_normal(SAMPLES) - SPREAD**2 / 2), LONGEST_S)
    lengths = np.where(dice.random(SAMPLES) < LOST, 2 * lengths, lengths)
    straggles, fails = dice.random(2) < (STRAGGLERS, FAILED)
    return Play(seconds=tuple(lengths.tolist()), waits_s=STRAGGLER_S * float(straggles), fails=bool(fails))


class Engines:
    """Simulated `Engines`: slots fill in the order of requests, and a sync freezes them."""

    is_sampled_from = True
    are_shared = False
    are_asleep = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._free_at = [0.0] * SLOTS
        self._frozen_s = 0.0
        self._frozen_since: float | None = None
        self._serves = asyncio.Event()
        self._version = 0
        self.busy_s = 0.0
        self.finished: dict[int, float] = {}
        """Virtual second at which each group finished; failed groups are left out."""

    def _now(self) -> float:
        """The engines' own time, which stops while they are frozen."""
        frozen = virtual_now() - self._frozen_since if self._frozen_since is not None else 0.0
        return virtual_now() - self._frozen_s - frozen

    async def publish(self, version: int) -> dict[str, float]:
        self._serves.clear()
        self._frozen_since = virtual_now()
        await asyncio.sleep(SYNC_S)
        self._frozen_s += virtual_now() - self._frozen_since
        self._frozen_since = None
        self._version = version
        self._serves.set()
        return {}

    def played_s(self) -> float:
        """Slot seconds that were spent on samples so far."""
        return self.busy_s - sum(max(free_at - self._now(), 0.0) for free_at in self._free_at)

    def idle_lap(self) -> dict[str, float]:
        return {}

    async def prove(self) -> None: ...

    async def bring_back(self, version: Callable[[], int], between_versions: asyncio.Lock) -> None: ...

    async def to_models(self) -> None: ...

    async def play(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Waits as long as the group takes and returns one trajectory for all of its samples."""
        play, now, ends = play_of(self._seed, request.group_id), self._now(), 0.0
        for seconds in play.seconds:
            end = max(heapq.heappop(self._free_at), now) + seconds
            heapq.heappush(self._free_at, end)
            ends = max(ends, end)
        self.busy_s += sum(play.seconds)
        while (left := ends - self._now()) > 1e-6:
            await asyncio.sleep(left)
            await self._serves.wait()
        await asyncio.sleep(play.waits_s)
        if not play.fails:
            self.finished[request.group_id] = virtual_now()
        step = TrajectoryStep(
            tokens=[1, 2],
            sampled=[False, True],
            rollout_logprobs=[0.0, -1.0],
            policy_version=[-1, self._version],
            reward=0.0,
            stop_reason="stop",
        )
        return (
            Trajectory(
                group_id=request.group_id,
                sample_index=0,
                steps=() if play.fails else (step,),
                prompt_text="",
                response_text="",
                start_version=request.start_version,
                failure="the environment is gone" if play.fails else None,
            ),
        )


class Episodes(Generator):
    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def prompt_length(self, row: object) -> int:
        return 1

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return await self._engines.play(request)


class Update:
    """Simulated trainer: waits as long as scoring and training take."""

    kl_coef = 0.0
    nonfinite_steps = 0
    critic_nonfinite_steps = 0

    async def score(self, batch: Batch) -> Batch:
        await asyncio.sleep(_share(batch, SCORE_S))
        return batch.with_columns(old_logprobs=batch["rollout_logprobs"])

    def prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        return batch, {}

    async def train(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        await asyncio.sleep(TRAIN_S)
        return batch, {}

    async def add(self, batch: Batch, step: int) -> Batch:
        await asyncio.sleep(_share(batch, TRAIN_S))
        return batch

    async def finish(self, step: int) -> Metrics:
        return {}

    def observed(self, batch: Batch, metrics: Metrics) -> Metrics:
        return {}

    def agreement(self, batch: Batch, version: int) -> Metrics:
        return {}


def _share(batch: Batch, seconds: float) -> float:
    """Seconds for this part of a batch: its share of `seconds`, and `CALL_S` if it is not the whole batch."""
    share = batch.num_sequences / GROUPS_PER_STEP
    return seconds if share == 1.0 else seconds * share + CALL_S


class RateRule(GroupBuffer):
    """Takes the groups that finished first, even if others then exceed the bound."""

    def _choice(self) -> list[FinishedGroup]:
        first = [*self._finished.values()][: self._groups_per_step]
        return first if len(first) == self._groups_per_step else []


class DropByAge(RateRule):
    """Drops every group, finished or not, that is too old for the next step."""

    def _has_room(self) -> bool:
        return (
            self._next_step <= self._last_version
            and len(self._outstanding) < (self._max_staleness + 1) * self._groups_per_step
        )

    async def finish(self, group_id: int, trajectories: tuple[Trajectory, ...]) -> None:
        if group_id in self._outstanding:
            await super().finish(group_id, trajectories)

    async def drop(self, group_id: int) -> None:
        if group_id in self._outstanding:
            await super().drop(group_id)

    async def published(self, version: int) -> None:
        oldest = self._next_step - self._max_staleness
        for group_id in [group for group, started in self._outstanding.items() if started < oldest]:
            del self._outstanding[group_id]
            self._finished.pop(group_id, None)
        await super().published(version)


class Rows:
    """A reporter that records each step's metrics and the time at which it ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        """`at` is the virtual time at which the step ended."""
        self.groups: list[list[int]] = []

    def phase(self, name: str) -> None: ...

    def step(self, step: int, metrics: Any) -> None:
        self.rows.append({**metrics, "at": virtual_now()})

    def train_samples(self, step: int, trajectories: Sequence[Trajectory], batch: Batch) -> None:
        self.groups.append([trajectory.group_id for trajectory in trajectories])

    def failed_samples(self, step: int, trajectories: Sequence[Trajectory], *, purpose: str = "train") -> None: ...

    def eval_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...


@attrs.frozen(kw_only=True)
class Measured:
    """What one simulated run measured; the module's docstring defines the columns."""

    time: float
    arrivals: float
    trainer_idle: float
    slots_idle: float
    age: float
    older: float
    oldest: float
    wasted: float


def simulate(
    *, depth: int, bound: int, buffer_class: type[GroupBuffer] = GroupBuffer, streams: bool = False, seed: int = 0
) -> Measured:
    """Simulates one run."""
    engines, rows = Engines(seed), Rows()

    async def work() -> tuple[float, float]:
        buffer = buffer_class(
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=bound,
            pipeline_depth=depth,
            version=0,
            last_version=STEPS - 1,
            in_parts=streams,
        )
        settings = RolloutSettings(
            num_samples=1, params=SamplingParams(), seed=0, drop_zero_variance=False, max_dropped_groups=PROMPTS
        )
        parts: dict[str, Any] = {
            "models": Models(policy=ScriptedPolicy(EventLog({}), Script())),  # pyright: ignore[reportArgumentType]
            "update": Update(),
            "rollouts": Rollouts(
                Episodes(engines),
                PromptSource([DataRow({"prompt": "?"}, "train:1")], seed=0, shuffle=False),
                buffer,
                settings,
                next_group=0,
                restart_groups=(),
                clock=virtual_now,
            ),
            "selection": Selection(
                min_replace_ratio=None, max_rejected_batches=1, mask_zero_variance=False, mask_overlong=False, seed=0
            ),
        }
        with tempfile.TemporaryDirectory() as directory:
            loop = TrainingLoop(
                loop_settings(Path(directory), streams=streams),
                **parts,
                buffer=buffer,
                generator=Episodes(engines),
                engines=engines,
                eval_rows=(),
                eval_settings=settings,
                reporter=rows,
                callbacks=(),
                steps_done=0,
                clock=virtual_now,
            )
            await loop.run()
        return virtual_now(), engines.played_s()

    ended, played_s = run_virtually(work())
    useful_s = sum(sum(play_of(seed, group).seconds) for group in range(PROMPTS))
    needed = max(useful_s / SLOTS, STEPS * (SCORE_S + TRAIN_S + SYNC_S))
    ages = np.array([[row.get(f"rollout/staleness/{age}", 0.0) for age in range(bound + 1)] for row in rows.rows])
    mean_age = sum(row["rollout/staleness_mean"] for row in rows.rows) / STEPS
    return Measured(
        time=ended / needed,
        arrivals=(ended - SYNC_S) / arrivals_bound(rows, engines.finished),
        trainer_idle=sum(row["time/generate"] for row in rows.rows) / ended,
        slots_idle=1 - played_s / (SLOTS * ended),
        age=mean_age,
        older=1 - ages[:, :2].sum() / STEPS,
        oldest=max(row["rollout/staleness_max"] for row in rows.rows),
        wasted=1 - PROMPTS / len(engines.finished),
    )


def arrivals_bound(rows: Rows, finished: dict[int, float]) -> float:
    """Lower bound on the steps' total seconds, computed from the times at which their groups finished."""
    each, begins, total = (SCORE_S + TRAIN_S) / GROUPS_PER_STEP, SYNC_S, 0.0
    for row, groups in zip(rows.rows, rows.groups, strict=True):
        latest_first = sorted((finished[group] for group in groups), reverse=True)
        ends = max(max(at, begins) + each * (number + 1) for number, at in enumerate(latest_first))
        total += ends + SYNC_S - begins
        begins = row["at"]
    return total


def loop_settings(directory: Path, *, streams: bool) -> LoopSettings:
    """Settings of a loop that only trains: no evaluation, checkpoint or export."""
    return LoopSettings(
        last_step=STEPS,
        eval_interval=-1,
        eval_before_train=False,
        eval_batch_size=1,
        ckpt_interval=-1,
        max_ckpts_to_keep=-1,
        hf_save_interval=-1,
        run_dir=directory,
        checkpoint_root=directory / "checkpoints",
        export_root=directory / "exports",
        generation_timeout_s=1e9,
        worker_timeout_s=1e9,
        saves_in_background=False,
        merge_steps=False,
        stream_groups=streams,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--most", type=int, default=8, help="largest depth and bound")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streamed", action="store_true", help="only the streamed rows")
    options = parser.parse_args()
    failures.setLevel("ERROR")
    print("| rule | depth | bound | time | arrivals | idle: trainer | slots | age: mean | > 1 | largest | wasted |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    bounds = range(options.most + 1)
    streamed = [("streamed", *cell, GroupBuffer) for cell in ((0, 0), (1, 1), (1, 4), (2, 4), (4, 4))]
    cells = [cell for cell in streamed if cell[2] <= options.most]
    if not options.streamed:
        cells += [("ours", depth, bound, GroupBuffer) for depth in bounds for bound in bounds if depth <= bound]
        cells += [("rate", bound, bound, RateRule) for bound in bounds]
        cells += [("drop by age", bound, bound, DropByAge) for bound in bounds]
    for rule, depth, bound, buffer_class in cells:
        found = simulate(
            depth=depth, bound=bound, buffer_class=buffer_class, streams=rule == "streamed", seed=options.seed
        )
        times = f"{found.time:.2f} | {found.arrivals:.2f} | {found.trainer_idle:.0%} | {found.slots_idle:.0%}"
        ages = f"{found.age:.2f} | {found.older:.0%} | {found.oldest:.0f}"
        print(f"| {rule} | {depth} | {bound} | {times} | {ages} | {found.wasted:.1%} |", flush=True)


if __name__ == "__main__":
    main()
