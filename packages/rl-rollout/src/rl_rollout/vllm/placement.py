"""Places servers on Ray's nodes: each engine gets a placement group, with GPUs of its own or shared with training.

A server reserves one GPU for each rank of its engine (tensor × pipeline × data parallel). If Ray has no GPUs, it
reserves only a small part of a CPU per rank, because engines on CPUs share cores. An engine is placed on one node if
any node has enough GPUs; otherwise each rank gets its own bundle, and vLLM starts the ranks through Ray.

Engines that share GPUs with training reserve none: they use the nodes' GPUs in order, each engine on one node. They
also see the node's other GPUs, listed after their own, because weights sent by CUDA IPC can be on any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.errors import ConfigError, DeadlineError
from rl_core.workers.ray_cluster import reserved

_CPUS = 1 / 16
"""CPU resource of an engine's rank; it only limits how many ranks fit on a machine."""
_OF_NODE = 0.001
"""Amount of a node's own resource to request; any amount places the bundle on that node."""


@attrs.frozen(kw_only=True)
class SharedGpus:
    """GPUs of one node that an engine shares with training."""

    node: str
    """The node's own resource in Ray (`node:<address>`)."""
    num_of_node: int
    """Number of GPUs that Ray counts on the node."""
    first: int
    """Index of the engine's first GPU on the node."""
    count: int
    """Number of the engine's GPUs."""

    def visible(self, inherited: str | None) -> str:
        """Returns CUDA_VISIBLE_DEVICES for the engine's processes: the engine's GPUs, then the node's others.

        Args:
            inherited: value of the variable in Ray's process on the node; None: all GPUs are visible.

        Raises:
            ConfigError: fewer GPUs are visible than Ray counts.
        """
        every = [str(i) for i in range(self.num_of_node)] if inherited is None else inherited.split(",")
        if len(every) < self.num_of_node:
            raise ConfigError(
                f"Ray counts {self.num_of_node} GPUs on {self.node}, but CUDA_VISIBLE_DEVICES={inherited} shows "
                f"{len(every)}; start Ray there with --num-gpus={len(every)}"
            )
        own = every[self.first : self.first + self.count]
        return ",".join([*own, *(gpu for gpu in every if gpu not in own)])


@attrs.frozen(kw_only=True)
class EnginePlace:
    """The resources of one engine; they stay reserved while its server is restarted."""

    group: PlacementGroup
    num_gpus: int
    """Total number of GPUs of its ranks; 0 on CPUs."""
    shared: SharedGpus | None = None
    """GPUs shared with training; None: none are shared."""

    @property
    def spans_nodes(self) -> bool:
        """Whether its ranks may be on several machines."""
        return len(self.group.bundle_specs) > 1

    def actor_options(self) -> dict[str, Any]:
        """Returns the Ray options with which the server's actor is created."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group,
                placement_group_bundle_index=0,
                placement_group_capture_child_tasks=self.spans_nodes,
            ),
            "num_cpus": _CPUS,
            # With several nodes, vLLM's Ray executor reserves the GPUs of the ranks.
            "num_gpus": 0 if self.spans_nodes or self.shared else self.num_gpus,
        }

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the server's process that depend on its placement."""
        # By default Ray hides all GPUs that the actor does not reserve.
        return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if self.shared else {}

    def free(self) -> None:
        """Releases the resources."""
        remove_placement_group(self.group)


def cluster_has_gpus() -> bool:
    """Whether Ray's cluster has any GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def num_nodes() -> int:
    """Number of nodes that are alive in Ray's cluster."""
    return sum(node["Alive"] for node in ray.nodes())


async def reserve_places(
    num_engines: int, ranks_per_engine: int, *, shares_devices: bool, timeout_s: float
) -> list[EnginePlace]:
    """Reserves one place per engine.

    Raises:
        ConfigError: the cluster has too few GPUs.
        DeadlineError: the cluster's resources stay occupied for `timeout_s`.
    """
    places: list[EnginePlace] = []
    try:
        for i in range(num_engines):
            places.append(await _reserve(i, ranks_per_engine, shares_devices=shares_devices, timeout_s=timeout_s))
    except BaseException:
        for place in places:
            place.free()
        raise
    return places


async def _reserve(index: int, num_ranks: int, *, shares_devices: bool, timeout_s: float) -> EnginePlace:
    gpus_of_nodes = {_own_resource(node): int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}
    num_gpus = num_ranks if any(gpus_of_nodes.values()) else 0
    if num_gpus > sum(gpus_of_nodes.values()):
        raise ConfigError(
            f"an engine of {num_ranks} ranks (tensor × pipeline × data parallel) needs as many GPUs, but Ray's cluster "
            f"has {sum(gpus_of_nodes.values())}; lower the parallel sizes, or add nodes",
            key="generator.inference_engine",
        )
    shared = shared_gpus(gpus_of_nodes, index, num_gpus) if shares_devices and num_gpus else None
    bundles = _bundles(num_ranks, num_gpus, max(gpus_of_nodes.values()), shared)
    group = await reserved(bundles, "PACK", timeout_s)
    if group is None:
        can_share = num_gpus and not shares_devices
        sharing = ", or set trainer.placement.colocate_all=true to share GPUs" if can_share else ""
        raise DeadlineError(
            f"engine {index}: waited {timeout_s:g} s for {_described(bundles)}; free in Ray's cluster: "
            f"{_described([ray.available_resources()])}. Training or other jobs hold the rest; lower "
            f"generator.inference_engine.num_engines{sharing}"
        )
    return EnginePlace(group=group, num_gpus=num_gpus, shared=shared)


def shared_gpus(gpus_of_nodes: Mapping[str, int], index: int, num_ranks: int) -> SharedGpus:
    """Returns the GPUs that engine `index` shares with training. Engines fill the nodes in order, each on one node.

    Args:
        gpus_of_nodes: GPUs per node, keyed by the node's own resource, in filling order.
        index: number of the engine, from 0.
        num_ranks: ranks of one engine, each of which uses one GPU.

    Raises:
        ConfigError: the nodes have no room for this engine.
    """
    left = index
    for node, num_of_node in gpus_of_nodes.items():
        room = num_of_node // num_ranks
        if left < room:
            return SharedGpus(node=node, num_of_node=num_of_node, first=left * num_ranks, count=num_ranks)
        left -= room
    raise ConfigError(
        f"engine {index} of {num_ranks} ranks has no GPUs left to share: nodes have {list(gpus_of_nodes.values())}, "
        "and each engine must fit on one node. Lower generator.inference_engine.num_engines or its parallel sizes, or "
        "set colocate_all=false",
        key="trainer.placement.colocate_all",
    )


def _own_resource(node: Mapping[str, Any]) -> str:
    return f"node:{node['NodeManagerAddress']}"


def _bundles(num_ranks: int, num_gpus: int, max_gpus_of_node: int, shared: SharedGpus | None) -> list[dict[str, float]]:
    if num_gpus > max_gpus_of_node:
        # vLLM's Ray executor puts one rank into each bundle with a GPU; the server itself needs the CPU.
        return [{"CPU": 2 * _CPUS, "GPU": 1.0} for _ in range(num_ranks)]
    bundle = {"CPU": num_ranks * _CPUS}
    if shared is not None:
        return [bundle | {shared.node: _OF_NODE}]
    return [bundle | {"GPU": float(num_gpus)} if num_gpus else bundle]


def _described(bundles: list[Mapping[str, float]] | list[dict[str, float]]) -> str:
    return " and ".join(", ".join(f"{bundle.get(name, 0):g} {name}" for name in ("CPU", "GPU")) for bundle in bundles)
