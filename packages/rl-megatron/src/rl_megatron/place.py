"""A rank's place in the mesh, and its process groups.

Megatron's own functions that return a group are declared to return Any; those here have precise types.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from rl_core.layout.mesh import Coordinates, Mesh


@attrs.frozen(kw_only=True)
class Place:
    """This rank's place in the mesh."""

    rank: int
    mesh: Mesh
    device: torch.device

    @property
    def coordinates(self) -> Coordinates:
        """The rank's coordinate on each axis."""
        return self.mesh.coordinates(self.rank)

    @property
    def returns_results(self) -> bool:
        """Whether the controller reads this rank's scores."""
        return self.mesh.returns_results(self.rank)


def tensor_group() -> ProcessGroup:
    """Returns the group of ranks that split matrices and, between matrices, tokens."""
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_group() -> ProcessGroup:
    """Returns the group of ranks that split each sequence."""
    return cast(ProcessGroup, parallel_state.get_context_parallel_group())


def pipeline_group() -> ProcessGroup:
    """Returns the group of ranks that hold the pipeline stages of one replica, first stage to last."""
    return cast(ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def expert_group() -> ProcessGroup:
    """Returns the group of ranks that split the experts."""
    return cast(ProcessGroup, parallel_state.get_expert_model_parallel_group())


def embedding_group() -> ProcessGroup | None:
    """Returns the group of the first and the last stage, which both hold a tied embedding; None on other stages."""
    return cast(Any, parallel_state.get_embedding_group()) if parallel_state.is_rank_in_embedding_group() else None
