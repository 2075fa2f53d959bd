"""Runs model proofs one after another, each in a new process forked from a server that has imported everything."""

from __future__ import annotations

import gc
import json
import tempfile
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig, OptimizerConfig, WorkerSpec
from rl_megatron.backend import MegatronBackend
from rl_megatron.options import MegatronOptions
from rl_transformers.pretrained import config_at_hand
from rl_transformers.proof.proof_process import Differences, ProofJob, compare
from rl_transformers.testing.ranks import PRELOADED, fork_server

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker", "tests.megatron.changed", "tests.megatron.proving"]))
WHERE = "trainer.policy.model.path"


def spec_of(path: str, **changes: Any) -> WorkerSpec:
    """The spec of a policy on Megatron."""
    return WorkerSpec(
        **{
            "role": "policy",
            "model": ModelConfig(path=path),
            "optimizer": OptimizerConfig(),
            "options": MegatronOptions(),
            "bf16": False,
            "gradient_checkpointing": False,
            "use_sample_packing": True,
            "logprobs_chunk_size": 64,
            "total_optimizer_steps": None,
            "seed": 0,
            **changes,
        }
    )


def proofs() -> Pool:
    """A pool, used as a context manager, in which each `pool.apply(proved, …)` gets a new process."""
    return fork_server().Pool(processes=1, maxtasksperchild=1, initializer=gc.freeze)


def proved(backend: MegatronBackend, config: dict[str, Any], **changes: Any) -> Differences | str:
    """The differences between the backend and transformers for a `config.json`, or the error that either raises."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            read = config_at_hand(folder, WHERE)
            backend.validate(spec := spec_of(folder, **changes), 1)
            return compare(ProofJob(backend=backend, spec=spec, config=read.to_dict(), where=WHERE))
        except ConfigError as error:
            return str(error)
        except Exception as error:  # as in a proof's process, every error is a result
            return f"{type(error).__name__}: {error}"


def complaint_of(found: Differences | str) -> str | None:
    """The complaint of a proof with this outcome; None if Megatron computes the model like transformers."""
    return found if isinstance(found, str) else found.complaint()
