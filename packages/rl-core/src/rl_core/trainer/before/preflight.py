"""Checks configuration, data and models before the start of a training run, an evaluation or a generation of responses.

`rl train`, its dry run and `run_training` call `preflight`; `rl eval`, `rl generate`, `run_evaluation` and
`run_generation` call `prepare_playing`. Independent mistakes are raised together. Files that a recipe creates are
checked before the start if they exist already, otherwise after the recipe has created them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_core import hub, plugins
from rl_core.config import Config, Loaded, generator_spec, needs_engine
from rl_core.config.checking import passes, result_of
from rl_core.config.checks import gather_playing, gather_plugins, gather_room
from rl_core.config.context import EVALUATION, TRAINING
from rl_core.config.file_checks import gather_files, require_no_adapter, why_not_created
from rl_core.config.resolving import value_at
from rl_core.config.specs import environment_options
from rl_core.config.value_checks import gather_values, longest_prompt
from rl_core.errors import ConfigError, DataError, Mistakes, PluginError, ShapeError, install
from rl_core.interfaces import (
    Completion,
    Environment,
    GenerateRequest,
    Role,
    Sampler,
)
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import padded_lengths
from rl_core.rank_kit.model_shapes import written_config
from rl_core.rank_kit.shipped_configs import shipped_config
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_core.stored_files import is_found
from rl_core.trainer.before.conversation_proof import require_proved
from rl_core.trainer.before.data import is_at_hand
from rl_core.trainer.before.environment_checks import configured_rows, gather_unplayable
from rl_core.trainer.before.planned_run import longest_sequence, require_fitting_model
from rl_core.trainer.before.prompt_lengths import fitting_rows
from rl_core.trainer.before.settings import model_shapes, num_steps, update_settings, worker_spec
from rl_core.trainer.before.streaming import made_up_batch, require_streamable
from rl_core.trainer.groups import DataRow
from rl_core.trainer.state.checkpoint import load_state
from rl_core.trainer.state.fingerprint import fingerprint, require_same_groups, warn_of_changes
from rl_core.trainer.state.run_directory import checkpoint_to_resume, require_own_files
from rl_core.trainer.state.run_lock import require_unused
from rl_core.trainer.update.batch_advantages import with_advantages
from rl_core.trainer.update.batch_update import UpdateSettings

logger = logging.getLogger(__name__)

_TRAINING_DATA = ("data.train_data", "data.val_data")


_FEW = 32
"""Before a run, this many of the shortest and as many of the longest prompts (by characters) are encoded."""


_MOST_SAMPLES = 256
"""Largest number of made-up samples of a prompt, so that a trial takes well below a second."""


class NoSampler(Sampler):
    """The sampler that a generator gets if it will not sample: before a run, or if responses come from the data."""

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        raise AssertionError("nothing is sampled before a run, or if responses come from the data")


def preflight(run: Config | Loaded, *, says_changes: bool = True) -> tuple[str, ...]:
    """Makes all checks of a training run that are possible before the start. Writes nothing but the record of a
    successful comparison with transformers (`Backend.prove`).

    Args:
        run: a resolved configuration, or one with the recipe that it comes from.
        says_changes: whether to log what differs from the checkpoint to resume from. Nothing is logged if the
            checkpoint or the rows do not exist yet. A run passes False, because it logs the differences later.

    Returns:
        One sentence for each check that is possible only when the run starts.

    Raises:
        ConfigError, PluginError, DataError: the mistake that was found; ConfigErrors: several mistakes.
        CheckpointError: the checkpoint to resume from is missing or damaged.
    """
    config, loaded = config_of(run), _loaded(run)
    mistakes = Mistakes()
    gather_values(config, mistakes)
    gather_files(config, mistakes, makes=loaded.makes, needs=loaded.needs)
    gather_plugins(config, mistakes, chosen=loaded.chosen_keys)
    mistakes.passes(_prepare_function, loaded)
    rows = _gather_rows(loaded, _TRAINING_DATA, mistakes)
    _gather_prompts(config, rows, mistakes, makes=loaded.makes)
    _gather_ranks(config, rows["data.train_data"], mistakes)
    passes(mistakes, require_unused, config)
    passes(mistakes, require_own_files, config)
    now = _fingerprint(config, rows)
    if passes(mistakes, _require_resumable, config, now) and says_changes and now is not None:
        say_changes(config, now)
    mistakes.raise_found()
    # Last, and only if everything else is right, because it takes seconds.
    left = _prove_models(config)
    if _is_elsewhere(config.policy_model_path):
        left += (f"prompt lengths are checked at the start ({config.policy_model_path} is not downloaded yet)",)
    return left


def _is_elsewhere(path: str) -> bool:
    """Whether only the model's sizes are known, because it is a public model that has not been downloaded."""
    return shipped_config(path) is not None and written_config(path) is None


def _fingerprint(config: Config, rows: Mapping[str, list[DataRow] | None]) -> dict[str, Any] | None:
    train_rows = rows["data.train_data"]
    return None if train_rows is None else fingerprint(config, train_rows, rows["data.val_data"])


def _require_resumable(config: Config, now: Mapping[str, Any] | None) -> None:
    """Requires that the checkpoint to resume from, if there is one, passes `load_state`. If `now`, this run's
    fingerprint, is known, also requires that the checkpoint's group numbers mean the same prompts in this run."""
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is not None:
        load_state(checkpoint)
        if now is not None:
            require_same_groups(checkpoint, now)


def say_changes(config: Config, now: Mapping[str, Any]) -> None:
    """Logs what differs from the checkpoint to resume from, if there is one."""
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is not None:
        warn_of_changes(checkpoint, now)


def prepare(run: Config | Loaded) -> None:
    """Downloads models given by name, lets the recipe create missing data and models, and checks what it created. The
    caller must have locked the run's directories.

    Raises:
        ConfigError, DataError, PluginError: a model cannot be downloaded, or the run cannot train on what was created;
            ConfigErrors: several reasons.
    """
    config, make = config_of(run), _prepare_function(_loaded(run))
    _fetch_models(config, list(model_shapes(config)), _loaded(run).makes)
    mistakes = Mistakes()
    if make is None:
        gather_room(config, mistakes)
        mistakes.raise_found()
        return
    were_read = _at_hand(config, _TRAINING_DATA)
    make(config)
    gather_files(config, mistakes)
    rows = _gather_rows(_loaded(run), _TRAINING_DATA, mistakes, were_read=were_read)
    gather_room(config, mistakes)
    mistakes.passes(_planned_steps, config, rows["data.train_data"])
    mistakes.raise_found()
    _prove_models(config)


def prepare_playing(run: Config | Loaded, *, reads: str, output: Path | None = None) -> None:
    """Makes all checks for playing prompts without training. Between the checks, a model given by name is downloaded,
    and the recipe creates missing files; nothing else is written.

    Args:
        run: as in `preflight`.
        reads: the configuration key of the data files with the prompts.
        output: a file that the caller will write, and that must not exist yet; None: no file.

    Raises:
        ConfigError, PluginError, DataError: the mistake that was found; ConfigErrors: several mistakes.
    """
    config, loaded = config_of(run), _loaded(run)
    mistakes = Mistakes()
    if output is not None:
        mistakes.passes(_require_new, output)
    mistakes.passes(_require_playing, config)
    gather_playing(config, mistakes, reads=reads, makes=loaded.makes, needs=loaded.needs)
    mistakes.passes(_prepare_function, loaded)
    _gather_prompts(config, _gather_rows(loaded, [reads], mistakes), mistakes, makes=loaded.makes)
    mistakes.raise_found()
    make = _prepare_function(loaded)
    _fetch_models(config, ["policy"], loaded.makes)
    if make is None:
        gather_room(config, mistakes)
    else:
        were_read = _at_hand(config, [reads])
        make(config)
        gather_playing(config, mistakes, reads=reads)
        _gather_rows(loaded, [reads], mistakes, were_read=were_read)
    mistakes.raise_found()


def config_of(run: Config | Loaded) -> Config:
    """The configuration itself, or the one in the result of `rl_core.config.load`."""
    return run.config if isinstance(run, Loaded) else run


def _loaded(run: Config | Loaded) -> Loaded:
    """Wraps a plain configuration in a `Loaded`. A plain configuration does not record which keys the user set, so none
    counts as set, and keys without an effect cause no warning."""
    return run if isinstance(run, Loaded) else Loaded(config=run, given={})


def _prepare_function(loaded: Loaded) -> Callable[[Config], object] | None:
    if loaded.recipe is None or loaded.recipe.prepare is None:
        return None
    return plugins.load_preparation(loaded.recipe.prepare)


def _fetch_models(config: Config, roles: Sequence[Role], made: Container[str]) -> None:
    """Downloads the models given by name into the hub's cache, before many processes request them at once. `made`:
    paths that the recipe creates."""
    fetched: set[str] = set()
    for role in roles:
        key = f"{SECTIONS[role]}.model.path"
        path = value_at(config, key)
        if path not in fetched and path not in made and hub.is_name(path):
            hub.fetch_model(path, key=key)
            require_no_adapter(key, path)
            fetched.add(path)


def _require_playing(config: Config) -> None:
    if not needs_engine(config):
        raise ConfigError(
            f"{config.generator.type!r} plays no prompts but reads responses from the rows; set "
            "generator.type=environment and an environment to see what the model answers",
            key="generator.type",
        )


def _require_new(output: Path) -> None:
    if is_found(output):
        raise DataError(f"{output} already exists: choose another file, or remove it first")
    if problem := why_not_created(output.absolute()):
        raise DataError(f"--output: {output} cannot be created: {problem}. Choose another file")


def _at_hand(config: Config, keys: Sequence[str]) -> list[str]:
    """The keys whose data files all exist already. The checks before the recipe runs have read these files."""
    return [key for key in keys if all(map(is_at_hand, value_at(config, key)))]


def _gather_rows(
    loaded: Loaded, keys: Sequence[str], mistakes: Mistakes, *, were_read: Container[str] = ()
) -> dict[str, list[DataRow] | None]:
    """Reads the rows of each key's files (None if a file is missing or unreadable), and notes mistakes in the rows.
    Warns of rows whose own environment is ignored. Skips this warning for the keys in `were_read`, because an earlier
    call gave it."""
    config = loaded.config
    rows = {key: _rows(config, key, mistakes) for key in keys}
    # Other generators may play without environments, so their rows are not checked against environments.
    if config.generator.type == "environment" and not mistakes.about("environment.env_class"):
        everything = [row for found in rows.values() for row in found or []]
        if config.environment.env_class is None:
            _gather_environments(everything, mistakes)
        else:
            unread = [row for key, found in rows.items() if key not in were_read for row in found or []]
            mistakes.passes(_require_own_environment, loaded, unread)
        _gather_unfit_rows(config, everything, mistakes)
        _gather_unmet_constraints(config, everything, mistakes)
    return rows


def _require_own_environment(loaded: Loaded, rows: Sequence[DataRow]) -> None:
    """Checks rows that name another environment than `environment.env_class`. Raises ConfigError if the recipe set
    this key, and the user set neither this key nor reward functions. Otherwise warns that the rows' environments are
    ignored."""
    key, chosen = "environment.env_class", loaded.config.environment.env_class
    others = [row for row in rows if isinstance(row.row.get("env_class"), str) and row.row["env_class"] != chosen]
    if not others:
        return
    message = (
        f"{chosen!r} applies to all rows, but {len(others)} of {len(rows)} rows name another environment, first "
        f"{others[0].row['env_class']!r} ({others[0].place})"
    )
    is_users = key in loaded.chosen_keys or loaded.config.environment.reward_functions
    if loaded.recipe is not None and not is_users:
        raise ConfigError(
            f"{message}. The recipe set the key: write {key}=null to play each row's own environment, or "
            f"{key}={chosen} to play this one for all rows",
            key=key,
        )
    ignored = "these names are ignored. With %s=null, each row's own environment is played"
    logger.warning(f"%s: %s; {ignored}", key, message, key)


def _gather_unfit_rows(config: Config, rows: Sequence[DataRow], mistakes: Mistakes) -> None:
    """Notes what the environments' own checks find in their options and rows."""
    chosen, options = config.environment.env_class, environment_options(config.environment)
    played: dict[str, list[DataRow]] = {} if chosen is None else {chosen: []}
    for row in rows:
        name = chosen or row.row.get("env_class")
        if isinstance(name, str):
            played.setdefault(name, []).append(row)
    for name, of_it in played.items():
        try:
            environment = plugins.load("rl_core.environments", name)
        except PluginError:  # noted by the check of the environment's name
            continue
        remedy = ". data.on_refused_row=drop leaves out all rows that the environment refuses"
        gather_unplayable(name, environment, options, of_it, mistakes, remedy=remedy)


def _gather_unmet_constraints(config: Config, rows: Sequence[DataRow], mistakes: Mistakes) -> None:
    """Notes a mistake for each environment that forces responses, if the engine accepts no grammars."""
    key, engine = "generator.inference_engine.backend", config.generator.inference_engine.backend
    try:
        plugin = plugins.load("rl_core.inference", engine)
        named = (row.row.get("env_class") for row in rows)
        played = named if config.environment.env_class is None else [config.environment.env_class]
        names = {name for name in played if isinstance(name, str)}
        environments: dict[str, type[Environment]] = {
            name: plugins.load("rl_core.environments", name) for name in names
        }
    except PluginError:  # noted by the checks of the names
        return
    if plugin.accepts_structural_tags:
        return
    for name in sorted(name for name, environment in environments.items() if environment.forces_responses):
        mistakes.add(
            ConfigError(
                f"got {engine!r}, which accepts no grammars, but the environment {name!r} forces some responses by a "
                "grammar (`structural_tag`). Set the key to an engine that accepts grammars, such as vllm, or choose "
                "another environment",
                key=key,
            )
        )


def _gather_prompts(
    config: Config, rows: Mapping[str, list[DataRow] | None], mistakes: Mistakes, *, makes: Container[str]
) -> None:
    """Notes prompts that are too long, conversations that the chat template does not render completely, and a
    tokenizer that cannot be loaded. Encodes only the prompts with the most and the fewest characters, and rows that may
    have tokens beyond the model's vocabulary; the run later encodes all rows. Does nothing if other mistakes were
    found, if the model is not on this machine yet, or if creating the generator may start processes."""
    if mistakes:
        return
    is_made = config.policy_model_path in makes
    if is_made and not Path(config.policy_model_path).exists():
        return
    # A sampling generator of another type may start processes when it is created.
    if config.generator.type != "environment" and needs_engine(config):
        return
    if _is_elsewhere(config.policy_model_path):
        return
    with mistakes.gathered():
        plugin, spec = generator_spec(config)
        try:
            generator = plugin.create(spec, NoSampler())
        except ConfigError:
            if is_made:
                return  # the model directory is incomplete and will be created again
            raise
        for key, found in rows.items():
            if not found:
                continue
            require_proved(found, generator)
            ordered = sorted(found, key=lambda row: len(str(row.row["prompt"])))
            few, last = ordered[:_FEW], max(_FEW, len(ordered) - _FEW)
            likely = [
                *few,
                *ordered[last:],
                *(row for row in ordered[_FEW:last] if generator.may_have_unknown_tokens(row.row)),
            ]
            sampling = TRAINING if key == _TRAINING_DATA[0] else EVALUATION
            try:
                fitting_rows(likely, generator, config, sampling)
            except DataError:
                if len(likely) == len(found) or config.data.on_long_prompt != "drop":
                    raise
                fitting_rows(found, generator, config, sampling)  # other rows may be short enough


def _rows(config: Config, key: str, mistakes: Mistakes) -> list[DataRow] | None:
    files = value_at(config, key)
    if not files or not all(is_at_hand(file) for file in files) or mistakes.about(key):
        return None  # a known mistake, or a file that the recipe will create
    with mistakes.gathered():
        return configured_rows(config, key)
    return None


def _gather_environments(rows: Sequence[DataRow], mistakes: Mistakes) -> None:
    """Notes the first row without an environment and, for each environment that cannot be loaded, the first row that
    names it."""
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
            f"{row.place}: the row has no 'env_class' and environment.env_class is not set; set one of the two, "
            "or environment.reward_functions"
        )
    plugins.load("rl_core.environments", name, key=f"{row.place}: env_class")


def _gather_ranks(config: Config, train_rows: Sequence[DataRow] | None, mistakes: Mistakes) -> None:
    """Notes mistakes in algorithm settings and in the number of steps. Also notes models that the backend cannot train,
    and notes if Ray is needed but not installed."""
    passes(mistakes, _require_update, config)
    # Data that the recipe will create cannot be counted yet. For these checks, any schedule length will do.
    steps = result_of(mistakes, _planned_steps, config, train_rows) or sys.maxsize
    roles = list(result_of(mistakes, model_shapes, config) or ())
    for role in roles:
        passes(mistakes, _require_trainable, config, role, steps)
    passes(mistakes, _require_ray, config, roles)


def _require_update(config: Config) -> None:
    """Requires settings with which a batch can be trained on, and, if steps are streamed, single groups."""
    update = update_settings(config)
    _try_estimator(config, update)
    if config.trainer.stream_groups:
        require_streamable(config, update)


def _try_estimator(config: Config, update: UpdateSettings) -> None:
    """Runs the advantage estimator on made-up groups, so that a wrong setting fails before the run. Errors about the
    groups themselves do not count: real groups may be different."""
    if update.estimator is None:
        return
    key, name = "trainer.algorithm.advantage_estimator", config.trainer.algorithm.advantage_estimator
    batch = made_up_batch(max(1, min(config.generator.n_samples_per_prompt, _MOST_SAMPLES)), seed=1)
    try:
        with_advantages(batch, update.estimator, update.estimator_params)
    except (DataError, ShapeError):
        return
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}", key=key) from error
    except Exception as error:
        message = f"{name!r} failed on made-up groups: {type(error).__name__}: {error}"
        raise PluginError(message, key=key) from error


def _planned_steps(config: Config, train_rows: Sequence[DataRow] | None) -> int:
    """Number of steps of the run; `sys.maxsize` if neither configuration nor rows determine it."""
    steps = config.trainer.max_training_steps
    if steps is None:
        return sys.maxsize if train_rows is None else num_steps(config, len(train_rows))
    return steps


def _require_trainable(config: Config, role: Role, num_training_steps: int) -> None:
    """Requires that the backend can train this model, and that the longest sequence fits into a micro-batch."""
    nodes, per_node = model_shapes(config)[role]
    backend, spec = worker_spec(config, role, num_training_steps=num_training_steps)
    with _keys_of(role, backend.config_section):
        backend.validate(spec, nodes * per_node)
    require_token_budget(config, backend.mesh(spec.options, nodes * per_node))
    require_fitting_model(config, backend, spec)


def _require_ray(config: Config, roles: Sequence[Role]) -> None:
    """Requires Ray if a model of the run has ranks outside this process."""
    if not roles or find_spec("ray") is not None:
        return
    shapes, backend = model_shapes(config), plugins.load("rl_core.backends", config.trainer.strategy)
    apart: list[Role] = [role for role in roles if shapes[role] != (1, 1) or backend.needs_own_process()]
    if apart:
        nodes, per_node = shapes[apart[0]]
        raise ConfigError(
            f"the ranks of the {apart[0]} ({nodes * per_node}) run on Ray, which is not installed: "
            f"{install('rl-core[ray]')}",
            key="trainer.placement",
        )


def _prove_models(config: Config) -> tuple[str, ...]:
    """Proves that the backend computes each model correctly, if it has its own model code. Returns one sentence, with
    the reason, for each model that can be proved only when the run starts."""
    mistakes, left = Mistakes(), []
    for role in model_shapes(config):
        backend, spec = worker_spec(config, role, num_training_steps=None)
        with mistakes.gathered():
            if (reason := backend.prove(spec)) is not None:
                where = f"{SECTIONS[role]}.model.path"
                left.append(f"{where}: the model will be compared with transformers at the start ({reason})")
    mistakes.raise_found()
    return tuple(left)


@contextmanager
def _keys_of(role: Role, section: str) -> Iterator[None]:
    """Completes the keys of a backend's errors, which begin with the backend's section but do not name the model."""
    try:
        yield
    except ConfigError as error:
        if not f"{error.key}.".startswith(f"{section}."):
            raise
        raise error.below(SECTIONS[role]) from error


def require_token_budget(config: Config, mesh: Mesh) -> None:
    """Requires that the longest sequence, padded so that the mesh can split it, fits into a micro-batch."""
    budget, multiple = config.trainer.max_tokens_per_microbatch, mesh.sequence_multiple
    longest = longest_sequence(config)
    padded = int(padded_lengths([longest], multiple)[0])
    if 0 < budget < padded:
        raise ConfigError(
            f"{budget} tokens cannot hold the longest sequence: {longest} tokens ({longest_prompt(config)[0]} + "
            f"generator.sampling_params.max_generate_length), padded to {padded}, a multiple of the {multiple} parts "
            f"into which tensor and context ranks split it. Set the key to at least {padded}",
            key="trainer.max_tokens_per_microbatch",
        )
