"""Training and scoring times on GPUs compared with published times: seconds, their ratio, and peak memory.

The published rows are from SkyRL's page on its Megatron backend: Search-R1 on H100s, with sequences of at most 4,096
tokens and a train batch size of 512. The page does not state the samples per prompt, the mini-batch size, or which
tokens its mean number of tokens counts. Here a step has 512 prompts with the recipe's number of samples (--samples
changes it) and the recipe's mini-batch size. Sequence lengths are uniform between half and one and a half times the
published mean; the first eighth of a sequence is its prompt. The two jobs are similar, not equal: read the ratio
accordingly.

A row's model is the model of the recipe with the same name. Without --model it gets random weights, which take the same
time. On a machine with fewer GPUs than a row has, a pure data-parallel row runs with a proportional share of the batch.
The row of four machines needs a Ray cluster and weights that all machines can read: --row qwen3_30b_a3b:megatron --gpus
32 --model DIRECTORY. Peak memory is the largest memory in use on any GPU of this machine; nvidia-smi is read about four
times a second.

Run: python benchmarks/gpu_published_times.py [--row qwen2_5_3b:fsdp] [--steps 2] [--samples 5] [--model DIRECTORY]
On a machine without CUDA, --tiny runs the same code on tiny models, to test it; its times mean nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from rl_core import config as configuration
from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.errors import RLError
from rl_core.interfaces import LossSpec
from rl_core.rank_kit.shipped_configs import known_config
from rl_core.trainer.before.settings import worker_spec
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_examples.tiny_model import write_tiny_copy


@attrs.frozen(kw_only=True)
class Published:
    """One row of the published table."""

    recipe: str
    strategy: str
    num_gpus: int
    training_s: float
    scoring_s: float
    mean_tokens: int

    @property
    def name(self) -> str:
        return f"{self.recipe}:{self.strategy}"


ROWS = (
    Published(recipe="qwen2_5_3b", strategy="megatron", num_gpus=8, training_s=48, scoring_s=39, mean_tokens=658),
    Published(recipe="qwen2_5_3b", strategy="fsdp", num_gpus=8, training_s=42, scoring_s=28, mean_tokens=658),
    Published(recipe="qwen2_5_7b", strategy="megatron", num_gpus=8, training_s=93, scoring_s=46, mean_tokens=819),
    Published(recipe="qwen2_5_7b", strategy="fsdp", num_gpus=8, training_s=100, scoring_s=33, mean_tokens=834),
    Published(
        recipe="qwen3_30b_a3b", strategy="megatron", num_gpus=32, training_s=189, scoring_s=145, mean_tokens=1158
    ),
)
TRAIN_BATCH_SIZE = 512
GPUS_PER_MACHINE = 8
PROMPT = 1 / 8
LOSS = LossSpec(name="regular", params={"eps_clip_low": 0.2, "eps_clip_high": 0.2})


@attrs.frozen(kw_only=True)
class Job:
    """The job that this machine runs for a published row."""

    config: Config
    num_prompts: int
    num_mini_batches: int
    samples: int
    mean_tokens: int


@click.command()
@click.option("--row", "names", multiple=True, type=click.Choice([row.name for row in ROWS]), help="Default: all.")
@click.option("--gpus", "num_gpus", type=int, help="GPUs of this machine or its Ray cluster. Default: this machine's.")
@click.option("--steps", default=2, show_default=True, help="Measured steps, after one warm-up step.")
@click.option("--samples", type=int, help="Samples per prompt. Default: the recipe's.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False),
    help="Directory of a model to use instead of random weights.",
)
@click.option("--tiny", is_flag=True, help="Use tiny models and batches, on the CPU if there is no GPU.")
def main(
    names: tuple[str, ...], num_gpus: int | None, steps: int, samples: int | None, model: str | None, tiny: bool
) -> None:
    """Runs the rows and prints one line for each."""
    rows = [row for row in ROWS if not names or row.name in names]
    if model and len({row.recipe for row in rows}) > 1:
        raise click.UsageError("--model is the model of one recipe; choose the rows of this recipe with --row")
    if not torch.cuda.is_available() and not tiny:
        print("skipped: needs CUDA (torch.cuda.is_available() is False); --tiny checks the code without measuring")
        return
    logging.disable_progress_bar()
    num_gpus = num_gpus or torch.cuda.device_count()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{num_gpus} GPUs, {device}, torch {torch.__version__}")
    for row in rows:
        with tempfile.TemporaryDirectory() as directory:
            print(f"{row.name:24} {line_of(row, num_gpus, steps, samples, model, tiny, Path(directory))}", flush=True)


def line_of(
    row: Published, num_gpus: int, steps: int, samples: int | None, model: str | None, tiny: bool, directory: Path
) -> str:
    """Runs a row and returns the line to print. If the job fails, the line is its error; the other rows still run."""
    has_machines = row.num_gpus > GPUS_PER_MACHINE
    if has_machines and not tiny and (num_gpus < row.num_gpus or model is None):
        return f"skipped: needs --gpus {row.num_gpus} of a Ray cluster, and --model; its mesh cannot run on fewer GPUs"
    used = 1 if tiny else min(num_gpus, row.num_gpus)
    num_machines = max(1, used // GPUS_PER_MACHINE)
    path = model or str(random_model(row, directory, tiny))
    overrides = [f"trainer.strategy={row.strategy}", f"trainer.policy.model.path={path}"]
    overrides += [f"trainer.placement.policy_num_nodes={num_machines}"]
    overrides += [f"trainer.placement.policy_num_gpus_per_node={used // num_machines}"]
    if tiny and has_machines:
        overrides += ["trainer.policy.megatron_config.expert_model_parallel_size=1"]
        overrides += ["trainer.policy.megatron_config.tensor_model_parallel_size=1"]
    config = configuration.load(row.recipe, overrides, tiny=tiny).config
    batch_size = 8 if tiny else TRAIN_BATCH_SIZE
    job = Job(
        config=config,
        num_prompts=batch_size if tiny else batch_size * used // row.num_gpus,
        num_mini_batches=max(1, batch_size // config.trainer.policy_mini_batch_size),
        samples=samples or config.generator.n_samples_per_prompt,
        mean_tokens=16 if tiny else row.mean_tokens,
    )
    try:
        with peak_memory() as peak:
            training_s, scoring_s, num_tokens = asyncio.run(measure(job, steps))
    except (RLError, torch.OutOfMemoryError) as error:
        return f"failed: {error}"
    if tiny:
        return f"runs: {num_tokens} tokens, nothing is measured"
    share = "" if used == row.num_gpus else f", {used} of {row.num_gpus} GPUs with their share of the batch"
    memory = f"{peak[0] / 1024:.1f} GiB peak" if peak else "memory not measured"
    return (
        f"training {training_s:.1f} s (published {row.training_s:g}, ratio {training_s / row.training_s:.2f}), "
        f"scoring {scoring_s:.1f} s (published {row.scoring_s:g}, ratio {scoring_s / row.scoring_s:.2f}), "
        f"{num_tokens} tokens, {num_tokens / training_s:.0f} trained per second, {memory}{share}"
    )


async def measure(job: Job, steps: int) -> tuple[float, float, int]:
    """Median seconds of training and of scoring, and the number of tokens in a step."""
    trainer = job.config.trainer
    backend, spec = worker_spec(job.config, "policy", num_training_steps=None)
    nodes, ranks_per_node = trainer.placement.policy_shape
    limits = MicroBatchLimits(max_tokens=trainer.max_tokens_per_microbatch)
    num_sequences = job.num_prompts * job.samples // job.num_mini_batches
    mini_batches = [
        make_batch(job.config.policy_model_path, num_sequences, job.mean_tokens, seed)
        for seed in range(job.num_mini_batches)
    ]
    policy = await WorkerGroup.launch(backend, spec, num_nodes=nodes, ranks_per_node=ranks_per_node)
    training, scoring = [], []
    try:
        for _ in range(steps + 1):
            started = time.perf_counter()
            for batch in mini_batches:
                await policy.forward(batch, limits, temperature=1.0)
            scored = time.perf_counter()
            for batch in mini_batches:
                await policy.forward_backward(batch, limits, LOSS, temperature=1.0)
                await policy.optim_step()
            scoring.append(scored - started)
            training.append(time.perf_counter() - scored)
    finally:
        await policy.close()
    num_tokens = sum(batch.num_tokens for batch in mini_batches)
    return statistics.median(training[1:]), statistics.median(scoring[1:]), num_tokens


def make_batch(model: str, num_sequences: int, mean_tokens: int, seed: int) -> Batch:
    """Random sequences of various lengths, with all columns that the loss reads."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    lengths = torch.randint(mean_tokens // 2, 3 * mean_tokens // 2 + 1, (num_sequences,), generator=generator)
    rows: list[dict[str, Any]] = []
    for length in lengths.tolist():
        sampled_T = torch.arange(length) >= max(1, int(PROMPT * length))
        rows.append(
            {
                "tokens": torch.randint(vocabulary, (length,), generator=generator),
                "sampled": sampled_T,
                "loss_mask": sampled_T,
                "old_logprobs": torch.full((length,), -12.0),
                "advantages": torch.randn((), generator=generator).expand(length),
            }
        )
    batch = Batch.from_sequences(rows)
    return batch.with_columns(loss_weights=batch["loss_mask"].float() / batch["loss_mask"].sum())


def random_model(row: Published, directory: Path, tiny: bool) -> Path:
    """Writes the recipe's model with random weights in bfloat16, or a tiny copy of it."""
    name = configuration.load(row.recipe, [], tiny=False).config.policy_model_path
    fields = known_config(name)
    assert fields is not None, "rl-examples has no configuration for the model of this recipe"
    if tiny:
        write_tiny_copy(directory / "model", fields, seed=0)
    else:
        given = dict(fields)
        shape = AutoConfig.for_model(given.pop("model_type"), **given)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        model.save_pretrained(directory / "model")
    return directory / "model"


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list whose only element is the peak memory in MiB of the fullest GPU. Without nvidia-smi the list is
    empty."""
    peak: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not ended.wait(0.25):
            try:
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            peak[:] = [max(*peak, *map(int, shown.split()), 0)]

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        ended.set()
        watching.join()


if __name__ == "__main__":
    main()
