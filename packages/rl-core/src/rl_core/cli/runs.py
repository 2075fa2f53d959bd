"""The code of `rl train`, `rl eval` and `rl generate`: load the configuration, call the trainer, print the result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_core import config as configuration
from rl_core.cli.episodes import show_episodes
from rl_core.cli.messages import say
from rl_core.errors import ConfigError
from rl_core.stored_files import is_found

if TYPE_CHECKING:
    from rl_core.trainer.state.run_directory import RunSummary


def load(source: str, overrides: Sequence[str], tiny: bool) -> configuration.Loaded:
    """Loads the configuration that the arguments of the command line describe."""
    if "=" in source and not is_found(source):  # a run's directory may be called lr=1e-6
        raise ConfigError(f"got {source!r} where a recipe is expected; write rl COMMAND RECIPE {source}")
    return configuration.load(source, overrides, tiny=tiny)


def train(loaded: configuration.Loaded, started: float) -> int:
    """Trains the run, or resumes it, and prints its summary. Returns the exit code."""
    from rl_core.trainer.run import run_training

    try:
        summary = run_training(loaded, started=started)
    except KeyboardInterrupt:
        say(f"interrupted; {resume_hint(loaded)}")
        return 130
    if summary.interrupted:
        say(f"interrupted after step {summary.steps}; {resume_hint(loaded)}")
        return 130
    _show_summary(summary)
    return 0


def describe(loaded: configuration.Loaded) -> int:
    """Runs the checks that are possible before the start and describes the run (`--dry-run`). Returns the exit code."""
    from rl_core.trainer.before.preflight import preflight
    from rl_core.trainer.before.settings import update_settings

    left_to_prove = preflight(loaded)
    config = loaded.config
    trainer, generator = config.trainer, config.generator
    click.echo(
        f"model      {config.policy_model_path} ({trainer.strategy}, {'bfloat16' if trainer.bf16 else 'float32'})"
    )
    engine = f"{generator.inference_engine.backend} ({config.engine_dtype})"
    click.echo(f"engine     {engine if configuration.needs_engine(config) else 'none'}")
    click.echo(f"algorithm  {trainer.algorithm.advantage_estimator}, {trainer.algorithm.policy_loss_type} loss")
    click.echo(f"step       {trainer.train_batch_size} prompts × {generator.n_samples_per_prompt} samples")
    click.echo(f"scoring    {update_settings(config).scoring}")
    click.echo(f"steps      {_planned_steps(loaded)}")
    click.echo(f"run        {config.run_dir}")
    for sentence in left_to_prove:
        click.echo(f"later      {sentence}")
    click.echo("nothing was started (--dry-run)")
    return 0


def evaluate(loaded: configuration.Loaded) -> int:
    """Evaluates the model and prints its metrics."""
    from rl_core.trainer.run import run_evaluation

    _warn_of_start_model(loaded)
    for name, value in sorted(run_evaluation(loaded).items()):
        click.echo(f"{name}  {value:.6g}")
    return 0


def generate(loaded: configuration.Loaded, output: Path, limit: int | None) -> int:
    """Writes samples of all prompts, or of the first `limit`, to `output`. Prints a few multi-turn episodes."""
    from rl_core.trainer.run import run_generation

    _warn_of_start_model(loaded)
    count = run_generation(loaded, output, limit=limit)
    show_episodes(output)
    click.echo(f"{count} samples in {output}")
    return 0


def _warn_of_start_model(loaded: configuration.Loaded) -> None:
    """Prints a warning if the run has a trained model but the configuration names another one, usually the model before
    training."""
    model, trained = loaded.config.policy_model_path, loaded.config.export_dir
    played = Path(model).absolute()
    if (trained / "config.json").is_file() and trained.absolute() not in (played, *played.parents):
        remedy = f"to use that, add trainer.policy.model.path={shlex.quote(str(trained))}"
        say(f"warning: {model} is used, not this run's trained model; {remedy}")


def _planned_steps(loaded: configuration.Loaded) -> str:
    from rl_core.trainer.before.data import is_at_hand
    from rl_core.trainer.before.environment_checks import configured_rows
    from rl_core.trainer.before.settings import num_steps

    config = loaded.config
    missing = [file for file in config.data.train_data if not is_at_hand(file)]
    if missing:
        return f"{config.trainer.max_training_steps or 'depends on the data'} ({missing[0]} will be created first)"
    rows = len(configured_rows(config, "data.train_data"))
    epochs = config.trainer.epochs
    described = f"{num_steps(config, rows)} ({rows} prompts, {epochs} epoch{'s' * (epochs != 1)})"
    if config.data.on_long_prompt == "drop" and config.trainer.max_training_steps is None:
        return f"at most {described}; prompts that are too long are left out at the start"
    return described


def has_checkpoint(loaded: configuration.Loaded) -> bool:
    """Whether the run has a checkpoint and a stored configuration from which it can resume."""
    from rl_core.trainer.state.checkpoint import list_checkpoints
    from rl_core.trainer.state.run_directory import newest_config

    return newest_config(loaded.config.run_dir).exists() and bool(list_checkpoints(loaded.config.ckpt_dir))


def resume_hint(loaded: configuration.Loaded) -> str:
    """Returns a message that says how to resume the run from its newest checkpoint or, if it has none, how to start it
    again."""
    from rl_core.trainer.state.checkpoint import list_checkpoints
    from rl_core.trainer.state.run_directory import newest_config

    config = loaded.config
    file, checkpoints = newest_config(config.run_dir), list_checkpoints(config.ckpt_dir)
    if not file.exists():
        return "nothing was written; to start again, run the same command"
    command = f"rl train {shlex.quote(str(file))}"
    if not checkpoints:
        return f"the run has no checkpoint yet; to start again:\n  {command}"
    no_path = " trainer.resume_path=null" if config.trainer.resume_path is not None else ""
    return f"to resume from {checkpoints[-1].name}:\n  {command} trainer.resume_mode=latest{no_path}"


def _show_summary(summary: RunSummary) -> None:
    from rl_core.reports.progress import duration

    parts = f"{duration(summary.total_seconds)} ({duration(summary.rl_seconds)} of training and evaluation)"
    say(f"{summary.steps} steps done; this command took {parts}", err=False)
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        say(f"held-out {summary.measure} {summary.accuracy_before:.3f} → {summary.accuracy_after:.3f}", err=False)
    say(f"report: {summary.run_dir / 'report.html'}", err=False)
