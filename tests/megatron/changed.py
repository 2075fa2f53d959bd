"""Megatron with one thing taken away in its ranks' processes: what is kept must be needed, and missed by a test."""

from __future__ import annotations

import attrs

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_megatron.backend import MegatronBackend


@attrs.frozen(kw_only=True)
class ChangedBackend(MegatronBackend):
    """`MegatronBackend`, whose ranks call a function of this module first."""

    change: str

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        globals()[self.change]()
        return super().create_worker(spec, rank)


@attrs.frozen(kw_only=True)
class UncheckedBackend(MegatronBackend):
    """`MegatronBackend` that takes any model."""

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_megatron.model import chunks as model

        model.refuse = lambda *_: None
        return super().create_worker(spec, rank)


def _nothing() -> None:
    pass


def leave_out_scatter() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_scatter = _nothing


def leave_out_expert_gathering() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_expert_gathering = _nothing


def leave_out_expert_names() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_expert_names = _nothing


def leave_out_router_gating() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_router_gating = _nothing


def leave_out_latent_attention() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_latent_attention = _nothing


def leave_out_loading_of_torch_adam() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_loading_of_torch_adam = _nothing


def leave_out_steps() -> None:
    """Moments keep the one step tensor that Megatron loads for all parameters."""
    from rl_megatron.rank.optimizer import Optimizer

    Optimizer.set_steps = lambda self, steps_done: None  # pyright: ignore[reportAttributeAccessIssue]


def leave_out_rotary_base() -> None:
    from rl_megatron.model import chunks as model

    model._rotary_fields = lambda config, is_latent: {}


def leave_out_initialisation() -> None:
    """Weights without Megatron's marks of what is split over tensor ranks."""
    from rl_megatron.model import chunks as model

    fields = model._provider_fields
    model._provider_fields = lambda *args: fields(*args) | {"perform_initialization": False}


def leave_out_padding_token() -> None:
    from rl_megatron.model import chunks as model

    model._exclude_padding_token = lambda chunks, pad_token_id: None


def leave_out_norm_mark() -> None:
    from rl_megatron.model.norm import RmsNorm

    make = RmsNorm.__init__

    def without_mark(self, *args, **kwargs) -> None:
        make(self, *args, **kwargs)
        del self.weight.sequence_parallel

    RmsNorm.__init__ = without_mark


def split_contiguously() -> None:
    """Context ranks take contiguous parts of each sequence where attention expects mirrored chunks."""
    from itertools import pairwise

    import numpy as np

    from rl_megatron.rank import micro_batch

    def contiguous(boundaries, rank: int, size: int):
        parts = [np.arange(a, b).reshape(size, -1)[rank] for a, b in pairwise(boundaries)]
        return np.concatenate(parts)

    micro_batch.context_positions = contiguous
