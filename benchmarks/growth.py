"""The controller's time in a step as the batch grows, and its share of a step of a 20M-parameter model.

Each prompt has 16 samples, and half of every sequence is prompt. The controller does all its work: collating,
planning, two optimizer steps, advantages, loss weights, metrics and the rows of `samples.jsonl`. The one rank selects
its part of the batch and computes nothing. Times are processor seconds of one thread.

A rank's time is extrapolated from a forward and backward pass over a few sequences of the same length, in groups whose
shared prompt is computed once. The printed share assumes one rank on a core as slow as this one; with more or faster
ranks, the share is larger.

Run: python benchmarks/growth.py [--shape 1000x16 …] [--no-ranks]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from rl_core.batch import Batch
from rl_core.config import Config, from_mapping
from rl_core.interfaces import LossSpec, RankInfo, Trajectory, TrajectoryStep
from rl_core.layout.mesh import Mesh
from rl_core.reports.samples import sample_of
from rl_core.trainer.before.settings import update_settings, worker_spec
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.step_metrics import divided, rollout_metrics
from rl_core.trainer.update.batch_update import BatchUpdate
from rl_core.trainer.update.collate import collate, merged
from rl_core.trainer.update.models import Models
from rl_core.workers import WorkerGroup
from rl_core.workers.devices import SharedDevices, Tenant
from rl_core.workers.rank import Abilities
from rl_transformers.testing.models import make_checkpoint

NUM_SAMPLES, NUM_UPDATES = 16, 2
MEASURED_TOKENS = 8192
"""Approximate number of tokens on which a rank's speed is measured."""
SHAPES = ("1000x16", "10000x16", "100000x16", "1000x1024", "1000x8192")
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}


def main() -> None:
    """Prints the controller's seconds by part, for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape",
        action="append",
        help="number of sequences, rounded down to whole groups, x tokens per sequence, such as 1000x16",
    )
    parser.add_argument("--no-ranks", action="store_true", help="do not measure the time of a rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory) / "model", **MODEL)
        for shape in args.shape or SHAPES:
            wanted, length = map(int, shape.split("x"))
            num_groups = wanted // NUM_SAMPLES
            num_sequences = num_groups * NUM_SAMPLES
            config, groups = config_of(path, num_groups), played(num_groups, length)
            seconds = controller_seconds(config, groups)
            total = sum(seconds.values())
            each = total / num_sequences * 1e6
            print(f"\n{num_sequences} sequences of {length} tokens: {total:.3f} s, {each:.1f} µs each", flush=True)
            for name, value in seconds.items():
                print(f"{name:40s} {value:8.3f}")
            if not args.no_ranks:
                computed = NUM_UPDATES * num_sequences * rank_seconds(config, groups[0])
                print(
                    f"{'a rank, extrapolated':40s} {computed:8.1f}   share {total / (total + computed):.2%} (goal 3 %)"
                )


def config_of(path: Path, num_groups: int) -> Config:
    """A GRPO configuration with two updates per batch."""
    return from_mapping(
        {
            "trainer.policy.model.path": str(path),
            "trainer.policy.optimizer_config.lr": 1e-6,
            "trainer.bf16": False,
            "trainer.gradient_checkpointing": False,
            "trainer.num_threads": 1,
            "trainer.train_batch_size": num_groups,
            "trainer.policy_mini_batch_size": num_groups,
            "trainer.update_epochs_per_batch": NUM_UPDATES,
            "trainer.max_tokens_per_microbatch": 16384,
            "generator.n_samples_per_prompt": NUM_SAMPLES,
        }
    )


def played(num_groups: int, length: int) -> list[FinishedGroup]:
    """Groups of random tokens; the first half of a sequence is its prompt."""
    numbers, count = random.Random(0), length // 2
    groups = []
    for group in range(num_groups):
        prompt = numbers.choices(range(100, 8192), k=count)
        trajectories = []
        for sample in range(NUM_SAMPLES):
            answer = numbers.choices(range(100, 8192), k=length - count)
            step = TrajectoryStep(
                tokens=[*prompt, *answer],
                sampled=[False] * count + [True] * len(answer),
                rollout_logprobs=[0.0] * count + [-numbers.random() for _ in answer],
                policy_version=[-1] * count + [0] * len(answer),
                reward=float(numbers.random() < 0.3),
                stop_reason="stop",
            )
            trajectories.append(
                Trajectory(
                    group_id=group,
                    sample_index=sample,
                    steps=(step,),
                    prompt_text="",
                    response_text="",
                    start_version=0,
                )
            )
        groups.append(FinishedGroup(group_id=group, start_version=0, trajectories=tuple(trajectories)))
    return groups


class NoRanks:
    """A `Ranks` implementation with one rank that selects its part of the batch and computes nothing."""

    abilities = Abilities()

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        from rl_core.interfaces import OptimizerStep

        return [OptimizerStep(grad_norm=1.0, learning_rate=1e-6, skipped=False)]

    async def call_on_parts(self, method: Any, batch: Batch, parts: Any, *args: Any, **kwargs: Any) -> list[Any]:
        taken = batch.select(torch.from_numpy(parts[0].sent))
        scores = {name: torch.zeros(taken.num_tokens) for name in kwargs.get("returns") or ()}
        return [{"loss": (0.0, 1.0), **scores}]

    async def close(self) -> None:
        pass


def controller_seconds(config: Config, groups: list[FinishedGroup]) -> dict[str, float]:
    """Seconds of each part of the second step; the first one warms up."""
    ranks, mesh, devices = NoRanks(), Mesh(world_size=1), SharedDevices()
    policy = WorkerGroup(ranks, mesh, (1, 1), devices, Tenant(ranks), share_prefixes=True)
    update = BatchUpdate(update_settings(config), Models(policy=policy), kl_coef=0.0)
    # As in the training loop, the garbage collector skips all existing objects.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(step_seconds(update, groups))
        return asyncio.run(step_seconds(update, groups))
    finally:
        gc.unfreeze()


async def step_seconds(update: BatchUpdate, groups: list[FinishedGroup]) -> dict[str, float]:
    """Runs the controller's part of a step on these groups; returns the seconds of each phase."""
    seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[name] += time.process_time() - began

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    with phase("collate, merge steps"):
        batch, _ = merged(collate(trajectories))
    with phase("advantages, agreement"):
        batch = await update.score(batch)
        batch, prepared = update.prepare(batch)
    with phase("mini-batches, weights, plan, dispatch"):
        batch, trained = await update.train(batch, 2)
    with phase("advantages, agreement"):
        agreement = update.agreement(batch, version=0)
    with phase("metrics"):
        rollout_metrics(groups, batch, version=0, bound=0)
        divided({**prepared, **trained, **agreement})
    with phase("samples, if all are written"):
        for trajectory in trajectories:
            sample_of(trajectory, step=1, purpose="train")
    return dict(seconds)


def rank_seconds(config: Config, group: FinishedGroup) -> float:
    """Seconds of a forward and backward pass per sequence, measured on about `MEASURED_TOKENS` tokens."""
    from rl_fsdp import FsdpWorker

    length = len(group.trajectories[0].steps[0].tokens)
    count = min(NUM_SAMPLES, max(1, 2 * MEASURED_TOKENS // length - 1))
    copies = max(1, MEASURED_TOKENS // (count * length))
    columns = collate(group.trajectories[:count])
    trained_T = columns["loss_mask"]
    batch = columns.with_columns(
        advantages=torch.ones(len(trained_T)),
        old_logprobs=torch.full((len(trained_T),), -9.0),
        loss_weights=trained_T / trained_T.sum(),
    )
    _, spec = worker_spec(config, "policy", num_training_steps=None)
    worker = FsdpWorker(spec, RankInfo())
    # The copies have different tokens, so that they share no prefix.
    parts = [batch.with_columns(tokens=(batch["tokens"] + 7 * i) % 8000) for i in range(copies)]
    batch = Batch.concat(parts)
    worker.forward_backward(parts[0], [list(range(count))], LossSpec(name="ppo_clip"), temperature=1.0)
    began = time.process_time()
    worker.forward_backward(batch, [list(range(batch.num_sequences))], LossSpec(name="ppo_clip"), temperature=1.0)
    seconds = time.process_time() - began
    worker.close()
    return seconds / batch.num_sequences


if __name__ == "__main__":
    main()
