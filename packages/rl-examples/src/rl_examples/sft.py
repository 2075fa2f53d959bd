"""Supervised fine-tuning on two-digit addition: a 150k-parameter Qwen3 learns it from right answers, in a minute or two
on two CPU cores.

What it does: trains by cross-entropy on the answers to the quick start's problems; no engine is started and nothing is
sampled. To see the accuracy, play the held-out problems afterwards.
Deliberately omitted: a chat template (rows with `messages` are masked by role), several turns.

Run:      rl train sft
Play:     rl eval quickstart trainer.policy.model.path=runs/sft/model
Continue: rl train quickstart trainer.policy.model.path=runs/sft/model      (GRPO from there; end the first run early,
          by trainer.max_training_steps=150, so that something is left to learn)
Control:  rl train sft data.train_data=[runs/arithmetic/shuffled_answers.parquet]        (answers of other problems)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Recipe

DIRECTORY = "runs/arithmetic"
TRAIN = f"{DIRECTORY}/train.parquet"
HELD_OUT = f"{DIRECTORY}/held_out.parquet"
_SHUFFLED = f"{DIRECTORY}/shuffled_answers.parquet"
_UNTRAINED = f"{DIRECTORY}/untrained_model_seed${{trainer.seed}}"

recipe = Recipe(
    summary="supervised fine-tuning: a small model learns two-digit addition from answers, in a minute or two",
    config={
        "data.train_data": [TRAIN],
        "data.val_data": [HELD_OUT],
        "generator.type": "dataset",
        "generator.response_key": "answer",
        "generator.n_samples_per_prompt": 1,
        "generator.sampling_params.max_generate_length": 5,
        "trainer.run_name": "sft",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": _UNTRAINED,
        "trainer.policy.optimizer_config.lr": 3e-3,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.policy.optimizer_config.num_warmup_steps": 20,
        "trainer.policy.optimizer_config.scheduler": "linear",
        "trainer.algorithm.policy_loss_type": "cross_entropy",
        "trainer.seed": 0,
        "trainer.bf16": False,
        "trainer.gradient_checkpointing": False,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 600,
        "trainer.train_batch_size": 128,
        "trainer.policy_mini_batch_size": 128,
        "trainer.micro_train_batch_size_per_gpu": 512,
        "trainer.micro_forward_batch_size_per_gpu": 1024,
        "trainer.logprobs_chunk_size": 16384,
        "trainer.eval_interval": 50,
        "trainer.ckpt_interval": 200,
        "trainer.max_ckpts_to_keep": 2,
    },
    prepare="rl_examples.sft:prepare",
    makes=(TRAIN, HELD_OUT, _SHUFFLED, _UNTRAINED),
)


def prepare(config: Config) -> None:
    """Creates the recipe's data and untrained model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_model
    from rl_examples.whole_models import is_to_be_made, make_whole

    write_missing_data(config)
    untrained = Path(_UNTRAINED.replace("${trainer.seed}", str(config.trainer.seed)))
    if config.policy_model_path == str(untrained) and is_to_be_made(untrained):
        make_whole(untrained, lambda partial: write_model(partial, seed=config.trainer.seed))


def write_missing_data(config: Config) -> None:
    """Writes the problems with their answers if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import NUM_HELD_OUT, problems, write_missing_rows

    rows = problems()
    held_out, trained = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    write_missing_rows(config, {TRAIN: trained, HELD_OUT: held_out, _SHUFFLED: with_shuffled_answers(trained)})


def with_shuffled_answers(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The negative control: the problems with their answers shuffled."""
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]


def make_fine_tuned(directory: Path, write_untrained: Callable[..., None], *, steps: int, seed: int) -> None:
    """Creates a model that is missing: trains it with this recipe for `steps` steps, and writes it. The model depends
    only on the data and the seed.

    Args:
        directory: the model's directory; the run is kept next to it, as `<directory>.run`.
        write_untrained: writes the untrained model; called as `write_untrained(directory, seed=seed)`.
        steps: number of optimizer steps, of 128 problems each.

    Raises:
        KeyboardInterrupt: a signal stopped the run; the next call continues it from its checkpoint.
    """
    from rl_core.trainer.run import run_training
    from rl_examples.whole_models import is_to_be_made, make_whole

    if not is_to_be_made(directory):
        return
    untrained = directory.with_name(f"{directory.name}.untrained")
    make_whole(untrained, lambda partial: write_untrained(partial, seed=seed))

    def train(partial: Path) -> None:
        keys = {
            "trainer.run_name": directory.name,
            "trainer.run_dir": f"{directory}.run",
            "trainer.export_path": str(partial),
            "trainer.resume_mode": "latest",
            "trainer.policy.model.path": str(untrained),
            "trainer.seed": seed,
            "trainer.max_training_steps": steps,
            "trainer.eval_interval": -1,
            "trainer.eval_before_train": False,
            "trainer.ckpt_interval": -1,
        }
        config = from_mapping({**recipe.config, **keys})
        write_missing_data(config)
        if run_training(config).interrupted:
            raise KeyboardInterrupt

    make_whole(directory, train)
