"""Functions that decide which rank and micro-batch each sequence goes to, which tokens and layers each rank holds, and
which steps of a trajectory are merged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.layout.balancing import (
        equal_count_partition,
        flop_cost,
        greedy_partition,
        karmarkar_karp_partition,
        part_members,
        part_sums,
    )
    from rl_core.layout.merging import PrefixMerge, merge_prefixes, require_complete_trajectories
    from rl_core.layout.mesh import Coordinates, Mesh
    from rl_core.layout.packing import padded_lengths, plan_micro_batches
    from rl_core.layout.rectangles import rectangle_cells, rectangle_rows
    from rl_core.layout.slices import (
        Layout,
        context_positions,
        even_slice,
        inverse_index,
        packed_layout,
        padded_layout,
        rank_positions,
    )
    from rl_core.layout.stages import LayerRange, layers_in, moe_layers, pipeline_chunks

_MODULES = {
    "Mesh": "mesh",
    "Coordinates": "mesh",
    "plan_micro_batches": "packing",
    "padded_lengths": "packing",
    "greedy_partition": "balancing",
    "equal_count_partition": "balancing",
    "karmarkar_karp_partition": "balancing",
    "flop_cost": "balancing",
    "part_sums": "balancing",
    "part_members": "balancing",
    "rectangle_rows": "rectangles",
    "rectangle_cells": "rectangles",
    "Layout": "slices",
    "packed_layout": "slices",
    "padded_layout": "slices",
    "rank_positions": "slices",
    "context_positions": "slices",
    "even_slice": "slices",
    "inverse_index": "slices",
    "pipeline_chunks": "stages",
    "LayerRange": "stages",
    "moe_layers": "stages",
    "layers_in": "stages",
    "merge_prefixes": "merging",
    "PrefixMerge": "merging",
    "require_complete_trajectories": "merging",
}
__all__ = [
    "Mesh",
    "Coordinates",
    "plan_micro_batches",
    "padded_lengths",
    "greedy_partition",
    "equal_count_partition",
    "karmarkar_karp_partition",
    "flop_cost",
    "part_sums",
    "part_members",
    "rectangle_rows",
    "rectangle_cells",
    "Layout",
    "packed_layout",
    "padded_layout",
    "rank_positions",
    "context_positions",
    "even_slice",
    "inverse_index",
    "pipeline_chunks",
    "LayerRange",
    "moe_layers",
    "layers_in",
    "merge_prefixes",
    "PrefixMerge",
    "require_complete_trajectories",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
