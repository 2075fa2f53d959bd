"""The ranks of one model as torch sees them: their process group, and the part of it that splits sequences."""

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
    """Ranks that each hold an even slice of a micro-batch's tokens, and inside attention an even part of the heads."""

    rank: int
    size: int
    group: dist.ProcessGroup


@attrs.frozen(kw_only=True, eq=False)
class RankMesh:
    """What one of several ranks knows of all of them."""

    rank: int
    mesh: Mesh
    device: torch.device
    ulysses: UlyssesGroup | None
    """None: sequences are not split."""
    made_process_group: bool
    """False where another model's ranks made it, and end it."""

    @classmethod
    def join(cls, info: RankInfo, device: torch.device, mesh: Mesh) -> RankMesh:
        """Waits for all ranks.

        Args:
            info: where they meet.
            device: of this rank.
            mesh: how they split a batch.
        """
        # Two models of one rank each may stand in one process; ranks of several have a process of their own.
        is_new = not dist.is_initialized()
        if is_new:
            join_process_group(info, device)
        assert dist.get_world_size() == info.world_size
        ulysses = _ulysses_group(info.rank, mesh)
        return cls(rank=info.rank, mesh=mesh, device=device, ulysses=ulysses, made_process_group=is_new)

    @property
    def is_first(self) -> bool:
        """This rank reads the model and hands weights out."""
        return self.rank == 0

    @property
    def returns_results(self) -> bool:
        """The controller reads the scores of this rank."""
        return self.mesh.returns_results(self.rank)

    def leave(self) -> None:
        """Ends this rank's part of the process group."""
        if self.made_process_group:
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, gathered by all ranks together; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ulysses_group(rank: int, mesh: Mesh) -> UlyssesGroup | None:
    if mesh.sequence == 1:
        return None
    own = None
    for members in mesh.groups("sequence"):  # every rank takes part in making every group, in the same order
        group = dist.new_group(members, timeout=COLLECTIVE_TIMEOUT)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            own = UlyssesGroup(rank=members.index(rank), size=mesh.sequence, group=group)
    return own
