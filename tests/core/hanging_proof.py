"""A program that runs a model proof on a backend that hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rl_core.interfaces import ModelConfig, OptimizerConfig, Worker, WorkerSpec
from rl_transformers.pretrained import config_at_hand
from rl_transformers.proof.model_proof import _compare_in_process


@attrs.frozen(kw_only=True)
class HangingBackend:
    """Writes its process id into a file and hangs."""

    file: Path
    name: str = "hanging"

    def proof_basis(self, spec: WorkerSpec) -> Mapping[str, Any]:
        return {}

    def proof_obstacle(self) -> str | None:
        return None

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        self.file.write_text(str(os.getpid()))
        time.sleep(600)
        raise AssertionError("nothing ended the proof within 600 s")


def main(model: str, file: str) -> None:
    """Runs a model proof that hangs for ten minutes. `file` receives the id of the process that hangs."""
    spec = WorkerSpec(
        role="policy",
        model=ModelConfig(path=model),
        optimizer=OptimizerConfig(),
        options=None,
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=64,
        total_optimizer_steps=None,
        seed=0,
    )
    _compare_in_process(HangingBackend(file=Path(file)), spec, config_at_hand(model, "model").to_dict(), "model")
