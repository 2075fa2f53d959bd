"""A training step on the quick start's batch (64 prompts × 16 samples, two updates), by this project and by TRL.

Both trainers start from the same model and get the same tokens, so nothing is generated. The measurement of our step
begins after sampling: collating, advantages, scoring if needed, two optimizer steps, and the comparison with the
engine's log-probs. TRL's GRPOTrainer is measured over its whole training step, in which a `rollout_func` returns these
tokens. The two steps alternate. Times are processor seconds with one thread, medians over the rounds. Goal: at most 0.6
of TRL's time.

Then one update per batch is measured without the scoring pass and with it.
Goal: without the pass, at most 0.8 of the time with it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Trajectory, TrajectoryStep
from rl_core.trainer.before.settings import update_settings, worker_spec
from rl_core.trainer.update.batch_update import BatchUpdate, UpdateSettings
from rl_core.trainer.update.collate import collate
from rl_core.trainer.update.models import Models
from rl_core.trainer.update.scoring_pass import ScoringPass
from rl_core.workers import WorkerGroup
from rl_examples.arithmetic import write_model
from rl_examples.quickstart import recipe

NUM_PROMPTS, NUM_SAMPLES, NUM_UPDATES = 64, 16, 2
SCORED = ScoringPass(scores=("logprobs",))


def played(tokenizer: Any) -> list[Trajectory]:
    """Trajectories that answer six-character problems with three random digits and an end token. One in five gets a
    reward."""
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for number in range(NUM_PROMPTS * NUM_SAMPLES):
        problem, sample = divmod(number, NUM_SAMPLES)
        prompt = tokenizer(f"{problem + 10}+{99 - problem}=", add_special_tokens=False).input_ids
        answer = tokenizer("".join(map(str, torch.randint(10, (3,), generator=generator).tolist()))).input_ids
        response = [*answer, tokenizer.eos_token_id]
        count = len(prompt)
        step = TrajectoryStep(
            tokens=[*prompt, *response],
            sampled=[False] * count + [True] * len(response),
            rollout_logprobs=[0.0] * count + [-2.3] * len(response),
            policy_version=[-1] * count + [0] * len(response),
            reward=float((problem + sample) % 5 == 0),
            stop_reason="stop",
        )
        trajectories.append(
            Trajectory(
                group_id=problem,
                sample_index=sample,
                steps=(step,),
                prompt_text="",
                response_text="",
                start_version=0,
            )
        )
    return trajectories


async def ours(config: Config, settings: UpdateSettings) -> tuple[WorkerGroup, BatchUpdate]:
    """The worker group of the policy's one rank, and the `BatchUpdate` that trains it."""
    backend, spec = worker_spec(config, "policy", num_training_steps=1000)
    group = await WorkerGroup.launch(backend, spec)
    return group, BatchUpdate(settings, Models(policy=group), kl_coef=0.0)


async def step_of(update: BatchUpdate, trajectories: Sequence[Trajectory], step: int) -> float:
    """Does a step's work between sampling and publishing. Returns the mean gradient norm of the step's updates."""
    batch = await update.score(collate(trajectories))
    batch, _ = update.prepare(batch)
    batch, metrics = await update.train(batch, step)
    update.agreement(batch, version=0)
    total, weight = metrics["policy/grad_norm"]
    return total / weight


def seconds_of(function: Callable[[], Any]) -> float:
    """Processor seconds of a call, over all threads."""
    started = time.process_time()
    function()
    return time.process_time() - started


class TurnsOfOurs(TrainerCallback):
    """Measures TRL's steps, and runs and measures one of our steps after each batch. The first step of each trainer
    warms up and is not in the lists."""

    def __init__(self, step: Callable[[], Any], num_updates: int):
        self._step = step
        self._num_updates = num_updates
        self._since: float | None = None
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self.first_grad_norm = float("nan")
        """Gradient norm of TRL's first optimizer step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            gradients = [weight.grad for weight in kwargs["model"].parameters() if weight.grad is not None]
            self.first_grad_norm = float(torch.nn.utils.get_total_norm(gradients))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._num_updates:
            return
        ended, ours = time.process_time(), seconds_of(self._step)
        if self._since is not None:
            self.theirs.append(ended - self._since)
            self.ours.append(ours)
        self._since = time.process_time()


def against_trl(
    model: Path,
    trajectories: Sequence[Trajectory],
    step: Callable[[], Any],
    *,
    num_samples: int,
    num_updates: int,
    rounds: int,
    micro_batch: int | None = None,
) -> TurnsOfOurs:
    """Runs TRL's trainer, and calls `step` after each of its batches.

    Args:
        model: directory of the model that TRL trains.
        trajectories: the batch, sorted by prompt.
        step: one step of our trainer.
        num_samples: samples per prompt.
        num_updates: optimizer steps per batch.
        rounds: measured batches, after one warm-up batch.
        micro_batch: TRL's micro-batch size in sequences, a divisor of the batch size; None: the whole batch.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [trajectory.steps[0] for trajectory in trajectories]
    counts = [list(step.sampled).index(True) for step in steps]
    tokens = {
        "prompt_ids": [list(step.tokens[:count]) for step, count in zip(steps, counts, strict=True)],
        "completion_ids": [list(step.tokens[count:]) for step, count in zip(steps, counts, strict=True)],
        "logprobs": [list(step.rollout_logprobs[count:]) for step, count in zip(steps, counts, strict=True)],
    }
    micro_batch = micro_batch or len(steps)
    turns = TurnsOfOurs(step, num_updates)
    with tempfile.TemporaryDirectory() as output:
        arguments = trl.GRPOConfig(  # pyright: ignore[reportPrivateImportUsage]
            output_dir=output,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(steps) // micro_batch,
            num_generations=num_samples,
            num_iterations=num_updates,
            max_completion_length=len(tokens["completion_ids"][0]),
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=1e-3,
            gradient_checkpointing=False,
            max_grad_norm=1e9,  # the norm is computed, but nothing is clipped
            max_steps=num_updates * (rounds + 1),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        # The prompts are placeholders: `rollout_func` ignores them and returns the batch's tokens.
        rows = [{"prompt": str(number)} for number in range(len(steps) // num_samples)]
        trainer = trl.GRPOTrainer(  # pyright: ignore[reportPrivateImportUsage]
            model=str(model),
            reward_funcs=lambda completions, **_: [step.reward for step in steps[: len(completions)]],
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            rollout_func=lambda prompts, _: {name: values[: len(prompts)] for name, values in tokens.items()},
            callbacks=[turns],
        )
        trainer.train()
    return turns


def show_norms(turns: TurnsOfOurs, own: float) -> None:
    """Prints both gradient norms of the first optimizer step. They are equal if both compute the same gradient."""
    error = abs(own / turns.first_grad_norm - 1.0)
    print(f"{'norm of the first gradient, TRL and ours':44s} {turns.first_grad_norm:.7g} {own:.7g} ({error:.0e} apart)")


def median(name: str, seconds: Sequence[float]) -> float:
    """Prints and returns the median."""
    value = statistics.median(seconds)
    print(f"{name:44s} {value:7.3f} processor seconds ({len(seconds)} rounds)")
    return value


@click.command()
@click.option("--rounds", default=8, show_default=True, help="Measured batches, after one warm-up batch.")
def main(rounds: int) -> None:
    """Prints both times and their ratio."""
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_model(model, seed=0)
        config = from_mapping({**recipe.config, "trainer.policy.model.path": str(model)})
        settings = update_settings(config)
        trajectories = played(AutoTokenizer.from_pretrained(model))
        group, update = loop.run_until_complete(ours(config, settings))
        print(f"our scoring before training: {settings.scoring}")

        def step_once(update: BatchUpdate = update) -> None:
            loop.run_until_complete(step_of(update, trajectories, step=2))

        turns = against_trl(
            model, trajectories, step_once, num_samples=NUM_SAMPLES, num_updates=NUM_UPDATES, rounds=rounds
        )
        theirs, own = median("TRL, two updates", turns.theirs), median("ours, two updates", turns.ours)
        print(f"{'ours over TRL':44s} {own / theirs:7.2f}  (goal 0.6)")

        once = attrs.evolve(settings, policy=attrs.evolve(settings.policy, epochs=1))
        models = Models(policy=group)
        without, scored = (
            BatchUpdate(attrs.evolve(once, scoring=scoring), models, kl_coef=0.0)
            for scoring in (settings.scoring, SCORED)
        )
        seconds: dict[str, list[float]] = {"without": [], "scored": []}
        for each in (without, scored):  # the first step of each warms up
            step_once(each)
        for _ in range(rounds):
            seconds["without"].append(seconds_of(lambda: step_once(without)))
            seconds["scored"].append(seconds_of(lambda: step_once(scored)))
        ratio = median("one update, no scoring pass", seconds["without"]) / median(
            "one update, every sequence scored", seconds["scored"]
        )
        print(f"{'no scoring pass over scoring pass':44s} {ratio:7.2f}  (goal 0.8)")
        loop.run_until_complete(group.close())


if __name__ == "__main__":
    main()
