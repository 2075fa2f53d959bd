"""The ranks of one model in torch: their process group, and the subgroup that splits sequences."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.interfaces import RankInfo
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import COLLECTIVE_TIMEOUT, join_process_group


@attrs.frozen(kw_only=True, eq=False)
class UlyssesGroup:
    """Ranks that each hold an equal slice of a micro-batch's tokens and, in attention, an equal part of the heads."""

    rank: int
    size: int
    group: dist.ProcessGroup


@attrs.frozen(kw_only=True, eq=False)
class RankMesh:
    """One rank's view of all ranks of its model."""

    rank: int
    mesh: Mesh
    device: torch.device
    ulysses: UlyssesGroup | None
    """None: sequences are not split."""
    made_process_group: bool
    """Whether this object created the process group. False: another model in this process did, and will destroy it."""

    @classmethod
    def join(cls, info: RankInfo, device: torch.device, mesh: Mesh) -> RankMesh:
        """Joins the process group. Waits for all ranks.

        Args:
            info: this rank's place, and the address at which ranks meet.
            device: this rank's device.
            mesh: the mesh of the ranks.
        """
        # Two models with one rank each may be in the same process. With several ranks, each rank has its own process.
        is_new = not dist.is_initialized()
        if is_new:
            join_process_group(info, device)
        assert dist.get_world_size() == info.world_size
        ulysses = _ulysses_group(info.rank, mesh)
        return cls(rank=info.rank, mesh=mesh, device=device, ulysses=ulysses, made_process_group=is_new)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads the model and sends weights."""
        return self.rank == 0

    @property
    def returns_results(self) -> bool:
        """Whether the controller reads this rank's scores."""
        return self.mesh.returns_results(self.rank)

    def leave(self) -> None:
        """Destroys the process group on this rank, if this object created it."""
        if self.made_process_group:
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; collective. Other tensors are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ulysses_group(rank: int, mesh: Mesh) -> UlyssesGroup | None:
    if mesh.sequence == 1:
        return None
    own = None
    for members in mesh.groups("sequence"):  # collective: every rank creates every group, in the same order
        group = dist.new_group(members, timeout=COLLECTIVE_TIMEOUT)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            own = UlyssesGroup(rank=members.index(rank), size=mesh.sequence, group=group)
    return own
