"""Settings, files and a start model made from demonstrations, shared by the recipes that teach a small model in
minutes.

Such a recipe has a list of problems, of which the first ones are held out, and a function that makes demonstrations,
most of them bad. A freshly initialised model of about 150,000 parameters learns from the demonstrations until a few of
its samples are right; then GRPO starts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Recipe

SETTINGS: Mapping[str, Any] = {
    "trainer.resume_mode": "none",
    "trainer.policy.optimizer_config.lr": 1e-3,
    "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
    "trainer.policy.optimizer_config.weight_decay": 0.0,
    "trainer.policy.optimizer_config.num_warmup_steps": 5,
    "trainer.algorithm.eps_clip_high": 0.28,
    "trainer.seed": 0,
    "trainer.bf16": False,
    "trainer.gradient_checkpointing": False,
    "trainer.num_threads": 1,
    "trainer.max_training_steps": 40,
    "trainer.train_batch_size": 32,
    "trainer.policy_mini_batch_size": 32,
    "trainer.update_epochs_per_batch": 2,
    "trainer.micro_train_batch_size_per_gpu": 256,
    "trainer.micro_forward_batch_size_per_gpu": 256,
    "trainer.logprobs_chunk_size": 16384,
    "trainer.eval_interval": 10,
    "trainer.ckpt_interval": -1,
    "generator.max_input_length": 40,
    "generator.n_samples_per_prompt": 8,
    # Evaluations sample, because a response that is right one time in five is hardly ever the greedy one.
    "generator.eval_sampling_params.temperature": 1.0,
}


@attrs.frozen(kw_only=True)
class SmallRun:
    """Names the files of one recipe, which are all in `runs/<name>_data`."""

    name: str
    """The recipe's name."""

    @property
    def directory(self) -> str:
        """The directory that contains all files of the recipe."""
        return f"runs/{self.name}_data"

    @property
    def train(self) -> str:
        """The Parquet file of the training problems."""
        return f"{self.directory}/train.parquet"

    @property
    def held_out(self) -> str:
        """The Parquet file of the held-out problems."""
        return f"{self.directory}/held_out.parquet"

    @property
    def start_model(self) -> str:
        """The directory of the warm-started model; there is one per seed."""
        return f"{self.directory}/start_model_seed${{trainer.seed}}"

    @property
    def untrained_model(self) -> str:
        """The directory of the freshly initialised model from which the start model is made."""
        return f"{self.start_model}.untrained"

    @property
    def settings(self) -> dict[str, Any]:
        """The shared settings with this run's name and files."""
        return {
            **SETTINGS,
            "data.train_data": [self.train],
            "data.val_data": [self.held_out],
            "trainer.run_name": self.name,
            "trainer.policy.model.path": self.start_model,
        }

    @property
    def tiny(self) -> dict[str, Any]:
        """What `--tiny` changes: two small steps of the untrained model, which learn nothing."""
        return {
            "trainer.run_name": f"{self.name}_tiny",
            "trainer.policy.model.path": self.untrained_model,
            "trainer.max_training_steps": 2,
            "trainer.train_batch_size": 8,
            "trainer.policy_mini_batch_size": 8,
            "trainer.eval_before_train": False,
            "generator.n_samples_per_prompt": 4,
        }


def write_files(
    config: Config,
    run: SmallRun,
    recipe: Recipe,
    rows: Sequence[dict[str, Any]],
    *,
    num_held_out: int,
    demonstrate: Callable[[dict[str, Any], random.Random], dict[str, Any]],
    **settings: Any,
) -> None:
    """Creates the recipe's data and models if the configuration uses them and they are missing.

    Args:
        rows: all problems; the first `num_held_out` are held out.
        demonstrate: makes a demonstration, a row of prompt and answer, from a training problem and a random generator.
            The warm start trains on demonstrations.
        settings: `write_model` and `warm_start_settings` of `write_start_model`.
    """
    trained = rows[num_held_out:]
    write_problems(config, run, rows, num_held_out=num_held_out)
    write_start_model(
        config,
        run,
        recipe,
        problems=trained,
        demonstrate=lambda rng: demonstrate(rng.choice(trained), rng),
        **settings,
    )


def write_problems(config: Config, run: SmallRun, rows: Sequence[Mapping[str, Any]], *, num_held_out: int) -> None:
    """Writes the first `num_held_out` problems to the held-out file and the others to the training file. Writes a file
    only if the configuration uses it and it is missing."""
    from rl_examples.arithmetic import write_missing_rows

    write_missing_rows(config, {run.train: rows[num_held_out:], run.held_out: rows[:num_held_out]})


def write_start_model(
    config: Config,
    run: SmallRun,
    recipe: Recipe,
    *,
    problems: Sequence[dict[str, Any]],
    demonstrate: Callable[[random.Random], dict[str, Any]],
    write_model: Callable[..., None] | None = None,
    **warm_start_settings: Any,
) -> None:
    """Makes the untrained model or the start model, whichever the configuration uses, if it is missing.

    Args:
        problems: training problems on which the warm start measures the accuracy that ends it.
        demonstrate: makes a demonstration, a row of prompt and answer on which the warm start trains.
        write_model: writes the untrained model, called with `directory` and `seed`; None:
            `rl_examples.arithmetic.write_model`.
        warm_start_settings: fields of `rl_examples.warm_start.WarmStart`.
    """
    from rl_core.trainer.groups import DataRow
    from rl_examples.arithmetic import write_model as write_character_model
    from rl_examples.warm_start import WarmStart, warm_start
    from rl_examples.whole_models import is_to_be_made, make_whole

    seed = config.trainer.seed
    directory, untrained = (Path(_of_seed(path, seed)) for path in (run.start_model, run.untrained_model))
    is_wanted = config.policy_model_path == str(directory) and is_to_be_made(directory)
    if is_wanted or (config.policy_model_path == str(untrained) and is_to_be_made(untrained)):
        make_whole(untrained, lambda partial: (write_model or write_character_model)(partial, seed=seed))
    if not is_wanted:
        return
    start = from_mapping({**recipe.config, "trainer.seed": seed, "trainer.policy.model.path": str(untrained)})
    rng = random.Random(seed)
    shown = [DataRow(demonstrate(rng), f"demonstration {number}") for number in range(20_000)]
    played = [DataRow(row, f"problem {number}") for number, row in enumerate(problems)]
    settings = WarmStart(temperature=1.0, **warm_start_settings)
    make_whole(directory, lambda partial: warm_start(start, shown, partial, settings, check_rows=played))


def _of_seed(path: str, seed: int) -> str:
    return path.replace("${trainer.seed}", str(seed))
