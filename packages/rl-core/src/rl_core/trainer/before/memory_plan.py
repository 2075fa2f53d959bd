"""Computes the peak memory of each phase of a run, for `rl plan`. Starts nothing.

The plug-ins' plans (`RankPlan`, `EnginePlan`) state how much memory each model and the engine use. This module adds up
the sizes, by the rules with which the loop moves models and engine on and off the devices
(`trainer/publishing/colocation.py`, `workers/devices.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.interfaces import EnginePlan, HeldKind, RankPlan, Role
from rl_core.rank_kit.model_files import MAX_FILE_BYTES

PROCESS_BYTES = 3 << 29
"""Estimated overhead of one process on a GPU, 1.5 GiB: context, libraries, collectives, allocator fragmentation."""
ENGINE = "engine"
_KINDS: tuple[HeldKind, ...] = ("parameters", "gradients", "optimizer")


@attrs.frozen(kw_only=True)
class ModelOnRanks:
    """The backend's memory plan of one model of the run."""

    role: Role
    ranks: tuple[RankPlan, ...]
    ranks_per_node: int
    keeps_optimizer: bool
    """Whether the optimizer state stays on the devices while other models or the engine use them."""


@attrs.frozen(kw_only=True)
class Peak:
    """Memory of the fullest device and of the fullest machine in one phase."""

    devices: str
    """Names of the models and the engine that use these devices."""
    phase: str
    parts: Mapping[str, int]
    """Kind of memory → bytes on the device."""
    host_bytes: int
    """Bytes of host memory, for all ranks of one machine."""

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())


@attrs.frozen(kw_only=True)
class Serving:
    """What an engine can hold in its share of a device's memory."""

    tokens: int
    """Number of tokens for which the cache holds keys and values."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def sequences(self) -> int:
        """Number of sequences of the longest length that can be decoded at the same time; more sequences wait."""
        return self.tokens // self.context


def serving(engine: EnginePlan, config: Config, context: int, device_bytes: int | None) -> Serving:
    """Computes the engine's capacity, which is at most `max_num_seqs` sequences of the longest length. If the device's
    size is unknown, returns this maximum."""
    wanted = config.generator.inference_engine.max_num_seqs * context
    if device_bytes is None:
        return Serving(tokens=wanted, context=context)
    free = engine.memory_share * device_bytes - engine.weight_bytes - engine.computing_bytes
    return Serving(tokens=max(0, min(wanted, int(free / engine.kv_bytes_per_token))), context=context)


def peaks(
    config: Config,
    models: Sequence[ModelOnRanks],
    engine: EnginePlan | None,
    *,
    context: int,
    device_bytes: int | None = None,
) -> tuple[Peak, ...]:
    """The peaks of all phases on all devices.

    Args:
        config: the run's configuration.
        models: all models of the run that have ranks.
        engine: the engine's plan; None: left out, because no engine is started or its plug-in makes no plan.
        context: tokens of the longest sequence.
        device_bytes: memory of one device, of which the engine takes its share; None: unknown.
    """
    placement = config.trainer.placement
    with_policy = {"policy"}
    with_policy |= {"reference"} if placement.colocate_policy_ref else set()
    with_policy |= {"critic"} if placement.colocate_all else set()
    together = [model for model in models if model.role in with_policy]
    shared = engine if placement.colocate_all else None
    found = _of_devices(config, together, shared, context, device_bytes)
    for model in models:
        if model.role not in with_policy:
            found += _of_devices(config, [model], None, context, device_bytes)
    if engine is not None and not placement.colocate_all:
        found += _of_engine(engine, config, context, device_bytes)
    return tuple(found)


def require_room(
    found: Iterable[Peak], *, device_bytes: int | None, host_bytes: int | None, served: Serving | None = None
) -> None:
    """Raises ConfigError if a phase needs more memory than there is, or if the engine has no room for one sequence of
    the longest length. The message names all such phases and a remedy."""
    complaints = []
    for peak in found:
        if device_bytes is not None and peak.device_bytes > device_bytes:
            most = max(peak.parts, key=lambda part: peak.parts[part])
            complaints.append(
                f"{peak.phase} ({peak.devices}) needs {_gib(peak.device_bytes)}, but a device has "
                f"{_gib(device_bytes)}, and the largest part is {most} ({_gib(peak.parts[most])})"
            )
        if host_bytes is not None and peak.host_bytes > host_bytes:
            complaints.append(
                f"{peak.phase} ({peak.devices}) needs {_gib(peak.host_bytes)} of host memory, but a machine has "
                f"{_gib(host_bytes)}"
            )
    if served is not None and served.sequences < 1:
        complaints.append(
            f"the engine has room for the keys and values of {served.tokens} tokens, but a sequence may have "
            f"{served.context}"
        )
    if complaints:
        raise ConfigError(
            "the run does not fit into memory: "
            + "; ".join(complaints)
            + ". Split the model over more ranks, offload it "
            "(fsdp_config.cpu_offload), lower trainer.max_tokens_per_microbatch or the length of sequences, or change "
            "the engine's share (gpu_memory_utilization, tensor_parallel_size)"
        )


# --- devices of models ----------------------------------------------------------------------------------------------


def _of_devices(
    config: Config, models: Sequence[ModelOnRanks], engine: EnginePlan | None, context: int, device_bytes: int | None
) -> list[Peak]:
    """Peaks of the devices that these models share with each other and, if there is one, with the engine."""
    turns = engine is not None and engine.can_sleep and config.pipeline_depth == 0
    devices = " + ".join([*(model.role for model in models), *([ENGINE] if engine is not None else [])])
    beside: dict[str, int] = {}
    if device_bytes is not None:
        beside["processes"] = PROCESS_BYTES * (len(models) + (engine is not None))
    awake = {} if engine is None else _served_parts(engine, config, context, device_bytes)
    if engine is not None:
        beside |= {"engine, asleep": engine.asleep_bytes} if turns else awake
    leaves = turns or len(models) > 1
    away = {model.role: _away(model) if leaves else _Away() for model in models}
    at_rest = sum(_on_host(model) for model in models)
    asleep = engine.asleep_host_bytes * models[0].ranks_per_node if engine is not None and turns else 0
    found: list[Peak] = []

    def add(phase: str, parts: Mapping[str, int], host: int) -> None:
        shown = {name: size for name, size in {**parts, **beside}.items() if size}
        slept = asleep if "engine, asleep" in beside else 0
        found.append(Peak(devices=devices, phase=phase, parts=shown, host_bytes=at_rest + slept + host))

    for model in models:
        others = sum(away[other.role].total for other in models if other is not model)
        if (loading := _node_sum(model, lambda rank: rank.loading_host_bytes)) > 0:
            add(f"load {model.role}", {}, others + loading)
        if model.role == "reference":
            add("score reference", _fullest(model, ("parameters",), ("activations", "gathered")), others)
            continue
        add(f"train {model.role}", _fullest(model, _KINDS, ("activations", "gathered")), others)
        add(f"step {model.role}", _fullest(model, _KINDS), others)
        copies = _node_sum(model, lambda rank: rank.parameter_bytes + rank.optimizer_bytes)
        stored = copies if config.trainer.async_save else 0
        kinds = _held_between(model, optimizer=True)
        saved = {**_fullest(model, kinds, ("exported",)), "buckets": 2 * MAX_FILE_BYTES}
        add(f"save {model.role}", saved, others + stored + MAX_FILE_BYTES)
    for model in (model for model in models if model.role == "policy"):
        others = sum(away[other.role].total for other in models if other is not model)
        keeps = model.keeps_optimizer or not leaves
        synced = _fullest(model, _held_between(model, optimizer=keeps), ("exported",))
        synced["buckets"] = 2 * config.generator.inference_engine.weight_bucket_bytes
        if turns and engine is not None:
            synced["engine's weights"] = engine.weight_bytes  # an engine that wakes for a sync has no cache yet
        add("sync", synced, others + (0 if keeps else away["policy"].optimizer))
        if turns and engine is not None:
            kept = _fullest(model, ("optimizer",)) if model.keeps_optimizer else {}
            slept = beside.pop("engine, asleep", 0)
            kept_on_device = away["policy"].optimizer if model.keeps_optimizer else 0
            add("generate", {**kept, **awake}, sum(a.total for a in away.values()) - kept_on_device)
            beside["engine, asleep"] = slept
    return found


def _of_engine(engine: EnginePlan, config: Config, context: int, device_bytes: int | None) -> list[Peak]:
    """Peaks of devices that only the engine uses."""
    processes = {} if device_bytes is None else {"processes": PROCESS_BYTES}
    serves = _served_parts(engine, config, context, device_bytes)
    bucket = {"buckets": 2 * config.generator.inference_engine.weight_bucket_bytes}
    return [
        Peak(devices=ENGINE, phase="generate", parts={**serves, **processes}, host_bytes=0),
        Peak(devices=ENGINE, phase="sync", parts={**serves, **bucket, **processes}, host_bytes=0),
    ]


def _served_parts(engine: EnginePlan, config: Config, context: int, device_bytes: int | None) -> dict[str, int]:
    """Kind of memory → bytes on a device, while the engine serves. An engine with a share below 1 allocates its whole
    share: the cache of keys and values gets what weights and computation leave, even if it needs less."""
    room = serving(engine, config, context, device_bytes)
    parts = {"engine's weights": engine.weight_bytes, "engine's computation": engine.computing_bytes}
    cache = round(room.tokens * engine.kv_bytes_per_token)
    if device_bytes is not None and engine.memory_share < 1.0:
        cache = max(cache, round(engine.memory_share * device_bytes) - sum(parts.values()))
    return {**parts, "keys and values": cache}


@attrs.frozen(kw_only=True)
class _Away:
    """Bytes that one model has moved to host memory while another model or the engine uses the devices."""

    parameters: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer


def _away(model: ModelOnRanks) -> _Away:
    return _Away(
        parameters=_node_sum(model, lambda rank: _device_bytes(rank, "parameters")),
        optimizer=_node_sum(model, lambda rank: _device_bytes(rank, "optimizer")),
    )


def _on_host(model: ModelOnRanks) -> int:
    """Bytes of a model's state that are in host memory in all phases, on the fullest machine."""
    return _node_sum(model, lambda rank: sum(_bytes(rank, kind) for kind in rank.on_host))


def _held_between(model: ModelOnRanks, *, optimizer: bool) -> tuple[HeldKind, ...]:
    """The kinds of state that a model holds between two optimizer steps."""
    frees = all(rank.frees_gradients for rank in model.ranks)
    return tuple(kind for kind in _KINDS if (kind != "gradients" or not frees) and (kind != "optimizer" or optimizer))


def _fullest(model: ModelOnRanks, kinds: Sequence[HeldKind], moment: Sequence[str] = ()) -> dict[str, int]:
    """Kind of memory → bytes on the device, for the rank with the largest sum. Counts the `kinds` of state, and the
    temporary memory that `moment` names."""

    def parts(rank: RankPlan) -> dict[str, int]:
        passing = {
            "activations": rank.activation_bytes,
            "gathered": rank.gathered_bytes,
            "exported": rank.export_bytes,
        }
        return {kind: _device_bytes(rank, kind) for kind in kinds} | {name: passing[name] for name in moment}

    return max((parts(rank) for rank in model.ranks), key=lambda found: sum(found.values()))


def _bytes(rank: RankPlan, kind: HeldKind) -> int:
    sizes = {"parameters": rank.parameter_bytes, "gradients": rank.gradient_bytes, "optimizer": rank.optimizer_bytes}
    return sizes[kind]


def _device_bytes(rank: RankPlan, kind: HeldKind) -> int:
    return 0 if kind in rank.on_host else _bytes(rank, kind)


def _node_sum(model: ModelOnRanks, of_rank: Callable[[RankPlan], int]) -> int:
    """The sum over the ranks of a machine, for the machine with the largest sum."""
    size = model.ranks_per_node
    nodes = [model.ranks[first : first + size] for first in range(0, len(model.ranks), size)]
    return max(sum(map(of_rank, ranks)) for ranks in nodes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
