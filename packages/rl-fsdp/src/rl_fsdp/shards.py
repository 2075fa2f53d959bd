"""What a worker does with the parameters it holds, whole or sharded, without knowing which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from rl_fsdp.model import Scorer
from rl_fsdp.rank_mesh import whole
from rl_fsdp.weights import checkpoint_tensors, exported_weights

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shards(Protocol):
    """One rank's part of a scorer. All methods are collective: every rank calls them in the same order."""

    scorer: Scorer
    module: nn.Module
    """What is called in place of the scorer: the wrapper that gathers its parameters, or the scorer itself."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of the sum over all ranks of `loss`."""
        ...

    def let_go(self) -> None:
        """Frees what scoring has gathered."""
        ...

    def clip(self, max_norm: float) -> float:
        """The global L2 norm of all gradients; they are scaled down to `max_norm`, if it is above 0 and the norm
        finite."""
        ...

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names in the dtype that is computed in, whole, a few at a time."""
        ...

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `exported`, without a critic's head."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Whole, under Hugging Face names, on the CPU; zeros where there is none."""
        ...

    def state(self, optimizer: AdamW | None) -> dict[str, Tensor]:
        """`model/<name>` and `optimizer/<name>/<moment>`, whole or as DTensors."""
        ...

    def take(self, state: Mapping[str, Tensor], optimizer: AdamW | None) -> None:
        """Continues with what was read into `state`."""
        ...

    def move(self, device: torch.device) -> None:
        """Parameters and gradients to `device`."""
        ...


class TensorShards:
    """Parameters are tensors of their own: whole on one rank, DTensors under FSDP2."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.module: nn.Module = scorer

    def backward(self, loss: Tensor) -> None:
        """FSDP2 was told to sum."""
        loss.backward()

    def let_go(self) -> None:
        """After backward there is nothing left to do; it lets go by itself."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip(self, max_norm: float) -> float:
        """See `Shards`."""
        parameters = [p for p in self.scorer.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = whole(norm).item()
        if max_norm > 0 and math.isfinite(total):
            clip_grads_with_norm_(parameters, max_norm, norm)
        return total

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time."""
        return self.scorer.exported_weights()

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor at a time."""
        return exported_weights(self.scorer.model, self.scorer.compute_dtype)

    def gradients(self) -> dict[str, Tensor]:
        """See `Shards`."""
        gradients = {}
        for name, weight in self.scorer.named_weights():
            gradient = whole(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            gradients.update(checkpoint_tensors(self.scorer.model, name, gradient.detach().cpu().clone()))
        return gradients

    def state(self, optimizer: AdamW | None) -> dict[str, Tensor]:
        """The tensors themselves: what is read into them is taken."""
        tensors = {}
        for name, weight in self.scorer.named_weights():
            tensors[f"model/{name}"] = weight.detach()
            if optimizer is not None:
                moments = moments_of(optimizer, weight)
                tensors |= {f"optimizer/{name}/{kind}": moments[kind] for kind in MOMENTS}
        return tensors

    def take(self, state: Mapping[str, Tensor], optimizer: AdamW | None) -> None:
        """Nothing is left to do."""

    def move(self, device: torch.device) -> None:
        """See `Shards`."""
        self.scorer.to(device)


def moments_of(optimizer: AdamW, weight: nn.Parameter) -> dict[str, Tensor]:
    """What AdamW keeps for `weight`. It makes that, as zeros, in its first step; here it is made if it is missing."""
    moments = optimizer.state[weight]
    if not moments:
        moments["step"] = torch.zeros((), device=weight.device)
        moments.update({kind: torch.zeros_like(weight).detach() for kind in MOMENTS})
    return moments
