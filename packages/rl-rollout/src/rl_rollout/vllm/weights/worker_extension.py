"""Extends vLLM's worker (`worker_extension_cls`), so that it receives and loads weight versions.

Whole weights are loaded layer by layer, as when the engine starts, and then copied into the tensors that the engine
computes with. They cannot be copied into the model's parameters directly: on the CPU, for example, a linear layer's
weight is packed, and the parameter of that name is empty. An adapter that is sent without the model replaces the
policy's adapter (`adapters`).
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_core import plugins
from rl_core.errors import WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, TensorRecord, WeightBucket, WeightReceiver
from rl_core.rank_kit.weight_buckets import bucket_records, unpack_bucket
from rl_core.rank_kit.weight_deltas import HeldWeights, has_only_trained, received
from rl_rollout.vllm import fixes
from rl_rollout.vllm.weights import adapters
from rl_rollout.vllm.weights.preparation import Preparation, described
from rl_rollout.vllm.weights.stored_tensors import StoredTensor, fitting, fitting_adapter, stored_tensors
from rl_rollout.vllm.wire import manifest_record

fixes.apply()
_reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
_AGREE_S = 600.0
"""Longest wait of a worker for the results of the engine's other workers."""
_IS_INTACT = "rl_is_intact"
"""Attribute of a worker: whether its model is one complete version. Missing before the first update."""
_STORED = "rl_stored"
"""Attribute of a worker: `stored_tensors` of its model. Missing until first needed."""
_HELD = "rl_held"
"""Attribute of a worker: adapter configuration (None: whole weights) and tensor names of the last version that it held
completely. Missing before the first update."""

_BASE = "rl_base"
"""Attribute of a worker: the weights that it received last, the base of a sync that sends only changes. Missing before
the first update."""

_PREPARATION = "rl_preparation"
"""Attribute of a worker: the `Preparation` of the next sync. Missing if none was begun."""


@attrs.frozen(kw_only=True)
class Outcome:
    """How a worker's update ended; sent to the server as a dictionary of these fields."""

    manifest: dict[str, Any] | None = None
    """What arrived, as `wire.manifest_record`; None if the update failed."""
    error: str | None = None
    """Why it failed."""
    is_intact: bool = True
    """Whether the worker holds one complete version: the new one or, after a failure, the previous one."""


class WeightReceiverExtension:
    """Methods that vLLM adds to its worker class. All names begin with `rl_`, because vLLM refuses names that the
    worker class already has."""

    def rl_start_adapter(self) -> None:
        """Gives the policy an adapter of zeros. Call it once before the first request, if the engine has adapters."""
        adapters.start_with_zeros(self)

    def rl_check_adapter(self, name: str, path: str) -> str | None:
        """Returns why this worker cannot serve the adapter at `path`, or None if it can; changes nothing."""
        try:
            adapters.require_loadable(self, name, path, _stored(self))
        except Exception as error:
            return described(error)
        return None

    def rl_prepare_weights(
        self,
        version: int,
        receiver: str,
        data: Mapping[str, Any],
        adapter: Mapping[str, Any] | None,
        delta: Mapping[str, Any] | None,
    ) -> None:
        """Begins to receive `version` of a staged transport without changing the model. The parameters are those of
        `rl_receive_weights`."""
        rendezvous = Rendezvous(transport="", receiver=receiver, data=data, adapter=adapter, delta=delta)
        before = getattr(self, _PREPARATION, None)
        prepared = Preparation(rendezvous, version, lambda: list(_arriving(self, rendezvous, version)), before)
        setattr(self, _PREPARATION, prepared)

    def rl_preparation_state(self) -> dict[str, Any]:
        """Returns `Preparation.state` of the last preparation."""
        return getattr(self, _PREPARATION).state()

    def rl_receive_weights(
        self,
        version: int,
        receiver: str,
        data: Mapping[str, Any],
        adapter: Mapping[str, Any] | None,
        delta: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Receives `version` if it is not prepared yet, and loads it; called on every worker of the engine through
        `collective_rpc`.

        Versions of a staged transport, and adapters by any transport, are loaded after all workers have received and
        checked everything. Other weights are loaded as they arrive; if that fails midway, this worker cannot serve
        until an update succeeds.

        Args:
            version: expected version.
            receiver, data, adapter, delta: fields of the `Rendezvous`.

        Returns:
            The fields of `Outcome`. Raises nothing, because an exception would not say what the worker holds.
        """
        try:
            rendezvous = Rendezvous(transport="", receiver=receiver, data=data, adapter=adapter, delta=delta)
            is_staged = plugins.load_receiver(receiver)(rendezvous).is_staged
            with closing(_received(self, rendezvous, version)) as arriving:
                if adapter is not None:
                    tensors = _load_adapter(self, _agreed(self, arriving, adapter), adapter)
                else:
                    is_part = has_only_trained(delta)
                    arrived = _agreed(self, arriving, is_part=is_part) if is_staged else arriving
                    tensors = _load(self, arrived, is_part=is_part)
        except Exception as error:
            is_intact = getattr(self, _IS_INTACT, True)
            return attrs.asdict(Outcome(error=described(error), is_intact=is_intact))
        return attrs.asdict(Outcome(manifest=manifest_record(Manifest(version=version, tensors=tensors))))


def _arriving(worker: Any, rendezvous: Rendezvous, version: int) -> Generator[WeightBucket, None, None]:
    """Yields the version's buckets; raises if one does not fit the model."""
    _require_fitting(worker, rendezvous)
    receiver: WeightReceiver = plugins.load_receiver(rendezvous.receiver)(rendezvous)
    with closing(received(receiver, version, rendezvous.delta, _held_weights(worker))) as arriving:
        if rendezvous.adapter is not None:
            yield from fitting_adapter(arriving, _stored(worker), rendezvous.adapter["r"])
        else:
            yield from fitting(arriving, _stored(worker), _dtype(worker))


def _received(worker: Any, rendezvous: Rendezvous, version: int) -> Generator[WeightBucket, None, None]:
    """Like `_arriving`, but yields the buckets of the preparation if there is one for this sync."""
    preparation: Preparation | None = worker.__dict__.pop(_PREPARATION, None)
    if preparation is not None and preparation.is_of(rendezvous, version):
        yield from preparation.buckets()
        return
    if preparation is not None:
        preparation.wait()
    yield from _arriving(worker, rendezvous, version)


def _stored(worker: Any) -> Mapping[str, StoredTensor]:
    """Returns the model's `stored_tensors`, which are read only once."""
    if not hasattr(worker, _STORED):
        setattr(worker, _STORED, stored_tensors(worker.model_config))
    return getattr(worker, _STORED)


def _dtype(worker: Any) -> str:
    return str(worker.model_config.dtype).removeprefix("torch.")


def _held_weights(worker: Any) -> HeldWeights:
    if not hasattr(worker, _BASE):
        setattr(worker, _BASE, HeldWeights())
    return getattr(worker, _BASE)


def _require_fitting(worker: Any, rendezvous: Rendezvous) -> None:
    if adapters.has_adapters(worker) != (rendezvous.adapter is not None):
        comes, takes = ("whole weights", "adapters") if rendezvous.adapter is None else ("an adapter", "whole weights")
        raise WeightSyncError(
            f"got {comes}, but this engine was started for {takes}; set trainer.policy.model.lora.merge_lora to the "
            "same value in the run and in the server"
        )


def _agreed(
    worker: Any, arriving: Iterable[WeightBucket], adapter: Mapping[str, Any] | None = None, *, is_part: bool = False
) -> list[WeightBucket]:
    """Receives all buckets and returns them after every worker of the engine has received its own. If one worker fails,
    raises on all of them. `is_part`: see `_require_complete`."""
    buckets, failure = [], None
    try:
        buckets = list(arriving)
        names = {name for bucket in buckets for name in bucket.names}
        _require_complete(worker, names, adapter, is_part=is_part)
    except Exception as error:
        failure = error
    (num_failed,) = _sums_over_workers([failure is not None])
    if failure is not None:
        raise failure
    if num_failed:
        raise WeightSyncError(f"{num_failed} other workers of the engine did not receive the weights")
    return buckets


def _sums_over_workers(values: Sequence[int]) -> list[int]:
    world = get_world_group()
    totals = torch.tensor(values, dtype=torch.int64)
    if world.world_size > 1:
        work = dist.all_reduce(totals, group=world.cpu_group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=_AGREE_S))
    return totals.tolist()


def _unpacked(bucket: WeightBucket, records: dict[str, TensorRecord]) -> Iterator[tuple[str, Tensor]]:
    """Yields the bucket's tensors, and adds their descriptions to `records`."""
    for name, record in bucket_records(bucket).items():
        if name in records:
            raise WeightSyncError(f"{name} was sent twice")
        records[name] = record
    yield from unpack_bucket(bucket)


@torch.no_grad()
def _load_adapter(worker: Any, buckets: Iterable[WeightBucket], config: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Replaces the policy's adapter; returns records of the buckets' tensors. Everything is checked before anything
    changes."""
    records: dict[str, TensorRecord] = {}
    # Copies, because vLLM keeps these tensors, while the buckets may be mapped from a rank's memory and must be freed.
    tensors = {name: tensor.clone() for bucket in buckets for name, tensor in _unpacked(bucket, records)}
    adapter = adapters.built(worker, tensors, config)
    names = sorted(adapter.loras)
    # Adds up the workers' answers, because a layer may belong to another pipeline rank.
    holders = _sums_over_workers(adapters.known_layers(worker, names))
    if unknown := [name for name, count in zip(names, holders, strict=True) if count == 0]:
        raise WeightSyncError(
            f"vLLM has no layers {unknown[:3]} that could have adapters; leave them out with "
            "trainer.policy.model.lora.target_modules, or set trainer.policy.model.lora.merge_lora=true"
        )
    setattr(worker, _IS_INTACT, False)
    adapters.replace(worker, adapter)
    setattr(worker, _HELD, (config, frozenset(records)))
    setattr(worker, _IS_INTACT, True)
    return records


@torch.no_grad()
def _load(worker: Any, buckets: Iterable[WeightBucket], *, is_part: bool) -> dict[str, TensorRecord]:
    """Loads all buckets into the worker's model; returns records of their tensors. `is_part`: layers of which nothing
    arrives keep their weights."""
    model, records = worker.model_runner.get_model(), {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            setattr(worker, _IS_INTACT, False)
            yield from _unpacked(bucket, records)

    quiet = _without_warnings() if is_part else nullcontext()
    with quiet, set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        initialize_layerwise_reload(model)
        try:
            model.load_weights(tensors())
        finally:
            # This also runs after a failure: it restores the layers that got nothing new, so that a later update works.
            finalize_layerwise_reload(model, worker.model_config)
            fixes.repack_tied_heads_on_cpu(model)
    _require_complete(worker, records.keys(), None, is_part=is_part)
    if not is_part:
        setattr(worker, _HELD, (None, frozenset(records)))
    setattr(worker, _IS_INTACT, True)
    return records


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences vLLM's warning of each layer that keeps its weights."""
    level = _reload_logger.level
    _reload_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _reload_logger.setLevel(level)


def _require_complete(
    worker: Any, names: AbstractSet[str], adapter: Mapping[str, Any] | None, *, is_part: bool
) -> None:
    """Checks that a version has the same tensors as the previous one: vLLM silently keeps the old value of a missing
    tensor, or leaves it unset. If the sync sends only a part (`has_only_trained`), its tensors must be among those of
    the previous version. Another run may send an adapter with another configuration; such an adapter is not
    compared.

    Tensors missing in the first version are not found here; `rl_core.trainer.publishing.verification` finds them,
    because the engine's log-probs are then wrong.
    """
    held_adapter, before = getattr(worker, _HELD, (adapter, names))
    if held_adapter == adapter and (not names <= before if is_part else names != before):
        missing, new = sorted(before - names), sorted(names - before)
        raise WeightSyncError(
            f"the tensors differ from those of the previous version: {missing[:3]} are missing, {new[:3]} are new"
        )
