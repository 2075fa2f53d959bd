"""The ranks of one model, as the controller sees them: it plans, sends each rank its part once, and collects.

All methods are awaitable. The plan is made here, from lengths alone: per data-parallel rank a list of micro-batches, each
a list of sequences. A sequence is never split over micro-batches or ranks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, LossSpec, Manifest, Metrics, OptimizerStep, Plan, Rendezvous, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import plan_micro_batches
from rl_core.weights import merge_manifests
from rl_core.workers.inline import InlineRank


@attrs.frozen(kw_only=True)
class MicroBatchLimits:
    """How large a micro-batch may be: by sequences, by tokens, or both."""

    max_sequences: int | None = None
    max_tokens: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class _Part:
    """What one data-parallel rank computes."""

    sequences: Tensor
    """int64, indices into the whole batch."""
    batch: Batch
    plan: Plan


class WorkerGroup:
    """Handle of the ranks of one model. Made by `launch`."""

    def __init__(self, ranks: list[InlineRank], mesh: Mesh):
        self._ranks = ranks
        self.mesh = mesh

    @classmethod
    async def launch(cls, backend: Backend, spec: WorkerSpec, *, world_size: int = 1, timeout_s: float = 3600.0) -> Self:
        """Starts the ranks and builds their models.

        Raises:
            ConfigError: the backend cannot arrange or train what is asked for.
            WorkerError, DeadlineError: a rank failed to start.
        """
        backend.validate(spec, world_size)
        mesh = backend.mesh(spec.options, world_size)
        if world_size != 1 or backend.needs_own_process():
            raise ConfigError(f"{spec.role}: {world_size} ranks of {backend.name!r} need processes of their own; this version runs one rank inline")
        rank = InlineRank(spec.role, timeout_s)
        await rank.start(backend, spec)
        return cls([rank], mesh)

    async def forward(self, batch: Batch, limits: MicroBatchLimits, *, temperature: float) -> dict[str, Tensor]:
        """Scores of the whole stream: `logprobs` and `entropies` (a critic: `values`), float32 [T]."""
        parts = self._parts(batch.without_columns(*(name for name in batch if name not in INPUT_COLUMNS)), limits)
        results = await self._on_all("forward", parts, temperature=temperature)
        columns: dict[str, Tensor] = {}
        for rank, result in enumerate(results):
            if not self.mesh.returns_results(rank):
                continue
            positions = batch.token_index(parts[self.mesh.data_rank(rank)].sequences)
            for name, values in result.items():
                columns.setdefault(name, torch.zeros(batch.num_tokens, dtype=values.dtype))[positions] = values
        return columns

    async def forward_backward(self, batch: Batch, limits: MicroBatchLimits, loss: LossSpec, *, temperature: float) -> Metrics:
        """Adds the gradient of `loss` over the whole batch; returns the metrics of all ranks, added up."""
        results = await self._on_all("forward_backward", self._parts(batch, limits), loss, temperature=temperature)
        metrics = add_metrics(result for rank, result in enumerate(results) if self.mesh.returns_results(rank))
        # The loss is a sum over the mini-batch already: its parts add up and are not averaged.
        return {**metrics, "loss": (metrics["loss"][0], 1.0)}

    async def optim_step(self) -> OptimizerStep:
        """One optimizer step on all ranks."""
        return (await self._call("optim_step"))[0]

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        """All ranks send their weights; what was sent, over all ranks."""
        manifests = await asyncio.gather(*(rank.publish(rendezvous, version, max_bucket_bytes) for rank in self._ranks))
        return merge_manifests(manifests)

    async def save_state(self, directory: Path) -> None:
        """Writes weights, optimizer and schedule."""
        await self._call("save_state", directory)

    async def load_state(self, directory: Path) -> None:
        """Continues from `save_state`. Raises CheckpointError."""
        await self._call("load_state", directory)

    async def save_model(self, directory: Path) -> None:
        """Writes the model in Hugging Face format."""
        await self._call("save_model", directory)

    async def close(self) -> None:
        """Ends the ranks."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(rank.call(method, *args) for rank in self._ranks))

    async def _on_all(self, method: str, parts: list[_Part], *args: Any, **kwargs: Any) -> list[Any]:
        calls = []
        for number, rank in enumerate(self._ranks):
            part = parts[self.mesh.data_rank(number)]
            calls.append(rank.call(method, part.batch, part.plan, *args, **kwargs))
        return await asyncio.gather(*calls)

    def _parts(self, batch: Batch, limits: MicroBatchLimits) -> list[_Part]:
        plans = plan_micro_batches(
            batch.lengths.numpy(),
            num_data_ranks=self.mesh.data,
            max_tokens=limits.max_tokens,
            max_sequences=limits.max_sequences,
            multiple=self.mesh.micro_batch_multiple,
        )
        return [_part(batch, plan) for plan in plans]


INPUT_COLUMNS = ("tokens", "routed_experts", "routed")
"""What a model reads of a batch; the rest is the loss's."""


def _part(batch: Batch, plan: list[np.ndarray]) -> _Part:
    sequences = torch.from_numpy(np.concatenate(plan))
    ends = np.cumsum([len(micro_batch) for micro_batch in plan])
    local = tuple(range(end - len(m), end) for end, m in zip(ends.tolist(), plan, strict=True))
    return _Part(sequences=sequences, batch=batch.select(sequences), plan=local)


def add_metrics(parts: Any) -> Metrics:
    """Sums and weights of several parts, added by name."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            have = total.get(name, (0.0, 0.0))
            total[name] = (have[0] + value, have[1] + weight)
    return total
