"""A Megatron backend whose ranks also report internal state that the contract does not expose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, Plan, RankInfo, Worker, WorkerSpec
from rl_megatron.backend import MegatronBackend


@attrs.frozen(kw_only=True)
class ProbedBackend(MegatronBackend):
    """`MegatronBackend` that creates a `ProbedWorker`."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        self.validate(spec, rank.world_size)
        return probed_worker(spec, rank)


probed = ProbedBackend()


def probed_worker(spec: WorkerSpec, rank: RankInfo) -> Any:
    """Creates a `ProbedWorker`. Imports Megatron here, because only a rank's process may import it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from rl_megatron.model.chunks import build_chunks
    from rl_megatron.model.export import WeightExport
    from rl_megatron.rank.checkpoint import _sharded_state
    from rl_megatron.rank.routing import Routing
    from rl_megatron.rank.worker import MegatronWorker

    class RecordingRouting(Routing):
        @contextmanager
        def scoring(self, batch: Batch) -> Iterator[None]:
            with super().scoring(batch):
                if self._chunks is not None:
                    self._chunks.records = True
                yield

    class ProbedWorker(MegatronWorker):
        """A worker that returns the routes of every scoring pass and has methods that report its state."""

        def __init__(self, spec: WorkerSpec, rank: RankInfo):
            super().__init__(spec, rank)
            self.routing = RecordingRouting(self.chunks, self.place, spec, self.bridge.hf_pretrained.config.to_dict())

        def tokens_per_expert(self) -> Mapping[int, Tensor]:
            """Layer → tokens per expert that this rank's router counted for its expert bias."""
            found = {}
            for chunk in self.chunks:
                for module in chunk.modules():
                    if isinstance(module, TopKRouter):
                        assert module.local_tokens_per_expert is not None
                        found[module.layer_number] = module.local_tokens_per_expert.clone()
            return found

        def give_back_optimizer(self) -> None:
            """Frees the optimizer's memory as `offload(optimizer=True)` does on an accelerator."""
            self.give_back(parameters=False, optimizer=True)

        def bytes_of_parameters_and_optimizer(self) -> tuple[int, int]:
            """Bytes of parameters and bytes of optimizer state that this rank holds."""
            assert self.optimizer is not None
            own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self._parameter_memory()}
            states = [t.untyped_storage() for t in self.optimizer.state_tensors()]
            return sum(own.values()), sum(s.nbytes() for s in states if s.data_ptr() not in own)

        def gathered_optimizer_bytes(self) -> int:
            """Bytes of main parameters and moments that this rank gathers when it saves a state."""
            state = _sharded_state(self.chunks, self.optimizer, is_loading=False)["optimizer"]
            parts = [p for p in nested_values(state) if isinstance(p, ShardedTensor | ShardedTensorFactory)]
            return sum(part.data.nbytes for part in parts)

        def object_collectives_of_exports(self, count: int) -> list[int]:
            """Exports the weights `count` times. Returns how often ranks exchange Python objects in each export."""
            names = ("all_gather_object", "broadcast_object_list")
            kept, calls, found = [getattr(dist, name) for name in names], [], []
            try:
                for name, function in zip(names, kept, strict=True):
                    setattr(dist, name, partial(_counted, calls, function))
                for _ in range(count):
                    list(self._exported(self.export))
                    found.append(len(calls))
                    calls.clear()
            finally:
                for name, function in zip(names, kept, strict=True):
                    setattr(dist, name, function)
            return found

        def stale_export_tensors(self) -> list[str]:
            """Names of the tensors in which the worker's cached export differs from a new one."""
            kept = {name: tensor.clone() for name, tensor in self._exported(self.export)}
            new = dict(self._exported(WeightExport(self.bridge, self.chunks)))
            return sorted(name for name in kept.keys() | new.keys() if not torch.equal(kept[name], new[name]))

        def kept_choices(self) -> int:
            """Number of choices still kept for recomputation, plus number of routers in Megatron's global list. Both
            should be 0."""
            chunks = self.routing._chunks
            assert chunks is not None
            return sum(len(choices.kept) for choices in chunks._all) + len(RouterReplay.global_router_replay_instances)

        def untouched_second_model(self) -> bool:
            """Whether the routers of another model in this process choose experts themselves."""
            chunks = build_chunks(self.bridge, self.spec, self.place)
            routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
            return bool(routers) and all(router.router_replay is None for router in routers)

        def attention_backend(self) -> str:
            """Name of the member of Megatron's `AttnBackend` in the model's configuration."""
            return self.chunks[0].config.attention_backend.name

        def num_parameters(self) -> int:
            """Number of elements of this rank's parameters; a shared parameter counts once."""
            return sum({id(p): p.numel() for chunk in self.chunks for p in chunk.parameters()}.values())

        def forward_backward_measured(self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float) -> int:
            """Peak bytes of the activations that are kept for the backward pass."""
            return _peak_of_kept_bytes(
                lambda: self.forward_backward(batch, plan, loss, temperature=temperature),
                {p.untyped_storage().data_ptr() for chunk in self.chunks for p in chunk.parameters()},
            )

    return ProbedWorker(spec, rank)


def _counted(calls: list[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    calls.append(function)
    return function(*args, **kwargs)


def _peak_of_kept_bytes(run: Any, parameters: set[int]) -> int:
    """Peak bytes of the storages that autograd keeps. Each storage is counted once; parameters are left out."""
    live: dict[int, tuple[int, int]] = {}
    total = peak = 0

    class Kept:
        def __init__(self, tensor: Tensor):
            nonlocal total, peak
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.key, size = storage.data_ptr(), storage.nbytes()
            count, _ = live.get(self.key, (0, size))
            live[self.key] = (count + 1, size)
            if not count and self.key not in parameters:
                total += size
                peak = max(peak, total)

        def __del__(self) -> None:
            nonlocal total
            count, size = live[self.key]
            if count > 1:
                live[self.key] = (count - 1, size)
            else:
                del live[self.key]
                total -= size if self.key not in parameters else 0

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        run()
    return peak


__all__ = ["ProbedBackend", "probed"]
