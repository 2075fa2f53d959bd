"""Optimizers of weights of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from rl_core.interfaces import OptimizerConfig
from rl_core.rank_kit.optimizers import OnWhole, hidden_matrices, is_elementwise, new_optimizer
from rl_transformers.rank.rank_mesh import whole
from rl_transformers.rank.token_scorer import Scorer
from rl_transformers.rank.value_head import ValueScorer


def matrices_of(
    scorer: Scorer, shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda weight: weight.shape
) -> set[nn.Parameter]:
    """The hidden matrices of a scorer, trained or not. `shape_of`: the shape of a whole weight."""
    output = scorer.value_head if isinstance(scorer, ValueScorer) else scorer.model.get_output_embeddings()
    return hidden_matrices(scorer, [output], shape_of)


def on_whole_tensor(weight: nn.Parameter, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """See `OnWhole`, for weights that are whole or DTensors. FSDP2 cuts a stack between its matrices, so a stack is not
    gathered."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    result = function(tensor.to_local()) if tensor.dim() == 3 else own_part(tensor, function(tensor.full_tensor()))
    return like_sharded(tensor, result)


def like_sharded(sharded: DTensor, local: Tensor) -> DTensor:
    """A DTensor like `sharded`, with `local` as this rank's part."""
    mesh, shape, stride = sharded.device_mesh, sharded.shape, sharded.stride()
    return DTensor.from_local(local, mesh, sharded.placements, run_check=False, shape=shape, stride=stride)


def own_part(sharded: DTensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor that is sharded like `sharded`."""
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    for axis, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(axis, min(start, tensor.shape[axis]), length)
    return tensor


class WholeSteps(Optimizer):
    """Steps an optimizer that reads whole weights: gathers one weight and its gradient at a time. Every rank computes
    the same step and keeps its part of the weight, but the whole state."""

    def __init__(self, weights: Iterable[nn.Parameter], config: OptimizerConfig):
        self._stand_ins = {weight: nn.Parameter(_empty(weight)) for weight in weights}
        self._inner = new_optimizer(config, list(self._stand_ins.values()), ())
        sharded = {stand_in: weight for weight, stand_in in self._stand_ins.items()}
        groups = [{**group, "params": [sharded[p] for p in group["params"]]} for group in self._inner.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a step. Collective."""
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in own.items() if name != "params"})
        for weight, stand_in in self._stand_ins.items():
            if weight.grad is None:
                continue
            stand_in.data, stand_in.grad = whole(weight.detach()), whole(weight.grad)
            self._inner.step()
            self.state[weight] = self._inner.state[stand_in]
            if isinstance(weight, DTensor):
                weight.to_local().copy_(own_part(weight, stand_in.data))
            stand_in.data, stand_in.grad = _empty(weight), None


def _empty(weight: nn.Parameter) -> Tensor:
    """A tensor of the weight's whole shape that needs no memory."""
    local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
    return torch.zeros((), dtype=weight.dtype, device=local.device).expand(weight.shape)


def optimizer_of(
    scorer: Scorer,
    config: OptimizerConfig | None,
    *,
    shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda weight: weight.shape,
    on_whole: OnWhole = on_whole_tensor,
) -> Optimizer:
    """Returns the optimizer of all trained parameters, or None without a config; callers never use that None."""
    if config is None:
        return None  # pyright: ignore[reportReturnType]
    weights = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    if not is_elementwise(config) and any(isinstance(weight, DTensor) for weight in weights):
        return WholeSteps(weights, config)
    return new_optimizer(config, weights, matrices_of(scorer, shape_of), on_whole)
