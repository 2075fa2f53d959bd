"""Files and directories that a configuration names: they are there, or can be made."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from rl_core.config.resolving import value_at
from rl_core.config.tree import Config
from rl_core.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_files(config: Config, *, reads: str = "data.train_data", makes: Container[str] = ()) -> None:
    """Data, models and the checkpoint to resume from are there; the run directory can be written.

    Args:
        reads: the key of the data without which there is no run.
        makes: paths that may be missing, because they are going to be made.
    """
    _data_exists(config, reads, makes)
    _models_exist(config, makes)
    _resume_path_exists(config)
    _run_dir_is_writable(config)


def _data_exists(config: Config, reads: str, makes: Container[str]) -> None:
    if not value_at(config, reads):
        raise ConfigError(f"{reads}: no file is given; give e.g. {reads}=prompts.parquet")
    for key in ("data.train_data", "data.val_data"):
        require_files(config, key, makes)


def require_files(config: Config, key: str, makes: Container[str]) -> None:
    for file in value_at(config, key):
        if not Path(file).is_file() and (file not in makes or Path(file).exists()):
            reason = "is a directory" if Path(file).is_dir() else "does not exist"
            raise ConfigError(f"{key}: the file {file} {reason} (seen from {Path.cwd()})")


def require_policy_model(config: Config) -> None:
    if config.trainer.policy.model.path is None:
        raise ConfigError("trainer.policy.model.path: no model is given; give a Hugging Face model directory or name")


def _models_exist(config: Config, makes: Container[str]) -> None:
    require_policy_model(config)
    paths = {"trainer.policy.model.path": config.policy_model_path}
    if config.trainer.algorithm.needs_reference:
        paths["trainer.ref.model.path"] = config.ref_model_path
    if config.critic_model_path != config.policy_model_path:
        paths["trainer.critic.model.path"] = config.critic_model_path
    for key, path in paths.items():
        if path not in makes or Path(path).exists():
            require_model(key, path)


def require_model(key: str, path: str) -> None:
    """Looks only at local directories: a name such as `org/model` is for the backend to find."""
    directory = Path(path)
    if not directory.exists():
        is_name = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")
        if is_name:
            return
        raise ConfigError(f"{key}: the directory {path} does not exist (seen from {Path.cwd()})")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{key}: {path} has no config.json; expected a model directory in Hugging Face format")
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}: {path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); save the model's tokenizer there"
        )


def _resume_path_exists(config: Config) -> None:
    path = config.trainer.resume_path
    if path is not None and not Path(path).is_dir():
        raise ConfigError(f"trainer.resume_path: {path} is not a directory; give a checkpoint of an earlier run")


def _run_dir_is_writable(config: Config) -> None:
    for key, directory in (
        ("trainer.run_dir", config.run_dir),
        ("trainer.ckpt_path", config.ckpt_dir),
        ("trainer.export_path", config.export_dir),
    ):
        existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key}: {directory} cannot be created: {existing} is not a directory that can be written"
            )
