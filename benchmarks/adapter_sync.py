"""Cost and precision of syncing a LoRA policy to a vLLM server, as merged weights or as the adapter alone.

Both kinds of sync run on the same random model in bfloat16, each with adapters of several scales. Printed for each kind
and scale: the bytes of a sync, the seconds until the server serves the new weights (the fastest of several syncs), how
much the adapter changes the trainer's log-probs (mean absolute change from the zero adapter), and the mean absolute
difference between the trainer's log-probs and the server's.

    python benchmarks/adapter_sync.py [--rank 16] [--hidden 512] [--layers 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.config import Config, engine_spec, from_mapping
from rl_core.interfaces import Manifest
from rl_core.trainer.before.settings import worker_spec
from rl_core.trainer.publishing.publish import publish_weights
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.launch import create_client
from rl_transformers.testing.models import make_checkpoint

SCALES = (0.0, 0.01, 0.2)
"""Scales of the random B matrices (see `set_adapter`). The first is 0, with which the others are compared."""


def make_config(directory: Path, options: argparse.Namespace, *, merge: bool) -> Config:
    """A configuration with one vLLM server and a policy on one rank."""
    return from_mapping(
        {
            "trainer.policy.model.path": str(directory / "model"),
            "trainer.policy.model.lora.rank": options.rank,
            "trainer.policy.model.lora.alpha": 2 * options.rank,
            "trainer.policy.model.lora.merge_lora": merge,
            "trainer.run_dir": str(directory),
            "trainer.num_threads": 1,
            "generator.inference_engine.backend": "vllm",
        }
    )


def sequences(vocab_size: int) -> list[list[int]]:
    """Random sequences that trainer and server score."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (16, 33), generator=generator).tolist()


async def trainers_logprobs(policy: WorkerGroup, tokens: list[list[int]]) -> Tensor:
    batch = Batch.from_sequences([{"tokens": sequence} for sequence in tokens])
    return (await policy.forward(batch, MicroBatchLimits(max_sequences=4), temperature=1.0))["logprobs"]


async def servers_logprobs(client: RemoteInferenceClient, tokens: list[list[int]]) -> Tensor:
    (scores,) = (await client.score(tokens)).values()
    return torch.tensor([value for sequence in scores for value in sequence])


def set_adapter(policy: Any, scale: float) -> None:
    """Fills the B matrices with normal random numbers of standard deviation scale / √rank; at 0 the adapter changes
    nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy._ranks._host._worker.scorer.named_weights():
            if ".lora_B." in name:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)


def num_bytes(manifest: Manifest) -> int:
    return sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in manifest.tensors.values())


async def measure(config: Config, rounds: int) -> None:
    """Measures one kind of sync and prints bytes, seconds and log-prob differences per adapter scale."""
    engine = config.generator.inference_engine
    transport = plugins.load("rl_core.weight_transports", config.weight_transport)
    client = await create_client(engine_spec(config)[1])
    policy = await WorkerGroup.launch(*worker_spec(config, "policy", num_training_steps=None))
    tokens = sequences(client.vocab_size)
    print("merged" if policy.adapter is None else "alone")
    version, base_T = 0, torch.zeros(())
    for scale in SCALES:
        set_adapter(policy, scale)
        seconds, sent_bytes = [], 0
        for _ in range(rounds):
            start, version = time.perf_counter(), version + 1
            published = await publish_weights(
                policy, client, transport, version, max_bucket_bytes=engine.weight_bucket_bytes
            )
            seconds.append(time.perf_counter() - start)
            sent_bytes = num_bytes(published.sent)
        trainer_T, server_T = await trainers_logprobs(policy, tokens), await servers_logprobs(client, tokens)
        base_T = trainer_T if scale == 0 else base_T
        moved, apart = (float(difference_T.abs().mean()) for difference_T in (trainer_T - base_T, trainer_T - server_T))
        print(
            f"  {sent_bytes / 1e6:8.2f} MB {min(seconds):7.3f} s   log-probs moved by {moved:.3f}, "
            f"trainer and server {apart:.4f} apart",
            flush=True,
        )
    await policy.close()
    await client.close()


def main() -> None:
    """Measures the merged sync, then the sync of the adapter alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes: dict[str, Any] = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "head_dim": 64}
    heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 128}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "model", **sizes, **heads, intermediate_size=3 * options.hidden)
        for merge in (True, False):
            asyncio.run(measure(make_config(Path(folder), options, merge=merge), options.rounds))


if __name__ == "__main__":
    main()
