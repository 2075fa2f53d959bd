"""Noise on the trained parameters for a moment, taken away bit for bit: how the path of every tensor is proved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl_fsdp.shards import Shards


class Perturbation:
    """Noise that is on; made by `perturb`, undone by `restore`."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        self._kept = kept

    @classmethod
    @torch.no_grad()
    def perturb(cls, shards: Shards, *, seed: int, scale: float) -> Perturbation:
        """Collective. See `rl_core.interfaces.Perturbable.perturb`; a copy of this rank's part is kept on the CPU."""
        state = shards.state(None)
        kept = {}
        for i, (name, tensor) in enumerate(state.items()):
            local, piece = _piece(tensor)
            kept[name] = local.detach().to("cpu", copy=True)
            if local.numel():
                generator = torch.Generator().manual_seed(_seed_of(seed, i, *piece))
                noise = torch.randn(local.shape, generator=generator).to(local.device)
                least = max(tensor.shape[-1:], default=1) ** -0.5
                rms = local.float().square().mean().sqrt().clamp(min=least)
                local.add_((scale * rms * noise).to(local.dtype))
        shards.take(state, None)
        return cls(kept)

    @torch.no_grad()
    def restore(self, shards: Shards) -> None:
        """Collective."""
        state = shards.state(None)
        for name, tensor in state.items():
            _piece(tensor)[0].copy_(self._kept[name])
        shards.take(state, None)


def _piece(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and which part that is: the same for ranks that hold the same."""
    if not isinstance(tensor, DTensor):
        return tensor, ()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    piece = [i for i, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Shard)]
    return tensor.to_local(), tuple(piece)


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
