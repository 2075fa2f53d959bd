"""Proves on a small copy of a model, before any rank loads the model, that a backend computes it as transformers does.

A backend with its own model code runs the small model (`Provable`). This module does everything else: the small
configuration (`shrunken_models`), random weights and transformers' results (`reference_models`), the comparison in a
separate process (`proof_process`), and a cache file that records the proof for later starts. Imports no torch, and
transformers only to read a configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core import rank_kit
from rl_core.errors import ConfigError
from rl_core.held_folders import held_folder
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_transformers.pretrained import config_at_hand
from rl_transformers.proof.shrunken_models import shrunken

if TYPE_CHECKING:
    from rl_transformers.proof.proof_process import Differences, Provable

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "RL_CACHE_DIR"
"""Environment variable with a cache directory, default `~/.cache/rl`. Its folder `model_proofs` contains the cached
proofs."""
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of the comparison process: a process group of one rank, and one OpenMP thread."""
_DEADLINE_S = 600.0
_proved_here: set[Path] = set()
"""Cache files of the proofs that this process has made, including files that could not be written."""
_LIBRARIES = ("torch", "transformers", "rl-core", "rl-transformers")
_OWN_CODE = (Path(rank_kit.__file__ or "").parent, Path(__file__).parents[1])
REMEDY = "Set trainer.strategy=fsdp, which trains transformers' own model"


def require_proof(backend: Provable, spec: WorkerSpec) -> str | None:
    """Proves that the backend computes the model as transformers does, unless this was proved before. A backend calls
    it in its `prove`.

    Args:
        backend: the backend.
        spec: the spec of one model of a run.

    Returns:
        None if the model is proved or needs no proof; else the reason why this machine cannot prove it now.

    Raises:
        ConfigError: the backend's results differ; the backend or transformers cannot read, build or run the model; or
            the process of the comparison died or took too long.
    """
    if spec.model.path is None:
        return None
    where = f"{SECTIONS[spec.role]}.model.path"
    config = config_at_hand(spec.model.path, where)
    if config is None:
        return f"{spec.model.path} is not on this machine yet"
    fields = config.to_dict()
    small = shrunken(fields, where)
    file = _cache_directory() / f"{_digest([small, _basis(backend, spec)])}.json"
    if file in _proved_here or _is_proved(file):
        return None
    if (obstacle := backend.proof_obstacle()) is not None:
        return obstacle
    logger.info("%s: comparing a small copy of %s with transformers, once", where, spec.model.path)
    differences = _compare_in_process(backend, spec, fields, where)
    if (complaint := differences.complaint()) is not None:
        raise ConfigError(
            f"{backend.name} does not compute {spec.model.path} ({fields.get('model_type')}) as transformers does: "
            f"{complaint}. {REMEDY}",
            key=where,
        )
    _proved_here.add(file)
    _note(file)
    return None


# --- what was proved before -----------------------------------------------------------------------------------------


def _basis(backend: Provable, spec: WorkerSpec) -> Any:
    """Returns everything that the result of a proof depends on, except the model."""
    versions = {name: version_of(name) for name in _LIBRARIES}
    return [versions, *map(_code_digest, _OWN_CODE), backend.proof_basis(spec)]


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def _code_digest(package: Path) -> str:
    return code_digest(package)


def code_digest(package: Path) -> str:
    """A digest of the Python files in and below a folder. Unlike a version number, it changes with every edit."""
    files = sorted(package.rglob("*.py"))
    return _digest([[str(file.relative_to(package)), file.read_text(encoding="utf-8")] for file in files])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _cache_directory() -> Path:
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else Path.home() / ".cache" / "rl") / "model_proofs"


def _is_proved(file: Path) -> bool:
    """Whether the file exists and is complete, that is, contains its own name."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) == {"proved": file.stem}
    except (OSError, ValueError):
        return False


def _note(file: Path) -> None:
    """Writes the cache file atomically. If the cache is not writable, the next start repeats the proof."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
            part.write(json.dumps({"proved": file.stem}))
        Path(part.name).replace(file)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so the next start compares again; set %s to a writable directory",
            file,
            error,
            CACHE_VARIABLE,
        )


# --- the comparison -------------------------------------------------------------------------------------------------


def _compare_in_process(backend: Provable, spec: WorkerSpec, config: Mapping[str, Any], where: str) -> Differences:
    from rl_transformers.proof.proof_process import Differences, ProofJob

    job = ProofJob(backend=backend, spec=spec, config=config, where=where)
    with held_folder(backend.name, "proof") as folder:
        job_file, result_file = folder / "job", folder / "result"
        job_file.write_bytes(pickle.dumps((sys.path, pickle.dumps(job))))
        try:
            exit_code, error_output = run_interpreter(job_file, result_file)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"running a small copy of the model took over {_DEADLINE_S:g} s. {REMEDY}", key=where
            ) from error
        if not result_file.is_file():
            last = error_output.strip().splitlines()[-8:]
            raise ConfigError(
                f"{where}: the process that ran a small copy of the model ended with exit code {exit_code}. "
                f"{REMEDY}. The end of its error output:\n" + "\n".join(last)
            )
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        error = result["error"].removeprefix(f"{where}: ").rstrip(".")
        copied = f"{spec.model.path} ({config.get('model_type')})"
        raise ConfigError(f"{backend.name} cannot run a small copy of {copied}: {error}. {REMEDY}", key=where)
    return Differences(**result["differences"])


def run_interpreter(job_file: Path, result_file: Path) -> tuple[int, str]:
    """Runs `proof_process` in a new interpreter; returns its exit code and its error output.

    Raises:
        subprocess.TimeoutExpired: the process did not end in time; it was killed.
    """
    command = [sys.executable, "-m", "rl_transformers.proof.proof_process", str(job_file), str(result_file)]
    with _lifeline() as stdin:
        run = subprocess.run(
            command,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            env={**os.environ, **ALONE},
        )
    return run.returncode, run.stderr


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Yields the read end of a pipe for the child's stdin. The pipe's write end closes when this process ends, even if
    it is killed; the child then ends, too."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
