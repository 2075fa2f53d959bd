"""Workers and batches for the tests in this directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.batch import Batch
from rl_core.interfaces import ModelConfig, OptimizerConfig, RankInfo, WorkerSpec
from rl_fsdp import FsdpOptions, FsdpWorker
from rl_transformers.testing.models import make_checkpoint

StartWorker = Callable[..., FsdpWorker]


@pytest.fixture(scope="session")
def start_worker(tmp_path_factory: pytest.TempPathFactory) -> StartWorker:
    """A function `(checkpoint options as a dict, **fields of WorkerSpec)` that starts a worker. Checkpoints with equal
    options are created once."""
    made: dict[str, Path] = {}

    def start(checkpoint: dict[str, Any] | None = None, **fields: Any) -> FsdpWorker:
        key = repr(sorted((checkpoint or {}).items()))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("model"), **(checkpoint or {}))
        return FsdpWorker(spec_of(made[key], **fields), RankInfo())

    return start


def spec_of(path: Path | str, **fields: Any) -> WorkerSpec:
    """The spec of a policy in float32 with sample packing. `fields` replace its fields."""
    defaults: dict[str, Any] = {
        "role": "policy",
        "model": ModelConfig(path=str(path)),
        "optimizer": OptimizerConfig(lr=1e-3),
        "options": FsdpOptions(),
        "bf16": False,
        "gradient_checkpointing": False,
        "use_sample_packing": True,
        "logprobs_chunk_size": 64,
        "total_optimizer_steps": None,
        "seed": 0,
    }
    return WorkerSpec(**{**defaults, **fields})


def random_batch(lengths: list[int], *, seed: int = 0, vocabulary: int = 40) -> Batch:
    """A random batch: the first third of each sequence is the prompt, and two samples form a group. It has all columns
    of a policy loss except `loss_weights`."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for i, length in enumerate(lengths):
        sampled_T = torch.arange(length) >= max(1, length // 3)
        sequences.append(
            {
                "tokens": torch.randint(vocabulary, (length,), generator=generator),
                "sampled": sampled_T,
                "loss_mask": sampled_T,
                "old_logprobs": -3.7 + 0.3 * torch.randn(length, generator=generator),
                "ref_logprobs": -3.7 + 0.3 * torch.randn(length, generator=generator),
                "advantages": torch.randn(length, generator=generator),
                "group_id": i // 2,
            }
        )
    return Batch.from_sequences(sequences)
