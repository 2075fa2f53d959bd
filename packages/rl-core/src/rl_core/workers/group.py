"""The controller's handle for the ranks of one model. It plans micro-batches, sends each rank its part of a batch once,
and collects the results.

All methods that call ranks are awaitable.

The plan has, for each data-parallel rank, a list of micro-batches, each a list of sequences. The plan depends only on
the lengths of the batch's sequences and, if the ranks compute shared prefixes once, on which sequences share prefixes.
A sequence is never split over micro-batches or data-parallel ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.batch import Batch, token_inputs
from rl_core.columns import INPUT_COLUMNS
from rl_core.errors import ConfigError, WorkerError
from rl_core.interfaces import (
    Backend,
    LossSpec,
    Manifest,
    Metrics,
    OptimizerStep,
    OptimizerUpdate,
    Rendezvous,
    Worker,
    WorkerSpec,
)
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import plan_micro_batches, require_within_budget
from rl_core.layout.prefixes import families, prefix_forest
from rl_core.rank_kit.weight_buckets import merge_manifests
from rl_core.workers.devices import SharedDevices, Tenant
from rl_core.workers.inline import InlineRank
from rl_core.workers.rank import Part, RankHost, Ranks


@attrs.frozen(kw_only=True)
class MicroBatchLimits:
    """Largest size of a micro-batch: in sequences, in tokens, or both. None: no limit."""

    max_sequences: int | None = None
    max_tokens: int | None = None


class WorkerGroup:
    """Handle for the ranks of one model. `launch` starts the ranks and returns the handle."""

    def __init__(
        self,
        ranks: Ranks,
        mesh: Mesh,
        shape: tuple[int, int],
        devices: SharedDevices,
        tenant: Tenant,
        *,
        adapter: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        share_prefixes: bool = False,
    ):
        self.adapter = adapter
        """The adapter's configuration if a sync sends only the adapter, else None: see `Rendezvous.adapter`."""
        self._backend = backend
        self._share_prefixes = share_prefixes
        self._ranks = ranks
        self._shape = shape
        self._devices = devices
        self._tenant = tenant
        self.mesh = mesh

    @classmethod
    async def launch(
        cls,
        backend: Backend,
        spec: WorkerSpec,
        *,
        num_nodes: int = 1,
        ranks_per_node: int = 1,
        share_devices_of: WorkerGroup | None = None,
        timeout_s: float = 3600.0,
        start_timeout_s: float | None = None,
        silence_s: float = 300.0,
    ) -> Self:
        """Starts the ranks and builds their models. Ranks are Ray actors, but a single rank runs in this process if the
        backend allows it.

        Args:
            backend: the training backend.
            spec: the spec of each rank.
            num_nodes: number of machines.
            ranks_per_node: GPUs per machine; on machines without GPUs, processes.
            share_devices_of: a group of the same shape (nodes, ranks per node) whose devices this group uses too.
                Workers that can offload leave the devices while the other group computes. None: the group has its own
                devices.
            timeout_s: longest wait for each later call.
            start_timeout_s: longest wait for each phase of this start; None: `timeout_s`.
            silence_s: a rank in another process counts as dead after this long without an answer and without work, even
                before the deadline.

        Raises:
            ConfigError: the backend cannot train this model or form a mesh of these ranks, or computes the model
                differently than transformers; or there are not enough devices.
            WorkerError, DeadlineError: a rank failed to start, or the devices did not become free in time.
        """
        world_size = num_nodes * ranks_per_node
        backend.validate(spec, world_size)
        # In a run, the checks before the start have already proved the model. If this machine cannot run the proof,
        # rank 0 runs it.
        spec = attrs.evolve(spec, is_proved=await asyncio.to_thread(backend.prove, spec) is None)
        mesh = backend.mesh(spec.options, world_size)
        shape = (num_nodes, ranks_per_node)
        devices, beside = SharedDevices(), None
        if share_devices_of is not None:
            _require_same_shape(spec, shape, share_devices_of._shape)
            devices, beside = share_devices_of._devices, share_devices_of._ranks
            await devices.clear()  # the new models are built on these devices
        if world_size == 1 and not backend.needs_own_process():
            ranks: Ranks = await InlineRank.start(
                backend, spec, timeout_s=timeout_s, start_timeout_s=start_timeout_s or timeout_s
            )
        else:
            # Imported only here: everything else works without Ray.
            from rl_core.workers.ray_ranks import RayRanks

            ranks = await RayRanks.start(
                backend,
                spec,
                mesh,
                shape=shape,
                beside=beside if isinstance(beside, RayRanks) else None,
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s or timeout_s,
                silence_s=silence_s,
            )
        keeps_optimizer = spec.optimizer is not None and not spec.optimizer.offload_after_step
        tenant = Tenant(ranks, keeps_optimizer=keeps_optimizer)
        devices.add(tenant)
        lora = spec.model.lora
        adapter = lora.peft_config() if lora.is_sent_alone else None
        return cls(
            ranks, mesh, shape, devices, tenant, adapter=adapter, backend=backend, share_prefixes=spec.share_prefixes
        )

    async def forward(
        self,
        batch: Batch,
        limits: MicroBatchLimits,
        *,
        temperature: float,
        returns: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Returns the scores of the whole stream: `logprobs` and `entropies` (of a critic: `values`), float32 [T], and
        the chosen routes if the backend records them. `returns` names the scores that are needed; the result may
        contain more."""
        inputs = batch.without_columns(*(name for name in batch if name not in INPUT_COLUMNS))
        parts = self._parts(batch, limits)
        names = None if returns is None else tuple(returns)
        async with self._on_devices():
            results = await self._ranks.call_on_parts(
                Worker.forward, inputs, parts, temperature=temperature, returns=names
            )
        return _on_stream(batch, self._of_results("forward", parts, results, names=names or ()))

    async def forward_backward(
        self,
        batch: Batch,
        limits: MicroBatchLimits,
        loss: LossSpec,
        *,
        temperature: float,
        returns: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Adds the gradient of `loss` over the whole batch. Returns the metrics summed over all ranks, and the scores
        named in `returns`, [T] in stream order. See `Worker.forward_backward`."""
        parts = self._parts(batch, limits)
        async with self._on_devices():
            results = await self._ranks.call_on_parts(
                Worker.forward_backward, batch, parts, loss, temperature=temperature, returns=tuple(returns)
            )
        answers = list(self._of_results("forward_backward", parts, results, names=returns))
        scores = _on_stream(batch, [(part, {name: result[name] for name in returns}) for part, result in answers])
        parts_of_metrics = [
            {name: value for name, value in result.items() if name not in returns} for _, result in answers
        ]
        for name, value in (item for metrics_of_rank in parts_of_metrics for item in metrics_of_rank.items()):
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise WorkerError(
                    f"forward_backward of {self._named} returned {value!r} for the metric {name!r}; expected a pair "
                    "(sum, weight)"
                )
        metrics = add_metrics(parts_of_metrics)
        if "loss" not in metrics:
            raise WorkerError(
                f"forward_backward of {self._named}: no rank returned the metric 'loss'; expected 'loss': (sum, 1.0), "
                "as rl_core.rank_kit.total_metrics returns it"
            )
        # The loss is a weighted sum over the mini-batch, so its parts are added, not averaged.
        return {**metrics, "loss": (metrics["loss"][0], 1.0), **scores}

    async def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Takes one optimizer step on all ranks; `update` has the settings that differ from the configuration."""
        async with self._on_devices(optimizer=True):
            step = (await self._ranks.call(Worker.optim_step, update))[0]
        if not isinstance(step, OptimizerStep):
            raise WorkerError(f"optim_step of {self._named} returned {type(step).__name__}; expected an OptimizerStep")
        return step

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        """All ranks send their weights, or only the adapter. Returns the merged manifest of all ranks."""
        async with self._on_devices():
            return merge_manifests(await self._ranks.call(RankHost.publish, rendezvous, version, max_bucket_bytes))

    @property
    def can_perturb(self) -> bool:
        """Whether the workers can perturb their weights."""
        return self._ranks.abilities.perturb

    async def perturb(self, seed: int, scale: float) -> None:
        """Adds temporary noise to all trained parameters: see `Worker.perturb`."""
        async with self._on_devices():
            await self._ranks.call(Worker.perturb, seed, scale)

    async def restore(self) -> None:
        """Removes the noise of `perturb`: see `Worker.restore`."""
        async with self._on_devices():
            await self._ranks.call(Worker.restore)

    async def save_state(self, directory: Path) -> None:
        """Writes the weights and the state of the optimizer and the schedule to `directory`."""
        async with self._on_devices(optimizer=True):
            await self._ranks.call(Worker.save_state, directory)

    @property
    def can_save_in_background(self) -> bool:
        """Whether the workers can save in the background."""
        return self._ranks.abilities.save_in_background

    async def start_saving(self, directory: Path) -> None:
        """Like `save_state`, but returns when every rank has copied its state; files are written in the background."""
        async with self._on_devices(optimizer=True):
            await self._ranks.call(Worker.start_saving, directory)

    async def has_saved(self) -> bool:
        """Whether the save that `start_saving` began is complete. If it failed on a rank, raises the error as soon as
        no rank is writing any more."""
        outcomes = await self._ranks.call(RankHost.save_outcome)
        if not all(outcome.is_over for outcome in outcomes):
            return False
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return True

    async def load_state(self, directory: Path) -> None:
        """Restores the state that `save_state` wrote. Raises CheckpointError if files are missing, incomplete or
        damaged."""
        async with self._on_devices(optimizer=True):
            await self._ranks.call(Worker.load_state, directory)

    async def save_model(self, directory: Path) -> None:
        """Writes the model in Hugging Face format."""
        async with self._on_devices():
            await self._ranks.call(Worker.save_model, directory)

    async def offload(self) -> None:
        """Moves all workers that can offload off the devices, including workers of groups that share the devices. Later
        calls move back the state that they need."""
        await self._devices.clear()

    async def close(self) -> None:
        """Ends the ranks; may be called again."""
        self._devices.remove(self._tenant)
        await self._ranks.close()

    def shares_devices_with(self, other: WorkerGroup) -> bool:
        """Whether the two groups take turns on shared devices, so that interleaving their calls would be slow."""
        return self._devices is other._devices and self._ranks.abilities.offload and other._ranks.abilities.offload

    def _on_devices(self, *, optimizer: bool = False) -> AbstractAsyncContextManager[None]:
        return self._devices.given_to(self._tenant, optimizer=optimizer)

    @property
    def _named(self) -> str:
        return "the workers" if self._backend is None else f"the backend {self._backend.name!r}"

    def _of_results(
        self, call: str, parts: Sequence[Part], results: Sequence[Any], *, names: Sequence[str]
    ) -> Iterator[tuple[Part, Mapping[str, Any]]]:
        """The part and the answer of each rank that returns results. Raises WorkerError if one of the answers is not a
        dict with these names."""
        for rank, result in enumerate(results):
            if not self.mesh.returns_results(rank):
                continue
            if not isinstance(result, Mapping) or any(name not in result for name in names):
                got = sorted(result) if isinstance(result, Mapping) else type(result).__name__
                with_names = f" with {', '.join(names)}" if names else ""
                raise WorkerError(
                    f"{call} of {self._named} returned {got} on rank {rank}; expected a dict{with_names} from this rank"
                )
            yield parts[self.mesh.data_rank(rank)], result

    def _parts(self, batch: Batch, limits: MicroBatchLimits) -> list[Part]:
        lengths_N, members, counts_N = batch.lengths.numpy(), None, None
        shortest = int(lengths_N.argmin())
        if self._share_prefixes:
            # The plan counts families, so it cannot name a sequence that is too long.
            require_within_budget(lengths_N, limits.max_tokens, self.mesh.sequence_multiple)
            members, lengths_N = _families(batch, limits, num_data_ranks=self.mesh.data)
            counts_N = [len(family) for family in members]
        plans = plan_micro_batches(
            lengths_N,
            num_data_ranks=self.mesh.data,
            max_tokens=limits.max_tokens,
            max_sequences=limits.max_sequences,
            multiple=self.mesh.micro_batch_multiple,
            sequence_multiple=self.mesh.sequence_multiple,
            counts_N=counts_N,
        )
        if members is not None:
            plans = [[np.sort(np.concatenate([_NONE, *(members[i] for i in m)])) for m in plan] for plan in plans]
        return [_part(plan, shortest=shortest) for plan in plans]


_NONE = np.empty(0, np.int64)


def _families(batch: Batch, limits: MicroBatchLimits, *, num_data_ranks: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Families of sequences that share a prefix, and the number of tokens computed for each family."""
    offsets = batch.offsets.numpy()
    return families(
        prefix_forest(offsets, *token_inputs(batch)),
        offsets,
        max_tokens=limits.max_tokens,
        max_sequences=limits.max_sequences,
        num_data_ranks=num_data_ranks,
    )


def _on_stream(batch: Batch, results: Iterable[tuple[Part, Mapping[str, Any]]]) -> dict[str, Tensor]:
    """Assembles the columns of the whole stream from the columns of the parts."""
    columns: dict[str, np.ndarray] = {}
    for part, result in results:
        positions = batch.token_index(torch.from_numpy(part.sequences)).numpy()
        for name, values in result.items():
            values = np.asarray(values)
            if values.shape[:1] != (num_sent := int(batch.lengths[part.sent].sum()),):
                raise WorkerError(
                    f"{name}: a rank returned shape {list(values.shape)} for a part of {num_sent} tokens; expected one "
                    "entry per token of its batch, in the batch's order"
                )
            column = columns.setdefault(name, np.zeros((batch.num_tokens, *values.shape[1:]), values.dtype))
            # A rank without sequences was sent the shortest one; its values are dropped.
            column[positions] = values[: len(positions)]
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _require_same_shape(spec: WorkerSpec, shape: tuple[int, int], other: tuple[int, int]) -> None:
    if shape != other:
        raise ConfigError(
            f"{spec.role}: {shape[0]} nodes × {shape[1]} ranks cannot share the devices of {other[0]} × {other[1]}: "
            "set the same numbers for both in trainer.placement, or give each its own devices with "
            "trainer.placement.colocate_policy_ref=false (for a critic, colocate_all=false)"
        )


def _part(plan: list[np.ndarray], *, shortest: int) -> Part:
    sequences = np.concatenate(plan)
    ends = np.cumsum([len(micro_batch) for micro_batch in plan])
    local = tuple(range(end - len(m), end) for end, m in zip(ends.tolist(), plan, strict=True))
    return Part(sequences=sequences, sent=sequences if len(sequences) else np.array([shortest]), plan=local)


def add_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Adds sums and weights of several parts by metric name."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            have = total.get(name, (0.0, 0.0))
            total[name] = (have[0] + value, have[1] + weight)
    return total
