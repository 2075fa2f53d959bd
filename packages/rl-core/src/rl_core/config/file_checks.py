"""Checks that the files and directories that a configuration names exist or can be created."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Container, Sequence
from importlib.util import find_spec
from pathlib import Path

from rl_core.config.function_params import needs_reference
from rl_core.config.resolving import value_at
from rl_core.config.tree import Config
from rl_core.data_sets import is_data_set
from rl_core.errors import ConfigError, Mistakes, RLError
from rl_core.hub import is_cached, is_name
from rl_core.remote_files import exists, is_remote

ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_files(config: Config, *, makes: Container[str] = ()) -> None:
    """Checks that data, models and the checkpoint to resume from exist, and that the run's directories can be written.

    Args:
        makes: paths that may be missing because they will be created.

    Raises:
        ConfigError: one of these checks fails; ConfigErrors: several do.
    """
    mistakes = Mistakes()
    gather_files(config, mistakes, makes=makes)
    mistakes.raise_found()


def gather_files(config: Config, mistakes: Mistakes, *, makes: Container[str] = (), needs: str = "") -> None:
    """Records the errors that `check_files` would raise. `needs` explains how to get the data files."""
    gather_data(config, ("data.train_data", "data.val_data"), mistakes, makes=makes, needs=needs)
    _gather_models(config, mistakes, makes)
    mistakes.passes(_resume_path_exists, config)
    _gather_directories(config, mistakes)


def gather_data(
    config: Config, keys: Sequence[str], mistakes: Mistakes, *, makes: Container[str], needs: str = ""
) -> None:
    """Records every missing data file, and an error if the first key names no file. A file that several keys name is
    recorded only once."""
    if not value_at(config, keys[0]):
        mistakes.add(ConfigError(f"got no file; set e.g. {keys[0]}=prompts.parquet", key=keys[0]))
    seen: set[str] = set()
    for key in keys:
        for file in value_at(config, key):
            if file in seen:
                continue
            seen.add(file)
            if mistakes.passes(_require_reachable, key, file) and (file not in makes or Path(file).exists()):
                mistakes.passes(_require_data, key, file, needs)


def _require_reachable(key: str, path: str) -> None:
    """Requires that this user can look up the path, and can read it if it exists."""
    try:
        is_directory = stat.S_ISDIR(Path(path).stat().st_mode)
        may_read = os.access(path, os.R_OK | os.X_OK if is_directory else os.R_OK)
        reason = None if may_read else os.strerror(errno.EACCES)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # no permission, a name that is too long, or a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
    if reason:
        raise ConfigError(f"{path} cannot be read: {reason}. Set a path that this user can read", key=key)


def _require_data(key: str, file: str, needs: str) -> None:
    """Requires that a local or remote file exists. Accepts every data set, because loading it reports its errors."""
    if Path(file).is_file() or is_data_set(file):
        return
    if not is_remote(file):
        remedy = f"; {needs}" if needs else ""
        raise ConfigError(f"the file {file} does not exist (current directory: {Path.cwd()}){remedy}", key=key)
    try:
        is_there = exists(file)
    except OSError as error:  # such as a bucket that this user may not read
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}", key=key) from error
    if not is_there:
        raise ConfigError(f"the file {file} does not exist", key=key)


def gather_policy_model(config: Config, mistakes: Mistakes, *, makes: Container[str]) -> None:
    """Records an error if the policy's model is missing. Training and evaluation both need this model."""
    key = "trainer.policy.model.path"
    if config.trainer.policy.model.path is None:
        mistakes.add(ConfigError("got no model; set it to a Hugging Face model directory or name", key=key))
    else:
        _gather_model(key, config.policy_model_path, mistakes, makes)


def _gather_models(config: Config, mistakes: Mistakes, makes: Container[str]) -> None:
    gather_policy_model(config, mistakes, makes=makes)
    seen = {config.trainer.policy.model.path}
    others = {"trainer.critic.model.path": config.trainer.critic.model.path}
    is_referred_to = False
    with contextlib.suppress(RLError):  # another check reports a loss or estimator that cannot be loaded
        is_referred_to = needs_reference(config)
    if is_referred_to:
        others = {"trainer.ref.model.path": config.trainer.ref.model.path, **others}
    for key, path in others.items():
        if path is not None and path not in seen:
            _gather_model(key, path, mistakes, makes)
            if not mistakes.about("trainer.policy.model", key):
                mistakes.passes(_require_embeddings, key, path, config.policy_model_path)
            seen.add(path)
    if is_referred_to and not mistakes.about("trainer.policy.model", "trainer.ref.model"):
        mistakes.passes(_require_same_vocabulary, config)


def _require_same_vocabulary(config: Config) -> None:
    """Raises ConfigError if policy and reference have different vocabularies, because the reference scores the policy's
    token ids. Compares only models in local directories."""
    policy, reference = config.policy_model_path, config.trainer.ref.model.path
    if reference is None or reference == policy:
        return
    ours, theirs = (_token_ids(Path(path)) for path in (policy, reference))
    if ours is None or theirs is None:
        return
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if other is not None:
        found = f"token {theirs[other]} of the reference" if other in theirs else "not a token of the reference"
        raise ConfigError(
            f"{reference} and the policy, {policy}, have different vocabularies: {other!r} is token {ours[other]} of "
            f"the policy and {found}. The reference scores the policy's token ids; use a reference with the same "
            "tokenizer",
            key="trainer.ref.model.path",
        )


def _require_embeddings(key: str, path: str, policy: str) -> None:
    """Raises ConfigError if the policy has a token for which another model, which scores the policy's token ids, has no
    embedding. Compares only models in local directories."""
    ids, ours, theirs = _token_ids(Path(policy)), _vocab_size(Path(policy)), _vocab_size(Path(path))
    if not ids or ours is None or theirs is None:
        return
    token = max(ids, key=lambda token: ids[token])
    if theirs <= ids[token] < ours:
        raise ConfigError(
            f"{path} has embeddings for {theirs} tokens, but the policy, {policy}, also has token {ids[token]} "
            f"({token!r}); give {path} embeddings for all tokens (resize_token_embeddings in transformers)",
            key=key,
        )


def _vocab_size(model: Path) -> int | None:
    """`vocab_size` of `config.json`; None if the model is not a local directory or the file has no such number."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        size = {**config, **config.get("text_config", {})}.get("vocab_size")
    except (OSError, ValueError, TypeError, AttributeError):  # the backend names what is wrong with the file
        return None
    return size if isinstance(size, int) else None


def _token_ids(model: Path) -> dict[str, int] | None:
    """Token → id, from `tokenizer.json`; None if the model is not a local directory or has no such file."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        # Unigram models have a list of (token, score) pairs; the index is the id.
        ids = (
            dict(vocabulary)
            if isinstance(vocabulary, dict)
            else {token: number for number, (token, _) in enumerate(vocabulary)}
        )
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: the vocabulary cannot be read ({error!r}); save the model's tokenizer again"
        ) from error


def _gather_model(key: str, path: str, mistakes: Mistakes, makes: Container[str]) -> None:
    if not mistakes.passes(_require_reachable, key, path):
        return
    directory = Path(path)
    # The recipe creates a missing model, and replaces an incomplete one. It leaves an empty directory as it is.
    is_made = path in makes and (not directory.exists() or (directory.is_dir() and any(directory.iterdir())))
    if not is_made:
        mistakes.passes(_require_model, key, path)


def _require_model(key: str, path: str) -> None:
    """Requires a configuration and a tokenizer if the path is local. The backend resolves names such as `org/model`."""
    directory = Path(path)
    if not directory.exists():
        if is_name(path):
            if find_spec("huggingface_hub") is not None:
                require_no_adapter(key, path)
            return
        raise ConfigError(f"the directory {path} does not exist (current directory: {Path.cwd()})", key=key)
    if not (directory / "config.json").is_file():
        adapter = ", only a LoRA adapter" if (directory / ADAPTER_FILE).is_file() else ""
        raise ConfigError(
            f"{path} has no config.json{adapter}; expected a model directory in Hugging Face format", key=key
        )
    require_no_adapter(key, path)
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); save the model's tokenizer there", key=key
        )


def require_no_adapter(key: str, path: str) -> None:
    """Raises ConfigError if a model, given by directory or by the name of a model in the hub's cache, has a LoRA
    adapter beside its weights. transformers would load the adapter too, and name all weights as peft does."""
    directory = Path(path)
    if (directory / ADAPTER_FILE).is_file() if directory.is_dir() else is_cached(path, ADAPTER_FILE):
        raise ConfigError(
            f"{path} has a LoRA adapter ({ADAPTER_FILE}) beside the model, which transformers would load on top of the "
            f"weights. If the weights already contain the adapter, remove {ADAPTER_FILE} and adapter_model.*; "
            "otherwise merge it (peft: merge_and_unload) and save the merged model to another directory",
            key=key,
        )


def _resume_path_exists(config: Config) -> None:
    path = config.trainer.resume_path
    if path is None:
        return
    _require_reachable("trainer.resume_path", path)
    if not Path(path).is_dir():
        raise ConfigError(
            f"{path} is not a directory; set it to a checkpoint of an earlier run", key="trainer.resume_path"
        )


def _gather_directories(config: Config, mistakes: Mistakes) -> None:
    """Records remote addresses where a local directory is needed. Also records every file or permission that prevents
    creating directories of the run. Each is recorded only once, even if it affects several directories."""
    for key in ("trainer.run_dir", "trainer.export_path", "trainer.resume_path"):
        if is_remote(value_at(config, key) or ""):
            mistakes.add(
                ConfigError(
                    f"{value_at(config, key)} is a remote address; use a local directory (checkpoints may be remote, "
                    "in trainer.ckpt_path, and `rl push` uploads a model)",
                    key=key,
                )
            )
    seen: set[str] = set()
    for key, directory in (
        ("trainer.run_dir", config.run_dir),
        ("trainer.ckpt_path", config.ckpt_dir),
        ("trainer.export_path", config.export_dir),
    ):
        problem = why_not_created(directory.absolute())
        if problem and problem not in seen:
            seen.add(problem)
            mistakes.add(ConfigError(f"{directory} cannot be created: {problem}", key=key))


def why_not_created(directory: Path) -> str | None:
    """Why this user cannot create files in the directory at this absolute path, even after creating the directory if it
    is missing. None if the user can."""
    for path in (directory, *directory.parents):
        try:
            is_directory = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if _is_link(path):
                return f"{path} is a link to {path.readlink()}, which does not exist or cannot be looked up"
            continue  # the nearest existing parent decides
        except (OSError, ValueError) as error:  # such as a name that is too long
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if is_directory and os.access(path, os.W_OK | os.X_OK):
            # Looking up a path below a missing directory does not report that a name is too long.
            too_long = any(len(os.fsencode(part)) > os.pathconf(path, "PC_NAME_MAX") for part in directory.parts)
            return os.strerror(errno.ENAMETOOLONG) if too_long else None
        return f"{path} is not a writable directory"
    return None


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # no permission
        return False
