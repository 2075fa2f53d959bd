"""FSDP backends with a deliberate fault in the ranks' processes, which a test must detect."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend


@attrs.frozen(kw_only=True)
class ChangedFsdp(FsdpBackend):
    """`FsdpBackend` whose ranks first call the function of this module that `change` names."""

    change: str

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        globals()[self.change](rank)
        return super().create_worker(spec, rank)


def take_the_first_ranks_routes(rank: RankInfo) -> None:
    """All ranks that split a packed sequence read the routes of its first part."""
    from rl_transformers.rank import micro_batch

    def of_first_part(batch: Batch, index_C: Tensor, device: torch.device) -> Any:
        return routes(batch, torch.arange(len(index_C)).clamp(max=batch.num_tokens - 1), device)

    routes, micro_batch._routes = micro_batch._routes, of_first_part


def recompute_by_own_choice(rank: RankInfo) -> None:
    """During recomputation, routers choose experts again instead of repeating the choices of the forward pass."""
    from rl_transformers.expert_choices import _Block

    choose = _Block.choose

    def choose_again(self: Any, own_CK: Tensor) -> Tensor:
        return choose(self, own_CK) if self.taken_CK is None else own_CK

    _Block.choose = choose_again
