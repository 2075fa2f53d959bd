"""Steps streamed (`trainer.stream_groups`) or trained `at once`, with a real vLLM server, compared with a lower bound.

A 20M-parameter model answers 64 prompts with 8 samples each, of 20 tokens on average and at most 64, with 64 concurrent
samples. The vLLM server's processes have one core, the trainer another. The first step warms up and is left out.

For every time t since its start, a step ends no earlier than t plus the training time of all its groups that finished
at t or later. The bound is the latest of these ends. A group's training time is its share, by tokens, of the training
time of the steps trained `at once`.

Run: PYTHONPATH=. python benchmarks/streamed_steps.py [--steps 5] (two free cores, about six minutes)
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs

from rl_core import config as configuration
from rl_core.interfaces import Callback
from rl_core.trainer.groups import FinishedGroup
from rl_core.trainer.loop.buffer import GroupBuffer
from rl_core.trainer.loop.step_training import StepTraining
from rl_core.trainer.run import run_training

TRAINER_CORE, SERVER_CORE = 0, 1


@attrs.define
class Step:
    """Times of one step, in seconds of the monotonic clock."""

    arrivals: dict[int, float] = attrs.field(factory=dict)
    """Group → when it finished."""
    tokens: dict[int, int] = attrs.field(factory=dict)
    trained_s: float = 0.0
    """Seconds of all calls that train a part of the batch."""
    parts: int = 0
    starts: float = 0.0
    ends: float = 0.0

    def bound(self, seconds_per_token: float) -> float:
        """Lower bound of the step's duration in seconds."""
        arrivals = {group: max(arrival, self.starts) for group, arrival in self.arrivals.items()}
        return max(
            time
            - self.starts
            + seconds_per_token * sum(self.tokens[group] for group, arrival in arrivals.items() if arrival >= time)
            for time in arrivals.values()
        )


class OwnCores(Callback):
    """Pins the trainer's threads to one core and all of its child processes to another."""

    def on_run_start(self, run_dir: Path, first_step: int, last_step: int) -> None:
        import psutil

        own = psutil.Process()
        for process, core in [(own, TRAINER_CORE), *((child, SERVER_CORE) for child in own.children(recursive=True))]:
            for thread in process.threads():
                # A thread may end after it was listed.
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, {core})


def measured(directory: str, num_steps: int, streams: bool) -> list[Step]:
    """Runs the training and returns the times of all steps but the first."""
    steps, waiting = [Step(starts=time.monotonic())], {}
    finish, train = GroupBuffer.finish, StepTraining.train

    async def noted_finish(self: GroupBuffer, group_id: int, trajectories: Any) -> None:
        waiting[group_id] = time.monotonic()
        await finish(self, group_id, trajectories)

    async def noted_train(self: StepTraining, groups: Sequence[FinishedGroup], step: int, *, is_last: bool) -> Any:
        began, one = time.monotonic(), steps[-1]
        for group in groups:
            one.arrivals[group.group_id] = waiting.pop(group.group_id)
            one.tokens[group.group_id] = sum(len(t.steps[0].tokens) for t in group.trajectories)
        result = await train(self, groups, step, is_last=is_last)
        one.ends = time.monotonic()
        one.trained_s, one.parts = one.trained_s + one.ends - began, one.parts + 1
        return result

    published = GroupBuffer.published

    async def noted_published(self: GroupBuffer, version: int) -> None:
        if version == len([one for one in steps if one.parts]):
            if steps[-1].parts:
                steps.append(Step())
            steps[-1].starts = time.monotonic()
        await published(self, version)

    GroupBuffer.finish, GroupBuffer.published, StepTraining.train = noted_finish, noted_published, noted_train  # pyright: ignore[reportAttributeAccessIssue]
    os.chdir(directory)
    settings = {
        "data.train_data": "[train.parquet]",
        "data.val_data": "[]",
        "trainer.policy.model.path": "model",
        "trainer.run_dir": f"run_{streams}",
        "trainer.max_training_steps": num_steps,
        "trainer.update_epochs_per_batch": 1,
        "trainer.micro_train_batch_size_per_gpu": 128,
        "trainer.ckpt_interval": -1,
        "trainer.stream_groups": streams,
        "trainer.placement.colocate_all": False,
        "trainer.callbacks": "[benchmarks.streamed_steps:OwnCores]",
        "generator.n_samples_per_prompt": 8,
        "generator.sampling_params.max_generate_length": 64,
        "generator.inference_engine.backend": "vllm",
        "generator.inference_engine.num_engines": 1,
        "generator.inference_engine.max_num_seqs": 64,
    }
    run_training(configuration.load("quickstart", [f"{key}={value}" for key, value in settings.items()]))
    return [step for step in steps if step.parts][1:]


def serve(connection: Any, *args: Any) -> None:
    """Sends the result of `measured` through the connection."""
    connection.send(measured(*args))


def in_own_process(*args: Any) -> list[Step]:
    """The result of `measured`, called in a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *args))
    process.start()
    theirs.close()
    steps = ours.recv()
    process.join()
    return steps


def prepare(directory: Path) -> None:
    """Writes the quick start's data, and a larger model with the quick start's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rl_examples.arithmetic import write_data, write_model

    write_data(directory / "train.parquet", directory / "held_out.parquet")
    write_model(directory / "small", seed=0)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6}
    shape = {"head_dim": 64, "max_position_embeddings": 128, "layer_types": ["full_attention"] * 8}
    config = AutoConfig.from_pretrained(directory / "small", **sizes, **shape, initializer_range=0.02)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(directory / "small").save_pretrained(directory / "model")


def main() -> None:
    """Prints a row per step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        runs = {name: in_own_process(directory, args.steps, name == "streamed") for name in ("at once", "streamed")}
    at_once = runs["at once"]
    per_token = sum(step.trained_s for step in at_once) / sum(sum(step.tokens.values()) for step in at_once)
    for name, steps in runs.items():
        ratios = []
        for step in steps:
            bound, took = step.bound(per_token), step.ends - step.starts
            ratios.append(took / bound)
            print(f"{name:9} {step.parts:3} parts {took:6.2f} s, bound {bound:6.2f} s: {took / bound:.2f}")
        print(f"{name:9} mean over the bound {sum(ratios) / len(ratios):.2f}" + " (goal 1.15)" * (name == "streamed"))


if __name__ == "__main__":
    main()
