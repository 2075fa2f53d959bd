"""A policy that trains in the test's process and publishes its weights to engines as a trainer does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from rl_core import plugins
from rl_core.errors import WeightSyncError
from rl_core.interfaces import LoraConfig, ModelConfig, OptimizerConfig, PauseMode, WeightBucket, WorkerSpec
from rl_core.trainer.publishing.colocation import EngineTurns
from rl_core.trainer.publishing.publish import publish_weights
from rl_core.trainer.publishing.serving import ServedEngines, ServingSettings
from rl_core.trainer.publishing.verification import LIMITS as LARGEST
from rl_core.trainer.publishing.verification import VerificationSettings, WeightVerification
from rl_core.workers import MicroBatchLimits, WorkerGroup

BUCKET_BYTES = 1 << 15
"""Small, so that there are many buckets, and tensors larger than a bucket."""
LIMITS = MicroBatchLimits(max_sequences=16)
REFUSED = "does not compute with the trainer's weights"


def policy_spec(
    model_path: Any,
    options: Any,
    *,
    optimizer: OptimizerConfig | None,
    bf16: bool,
    lora: LoraConfig | None = None,
    trainable: tuple[str, ...] | None = None,
) -> WorkerSpec:
    """The model's spec with a backend's options. With `lora`, only an adapter is trained; with `trainable`, only the
    parameters that it names; otherwise all weights."""
    return WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(model_path), lora=lora or LoraConfig(), trainable=trainable),
        optimizer=optimizer,
        options=options,
        bf16=bf16,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=1024,
        total_optimizer_steps=None,
        seed=0,
        num_threads=1,
    )


@asynccontextmanager
async def policy_of(
    model_path: Any,
    lora: LoraConfig | None = None,
    *,
    strategy: str = "fsdp",
    bf16: bool = False,
    trainable: tuple[str, ...] | None = None,
) -> AsyncIterator[WorkerGroup]:
    """The model on one rank; it computes in float32, or in bfloat16 with `bf16`."""
    backend = plugins.load("rl_core.backends", strategy)
    options, optimizer = backend.options_class(), OptimizerConfig()
    spec = policy_spec(model_path, options, optimizer=optimizer, bf16=bf16, lora=lora, trainable=trainable)
    group = await WorkerGroup.launch(backend, spec)
    try:
        yield group
    finally:
        await group.close()


def serving(
    policy: Any,
    client: Any,
    transport: str = "shared_memory",
    *,
    interval: int | None = 100,
    only_trained: bool = False,
) -> ServedEngines:
    """Publishes as the training loop does: deltas, and whole weights once in `interval` syncs. If `interval` is None,
    always whole weights or, with `only_trained`, after the first sync only the trained ones.
    """
    never = VerificationSettings(prove_at_start=False, interval=0, num_tokens=256, limit=0.06, seed=0, limits=LIMITS)
    return ServedEngines(
        ServingSettings(
            max_bucket_bytes=1 << 16,
            pause_mode="keep",
            delta_interval=interval,
            only_trained=only_trained,
            verification=never,
        ),
        policy=policy,
        client=client,
        transport=plugins.load("rl_core.weight_transports", transport),
        turns=EngineTurns(client, policy, are_shared=False),
    )


class Trainer:
    """Publishes a policy's weights and compares log-probs."""

    def __init__(
        self, policy: WorkerGroup, client: Any, transport: Any, *, max_bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.policy = policy
        self.client = client
        self.transport = (
            plugins.load("rl_core.weight_transports", transport) if isinstance(transport, str) else transport
        )
        self.max_bucket_bytes = max_bucket_bytes
        self.version = 0
        self.pause_mode: PauseMode = "keep"
        settings = VerificationSettings(
            prove_at_start=True,
            interval=1,
            num_tokens=256,
            limit=LARGEST["float32"],
            seed=0,
            limits=LIMITS,
        )
        self.verification = WeightVerification(settings, policy, client, self.publish)

    async def publish(self) -> None:
        """Publishes under a new version number, so that no answer of an earlier version can pass for a new one."""
        self.version += 1
        await publish_weights(
            self.policy,
            self.client,
            self.transport,
            self.version,
            max_bucket_bytes=self.max_bucket_bytes,
            pause_mode=self.pause_mode,
        )

    async def train(self) -> None:
        """Changes all weights by a larger step than an optimizer would make."""
        await self.policy.perturb(self.version, 0.2)

    async def sync_five_times(self) -> list[float]:
        """Proves the weight sync, then changes the weights and syncs five times. Before each sync the probe must fail.
        Returns the largest |difference| of a log-prob after each sync.
        """
        await self.verification.prove()
        differences = []
        for _ in range(5):
            await self.train()
            with pytest.raises(WeightSyncError, match=REFUSED):
                await self.verification.probe(self.version)
            await self.publish()
            metrics = await self.verification.after_sync(self.version)
            differences.append(metrics["weight_sync/logprob_diff_max"])
        return differences

    def leave_out(self, name: str) -> None:
        """Later syncs leave this tensor out."""
        shards = self.worker.shards
        shards.exported = partial(_without, shards.exported, name)

    def send_always_as_now(self, name: str) -> None:
        """Later syncs send this tensor with its present values."""
        shards = self.worker.shards
        now = next(tensor.clone() for other, tensor in shards.exported() if other == name)
        shards.exported = partial(_with, shards.exported, name, now)

    def send_only(self, part: Callable[[Iterator[WeightBucket]], Iterator[WeightBucket]] | None) -> None:
        """Later syncs send `part(buckets)` instead of the buckets; with None, all buckets again."""
        worker, method = self.worker, "export_weights" if self.policy.adapter is None else "export_adapter"
        worker.__dict__.pop(method, None)
        if part is not None:
            export = getattr(worker, method)
            setattr(worker, method, lambda *arguments, **options: part(export(*arguments, **options)))

    @property
    def worker(self) -> Any:
        """The worker of the policy's only rank."""
        ranks: Any = self.policy._ranks
        return ranks._host._worker


def _without(exported: Any, name: str, **options: Any) -> Any:
    pairs = list(exported(**options))
    assert any(pair[0] == name for pair in pairs), f"{name} is not among {[pair[0] for pair in pairs]}"
    return ((other, tensor) for other, tensor in pairs if other != name)


def _with(exported: Any, name: str, value: Any, **options: Any) -> Any:
    return ((other, value if other == name else tensor) for other, tensor in exported(**options))
