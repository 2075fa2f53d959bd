"""Where servers run: one placement group per engine, made by Ray, or the training's own GPUs.

A server takes the GPUs of its engine (tensor × pipeline × data parallel ranks) or, where Ray has no GPUs, only a small
part of a CPU per rank: engines on CPUs share cores by time. An engine stands on one node if a node has room for it,
else each of its ranks is a bundle of its own and vLLM starts them through Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.errors import ConfigError, DeadlineError
from rl_core.workers.ray_ranks import reserved

_CPUS = 1 / 16
"""CPU resource of an engine's rank; it only bounds how many a machine takes."""


@attrs.frozen(kw_only=True)
class EnginePlace:
    """The resources of one engine; they stay reserved while its server is restarted."""

    group: PlacementGroup
    num_gpus: int
    """Of its ranks together; 0 on CPUs."""
    shares_devices: bool
    """The GPUs are also the training's."""
    first_gpu: int
    """Sharing only: its first GPU on the node."""

    @property
    def spans_nodes(self) -> bool:
        """Its ranks are on several machines."""
        return len(self.group.bundle_specs) > 1

    def actor_options(self) -> dict[str, Any]:
        """Options of the server's actor."""
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group,
                placement_group_bundle_index=0,
                placement_group_capture_child_tasks=self.spans_nodes,
            ),
            "num_cpus": _CPUS,
            # Ranks on other nodes take theirs through vLLM's Ray executor.
            "num_gpus": 0 if self.spans_nodes or self.shares_devices else self.num_gpus,
        }

    def environment(self) -> dict[str, str]:
        """Environment of the server's process that the place decides."""
        if not self.shares_devices or not self.num_gpus:
            return {}
        visible = range(self.first_gpu, self.first_gpu + self.num_gpus)
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible)),
            # Ray would hide GPUs that the actor did not ask for.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }

    def free(self) -> None:
        """Gives the resources back."""
        remove_placement_group(self.group)


def cluster_has_gpus() -> bool:
    """Ray has any."""
    return ray.cluster_resources().get("GPU", 0) > 0


def num_nodes() -> int:
    """Machines of Ray's cluster."""
    return sum(node["Alive"] for node in ray.nodes())


async def reserve_places(
    num_engines: int, ranks_per_engine: int, *, shares_devices: bool, timeout_s: float
) -> list[EnginePlace]:
    """One place per engine.

    Raises:
        ConfigError: the cluster is too small.
        DeadlineError: it stays occupied.
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
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus_of_nodes = [int(node.get("GPU", 0)) for node in nodes]
    num_gpus = num_ranks if any(gpus_of_nodes) else 0
    if num_gpus > sum(gpus_of_nodes):
        raise ConfigError(
            f"generator.inference_engine: an engine of {num_ranks} ranks (tensor × pipeline × data parallel) needs as "
            f"many GPUs, and Ray's cluster has {sum(gpus_of_nodes)}; lower the parallel sizes, or add nodes"
        )
    bundles = _bundles(num_ranks, num_gpus, max(gpus_of_nodes), shares_devices)
    group = await reserved(bundles, "PACK", timeout_s)
    if group is None:
        raise DeadlineError(
            f"engine {index}: waited {timeout_s:g} s for {_described(bundles)}; free in Ray's cluster: "
            f"{_described([ray.available_resources()])}. Training or other jobs hold the rest; lower "
            "generator.inference_engine.num_engines, or set trainer.placement.colocate_all=true to share GPUs"
        )
    per_node = max(gpus_of_nodes, default=0)
    first = index * num_ranks % per_node if shares_devices and per_node else 0
    return EnginePlace(group=group, num_gpus=num_gpus, shares_devices=shares_devices, first_gpu=first)


def _bundles(num_ranks: int, num_gpus: int, max_gpus_of_node: int, shares_devices: bool) -> list[dict[str, float]]:
    if num_gpus > max_gpus_of_node:
        # vLLM's Ray executor puts one rank into each bundle with a GPU; the server itself needs the CPU.
        return [{"CPU": 2 * _CPUS, "GPU": 1.0} for _ in range(num_ranks)]
    bundle = {"CPU": num_ranks * _CPUS}
    return [bundle if shares_devices or not num_gpus else bundle | {"GPU": float(num_gpus)}]


def _described(bundles: list[Mapping[str, float]] | list[dict[str, float]]) -> str:
    return " and ".join(", ".join(f"{bundle.get(name, 0):g} {name}" for name in ("CPU", "GPU")) for bundle in bundles)
