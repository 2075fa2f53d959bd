"""What `rl train`, `rl eval` and `rl generate` do around the trainer: load, check, prepare, run, say what came out."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_core import config as configuration
from rl_core import plugins
from rl_core.cli.episodes import show_episodes
from rl_core.config.resolving import value_at
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rl_core.layout.mesh import Mesh
    from rl_core.trainer.run_directory import RunSummary


def load(source: str, overrides: Sequence[str], tiny: bool) -> configuration.Loaded:
    """The configuration that the command line describes."""
    if "=" in source:
        raise ConfigError(f"{source!r} stands where the recipe is expected: rl COMMAND RECIPE {source}")
    return configuration.load(source, overrides, tiny=tiny)


def train(loaded: configuration.Loaded, started: float) -> int:
    """Checks, prepares and trains; the exit code."""
    _check(loaded)
    from rl_core.trainer.run import run_training

    try:
        summary = run_training(loaded.config, started=started, prepare=_prepare(loaded))
    except KeyboardInterrupt:
        click.echo(f"interrupted; {_resume_command(loaded)}", err=True)
        return 130
    if summary.interrupted:
        click.echo(f"interrupted after step {summary.steps}; {_resume_command(loaded)}", err=True)
        return 130
    _show_summary(summary)
    return 0


def describe(loaded: configuration.Loaded) -> int:
    """A dry run: all checks, and what the run would be."""
    _check(loaded)
    from rl_core.trainer.run_lock import require_unused

    config = loaded.config
    require_unused(config)
    trainer, generator = config.trainer, config.generator
    click.echo(
        f"model      {config.policy_model_path} ({trainer.strategy}, {'bfloat16' if trainer.bf16 else 'float32'})"
    )
    click.echo(f"engine     {generator.inference_engine.backend} ({config.engine_dtype})")
    click.echo(f"algorithm  {trainer.algorithm.advantage_estimator}, {trainer.algorithm.policy_loss_type} loss")
    click.echo(f"step       {trainer.train_batch_size} prompts × {generator.n_samples_per_prompt} samples")
    click.echo(f"steps      {_planned_steps(loaded)}")
    click.echo(f"run        {config.run_dir}")
    click.echo("nothing was started (--dry-run)")
    return 0


def evaluate(loaded: configuration.Loaded) -> int:
    """Evaluates the model and prints its metrics."""
    _check_playing(loaded, reads="data.val_data")
    from rl_core.trainer.run import run_evaluation

    for name, value in sorted(run_evaluation(loaded.config).items()):
        click.echo(f"{name}  {value:.6g}")
    return 0


def generate(loaded: configuration.Loaded, output: Path, limit: int | None) -> int:
    """Writes samples of all prompts, or of the first `limit`, to `output`; shows a few of those that have several
    turns."""
    config = loaded.config
    _check_playing(loaded, reads="data.val_data" if config.data.val_data else "data.train_data")
    from rl_core.trainer.run import run_generation

    _make_directory(output.parent)
    count = run_generation(config, output, limit=limit)
    show_episodes(output)
    click.echo(f"{count} samples in {output}")
    return 0


def _check(loaded: configuration.Loaded) -> None:
    """Every check before anything starts. What the recipe makes itself is looked for after it was made."""
    config = loaded.config
    configuration.check_values(config)
    configuration.check_files(config, makes=loaded.makes)
    configuration.check_plugins(config, chosen=loaded.chosen_keys)
    _check_callbacks(config)
    _check_environments(config, keys=["data.train_data", "data.val_data"])
    _check_ranks(config)


def _prepare(loaded: configuration.Loaded) -> Callable[[configuration.Config], None] | None:
    """Makes what the recipe makes, and looks whether it is there then."""
    if loaded.recipe is None or loaded.recipe.prepare is None:
        return None
    make = plugins.import_object(loaded.recipe.prepare, "the recipe's `prepare`: ")

    def prepare(config: configuration.Config) -> None:
        make(config)
        configuration.check_files(config)

    return prepare


def _check_playing(loaded: configuration.Loaded, *, reads: str) -> None:
    """The checks of what plays prompts without training. What the recipe makes is looked for after it was made."""
    config, prepare = loaded.config, loaded.recipe.prepare if loaded.recipe else None
    configuration.check_playing(config, reads=reads, makes=loaded.makes)
    if prepare is not None:
        plugins.import_object(prepare, "the recipe's `prepare`: ")(config)
        configuration.check_playing(config, reads=reads)
    _check_environments(config, keys=[reads])


def _check_callbacks(config: configuration.Config) -> None:
    from rl_core.trainer.callbacks import Callback

    for path in config.trainer.callbacks:
        found = plugins.import_object(path, "trainer.callbacks: ")
        if not (isinstance(found, type) and issubclass(found, Callback)):
            raise ConfigError(
                f"trainer.callbacks: {path!r} is no callback; expected a class derived from "
                "rl_core.trainer.callbacks.Callback"
            )
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(f"trainer.callbacks: {path!r} is built without arguments, but has a {error}") from error


def _check_environments(config: configuration.Config, *, keys: Sequence[str]) -> None:
    """Every row that will be played names an installed environment, where no key names one for all rows."""
    from rl_core.trainer.data import read_rows

    if config.environment.env_class is not None or config.generator.type != "environment":
        return  # another generator may play without environments
    known: set[str] = set()
    for key in keys:
        files = [file for file in value_at(config, key) if Path(file).is_file()]
        for row in read_rows(files, key=key) if files else []:
            name = row.row.get("env_class")
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"{row.place}: the row has no 'env_class' and environment.env_class is not set; give one of the two"
                )
            if name not in known:
                plugins.load("rl_core.environments", name, key=f"{row.place}: env_class")
                known.add(name)


def _check_ranks(config: configuration.Config) -> None:
    """Asks the training backend whether it can train this, and the trainer whether it understands the algorithm."""
    from rl_core.trainer.data import read_rows
    from rl_core.trainer.settings import model_shapes, num_steps, update_settings, worker_spec

    update_settings(config)
    steps = config.trainer.max_training_steps
    if steps is None and all(Path(file).is_file() for file in config.data.train_data):
        steps = num_steps(config, len(read_rows(config.data.train_data, key="data.train_data")))
    for role, (nodes, per_node) in model_shapes(config).items():
        # Data that the recipe is going to make cannot be counted yet: any schedule will do until then.
        backend, spec = worker_spec(config, role, num_training_steps=sys.maxsize if steps is None else steps)
        backend.validate(spec, nodes * per_node)
        require_token_budget(config, backend.mesh(spec.options, nodes * per_node))


def require_token_budget(config: configuration.Config, mesh: Mesh) -> None:
    """The longest sequence, padded so that the mesh can split it, fits into a micro-batch."""
    budget, multiple = config.trainer.max_tokens_per_microbatch, mesh.sequence_multiple
    longest = config.trainer.max_prompt_length + config.generator.sampling_params.max_generate_length
    padded = -(-longest // multiple) * multiple
    if 0 < budget < padded:
        raise ConfigError(
            f"trainer.max_tokens_per_microbatch: {budget} tokens cannot hold the longest sequence, {longest} tokens "
            "(trainer.max_prompt_length + generator.sampling_params.max_generate_length) padded to "
            f"{padded}, a multiple of the {multiple} that tensor and context ranks split it by; give at least {padded}"
        )


def _planned_steps(loaded: configuration.Loaded) -> str:
    from rl_core.trainer.data import read_rows
    from rl_core.trainer.settings import num_steps

    config = loaded.config
    missing = [file for file in config.data.train_data if not Path(file).is_file()]
    if missing:
        return f"{config.trainer.max_training_steps or 'as many as the data gives'} ({missing[0]} will be made first)"
    rows = len(read_rows(config.data.train_data, key="data.train_data"))
    return f"{num_steps(config, rows)} ({rows} prompts, {config.trainer.epochs} epochs)"


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--output: the directory {directory} cannot be made: {error}") from error


def _resume_command(loaded: configuration.Loaded) -> str:
    """What is there to go on from, and the command that does."""
    from rl_core.trainer.checkpoint import list_checkpoints
    from rl_core.trainer.run_directory import newest_config

    config = loaded.config
    file, checkpoints = newest_config(config.run_dir), list_checkpoints(config.ckpt_dir)
    if not file.exists():
        return "nothing was written; to start again, give the same command"
    command = f"rl train {shlex.quote(str(file))}"
    if not checkpoints:
        return f"it has no checkpoint yet; to start again:\n  {command}"
    no_path = " trainer.resume_path=null" if config.trainer.resume_path is not None else ""
    return f"to go on from {checkpoints[-1].name}:\n  {command} trainer.resume_mode=latest{no_path}"


def _show_summary(summary: RunSummary) -> None:
    click.echo(f"{summary.steps} steps in {summary.total_seconds:.0f} s")
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        click.echo(f"held-out accuracy {summary.accuracy_before:.3f} → {summary.accuracy_after:.3f}")
    click.echo(f"report: {summary.run_dir / 'report.html'}")
