"""What is checked before anything is started, made or written: of a training run, and of playing without training.

`rl train`, its dry run and `run_training` call the same function, and so do `rl eval`, `rl generate`, `run_evaluation`
and `run_generation`. Mistakes that do not depend on each other are raised together. What a recipe is going to make is
looked at once it is there: here, or by `prepare`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_core import plugins
from rl_core.config import Config, Loaded
from rl_core.config.checks import gather_playing, gather_plugins
from rl_core.config.file_checks import gather_files
from rl_core.config.resolving import value_at
from rl_core.config.value_checks import gather_values
from rl_core.errors import ConfigError, DataError, Mistakes
from rl_core.interfaces import Role
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_core.trainer.data import DataRow, read_rows
from rl_core.trainer.run_lock import require_unused
from rl_core.trainer.settings import model_shapes, num_steps, update_settings, worker_spec

_RANKS_READ = (
    "trainer.strategy",
    "trainer.placement",
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.logprobs_chunk_size",
    "trainer.num_threads",
    "trainer.seed",
)
"""Keys that are told to the ranks of every model."""
_UPDATE_READS = (
    "trainer.algorithm",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.max_tokens_per_microbatch",
    "trainer.max_consecutive_nonfinite_steps",
    "trainer.max_staleness",
    "trainer.seed",
)
_BUDGET_READS = (
    "trainer.max_tokens_per_microbatch",
    "trainer.max_prompt_length",
    "generator.sampling_params.max_generate_length",
)
_TRAINING_DATA = ("data.train_data", "data.val_data")
_DIRECTORIES = ("trainer.run_name", "trainer.run_dir", "trainer.ckpt_path", "trainer.export_path")


def preflight(run: Config | Loaded) -> None:
    """All checks of a training run; takes, makes and writes nothing.

    Args:
        run: a resolved configuration, or one with the recipe that it comes from.

    Raises:
        ConfigError, PluginError, DataError: the mistake that was found; ConfigErrors: all of several.
    """
    config, loaded = config_of(run), _loaded(run)
    mistakes = Mistakes()
    gather_values(config, mistakes)
    gather_files(config, mistakes, makes=loaded.makes)
    gather_plugins(config, mistakes, chosen=loaded.chosen_keys)
    mistakes.passes(_prepare_function, loaded)
    rows = _gather_rows(config, _TRAINING_DATA, mistakes)
    _gather_ranks(config, rows["data.train_data"], mistakes)
    if not mistakes.about(*_DIRECTORIES):
        mistakes.passes(require_unused, config)
    mistakes.raise_found()


def prepare(run: Config | Loaded) -> None:
    """Has the recipe make what a training run reads and is missing, and looks at it. The directories are the run's by
    then.

    Raises:
        ConfigError, DataError, PluginError: what was made cannot be trained on; ConfigErrors: for several reasons.
    """
    config, make = config_of(run), _prepare_function(_loaded(run))
    if make is None:
        return
    make(config)
    mistakes = Mistakes()
    gather_files(config, mistakes)
    rows = _gather_rows(config, _TRAINING_DATA, mistakes)
    mistakes.passes(_planned_steps, config, rows["data.train_data"])
    mistakes.raise_found()


def prepare_playing(run: Config | Loaded, *, reads: str, output: Path | None = None) -> None:
    """All checks of what plays the prompts of the key `reads` without training, between them the recipe's own
    preparation. Nothing else is made or written.

    Args:
        output: a file that is going to be written.

    Raises:
        ConfigError, PluginError, DataError: the mistake that was found; ConfigErrors: all of several.
    """
    config, loaded = config_of(run), _loaded(run)
    mistakes = Mistakes()
    if output is not None:
        mistakes.passes(_require_new, output)
    gather_playing(config, mistakes, reads=reads, makes=loaded.makes)
    mistakes.passes(_prepare_function, loaded)
    _gather_rows(config, [reads], mistakes)
    mistakes.raise_found()
    make = _prepare_function(loaded)
    if make is not None:
        make(config)
        gather_playing(config, mistakes, reads=reads)
        _gather_rows(config, [reads], mistakes)
        mistakes.raise_found()


def config_of(run: Config | Loaded) -> Config:
    """The configuration of what `run_training` and its like are given."""
    return run.config if isinstance(run, Loaded) else run


def _loaded(run: Config | Loaded) -> Loaded:
    """With a configuration alone nobody is known to have chosen a key, so none is warned of as having no effect."""
    return run if isinstance(run, Loaded) else Loaded(config=run, given={})


def _prepare_function(loaded: Loaded) -> Callable[[Config], object] | None:
    if loaded.recipe is None or loaded.recipe.prepare is None:
        return None
    return plugins.load_preparation(loaded.recipe.prepare)


def _require_new(output: Path) -> None:
    if output.exists():
        raise DataError(f"{output} exists already: give another file, or remove it first")


def _gather_rows(config: Config, keys: Sequence[str], mistakes: Mistakes) -> dict[str, list[DataRow] | None]:
    """The rows of each key's files, None where a file is missing or cannot be read. Notes what is wrong with them."""
    rows = {key: _rows(config, key, mistakes) for key in keys}
    # A key may name one environment for all rows; another generator may play without environments.
    if config.environment.env_class is None and config.generator.type == "environment":
        for found in rows.values():
            _gather_environments(found or [], mistakes)
    return rows


def _rows(config: Config, key: str, mistakes: Mistakes) -> list[DataRow] | None:
    files = value_at(config, key)
    if not files or not all(Path(file).is_file() for file in files):
        return None  # a mistake that is known, or what the recipe is going to make
    with mistakes.gathered():
        return read_rows(files, key=key)
    return None


def _gather_environments(rows: Sequence[DataRow], mistakes: Mistakes) -> None:
    """Notes the first row without an environment, and the first of each environment that cannot be loaded."""
    seen: set[object] = set()
    for row in rows:
        name = row.row.get("env_class")
        name = name if isinstance(name, str) and name else None
        if name not in seen:
            seen.add(name)
            mistakes.passes(_require_environment, row, name)


def _require_environment(row: DataRow, name: str | None) -> None:
    if name is None:
        raise ConfigError(
            f"{row.place}: the row has no 'env_class' and environment.env_class is not set; give one of the two"
        )
    plugins.load("rl_core.environments", name, key=f"{row.place}: env_class")


def _gather_ranks(config: Config, train_rows: Sequence[DataRow] | None, mistakes: Mistakes) -> None:
    """Notes what the trainer does not understand of the algorithm, and what the backend cannot train."""
    if not mistakes.about(*_UPDATE_READS):
        mistakes.passes(update_settings, config)
    # Data that the recipe is going to make cannot be counted yet: any schedule will do until then.
    steps, roles = sys.maxsize, []
    if not mistakes.about("trainer.epochs", "trainer.train_batch_size", "trainer.max_training_steps"):
        with mistakes.gathered():
            steps = _planned_steps(config, train_rows)
    if not mistakes.about(*_RANKS_READ, "trainer.algorithm.advantage_estimator"):
        with mistakes.gathered():
            roles = list(model_shapes(config))
    for role in roles:
        if not mistakes.about(SECTIONS[role]):
            mistakes.passes(_require_trainable, config, role, steps, mistakes)


def _planned_steps(config: Config, train_rows: Sequence[DataRow] | None) -> int:
    """Steps of the run, `sys.maxsize` where neither the configuration nor rows say how many."""
    steps = config.trainer.max_training_steps
    if steps is None:
        return sys.maxsize if train_rows is None else num_steps(config, len(train_rows))
    return steps


def _require_trainable(config: Config, role: Role, num_training_steps: int, known: Mistakes) -> None:
    """The backend can train this model, and a micro-batch of its ranks holds the longest sequence."""
    nodes, per_node = model_shapes(config)[role]
    backend, spec = worker_spec(config, role, num_training_steps=num_training_steps)
    backend.validate(spec, nodes * per_node)
    if not known.about(*_BUDGET_READS):
        require_token_budget(config, backend.mesh(spec.options, nodes * per_node))


def require_token_budget(config: Config, mesh: Mesh) -> None:
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
