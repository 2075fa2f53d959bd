"""Implements `Shards` for a DeepSpeed engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn

from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.perturbation import Piece
from rl_deepspeed.fixes import offloading_torch_adamw
from rl_deepspeed.partitions import Partitions
from rl_transformers.rank.flat_pieces import FlatPiece
from rl_transformers.rank.lora import adapter_tensors
from rl_transformers.rank.token_scorer import Scorer
from rl_transformers.rank.value_head import ValueScorer
from rl_transformers.rank.weights import checkpoint_tensors, exported_weights

_STATES = {
    "parameters": (
        OffloadStateTypeEnum.lp_params,
        OffloadStateTypeEnum.lp_grads,
        OffloadStateTypeEnum.contiguous_grad_buffer,
    ),
    "optimizer": (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states),
}
"""Argument of `Shards.move` → the states that DeepSpeed moves for it."""


class ZeroShards:
    """See `Shards`. DeepSpeed averages gradients over the ranks, so the loss is multiplied by the number of ranks to
    get the sum.

    Args:
        scorer: the model; its parameters are also the engine's.
        engine: DeepSpeed's engine; None for a frozen model that is whole on every rank.
        partitions: how the engine's ZeRO stage partitions the model.
    """

    def __init__(self, scorer: Scorer, engine: Any, partitions: Partitions):
        self.scorer = scorer
        self.module: nn.Module = scorer if engine is None else engine
        self._engine: Any = engine
        self._partitions = partitions
        zero = None if engine is None else engine.optimizer
        self.optimizer: Any = zero if hasattr(zero, "param_groups") else None
        self._away: frozenset[str] = frozenset()
        self._num_backward = 0

    def backward(self, loss: Tensor) -> None:
        """See `Shards`."""
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        self._num_backward += 1

    def let_go(self) -> None:
        """Frees the parameters that stage 3 keeps gathered because it expects to use them again soon."""
        if self._engine is not None:
            self._engine.empty_partition_cache()

    def has_gradients(self) -> bool:
        """See `Shards`."""
        return self._num_backward > 0

    def step(self, settings: StepSettings) -> float:
        """Takes the optimizer step, and returns the gradient norm. DeepSpeed divides gradients by its loss scale (here
        1 / `gradient_scale`), takes the norm, clips, and skips the step if the norm is not finite."""
        zero = self.optimizer
        settings.put_into(zero.optimizer.param_groups)
        zero.clip_grad = settings.max_grad_norm
        scale, zero.loss_scaler.cur_scale = zero.loss_scaler.cur_scale, 1.0 / settings.gradient_scale
        try:
            self._engine.step()
        finally:
            zero.loss_scaler.cur_scale = scale
        self._num_backward = 0
        norm = float(zero._global_grad_norm)
        return norm if math.isfinite(norm) and norm >= 0 else math.inf

    def clear_gradients(self) -> None:
        """See `Shards`."""
        self._partitions.clear()
        self._num_backward = 0

    def exported(self, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields the exported weights, one whole tensor at a time."""
        return self.scorer.exported_weights(self._whole, only_trained=only_trained)

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's weights, one whole tensor at a time."""
        return exported_weights(self.scorer.model, self.scorer.compute_dtype, self._whole)

    def adapters(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapters' weights, one whole tensor at a time."""
        return adapter_tensors(self.scorer.model, dtype, self._whole)

    def head(self) -> dict[str, Tensor]:
        """Returns the value head in float32, whatever the compute dtype is."""
        assert isinstance(self.scorer, ValueScorer)
        named = self.scorer.value_head.named_parameters()
        return {f"value_head.{name}": self._whole([weight], weight.detach).float() for name, weight in named}

    def gradients(self) -> dict[str, Tensor]:
        """See `Shards`."""
        gradients: dict[str, Tensor] = {}
        for name, weight in self.scorer.named_weights():
            if self.has_gradients():
                gradient = self._partitions.gradient(weight).cpu()
            else:
                gradient = torch.zeros(getattr(weight, "ds_shape", weight.shape))
            gradients.update(checkpoint_tensors(self.scorer.model, name, gradient))
        return gradients

    def state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Returns the partitions themselves, not copies, so that a checkpoint is read directly into them."""
        pieces = {}
        for name, weight in self.scorer.named_weights():
            part = self._partitions.part(weight, with_optimizer=with_optimizer)
            place = {"start": part.start, "num_elements": _numel(weight)}
            pieces[f"model/{name}"] = FlatPiece.of(part.weights, **place)
            for kind, moment in part.moments.items():
                pieces[f"optimizer/{name}/{kind}"] = FlatPiece.of(moment, **place)
        return pieces

    def take(self, state: Mapping[str, Any], *, with_optimizer: bool, steps_done: int) -> None:
        """See `Shards`."""
        self._partitions.push()
        if with_optimizer:
            for moments in self.optimizer.optimizer.state.values():
                moments["step"].fill_(steps_done)

    def pieces(self) -> list[Piece]:
        """Returns up to three pieces of each part: the end of a row, whole rows, and the start of a row.

        A part is a contiguous range of elements that may begin and end inside a row; rows lie along the last axis.

        If the model is whole on every rank, all ranks have the same pieces, so `Perturbation` adds the same noise to
        them.
        """
        pieces = []
        for name, weight in self.scorer.named_weights():
            part = self._partitions.part(weight, with_optimizer=False)
            width = getattr(weight, "ds_shape", weight.shape)[-1]
            pieces += _rows(name, part.weights, start=part.start, width=width, num_elements=_numel(weight))
        return pieces

    def take_pieces(self) -> None:
        """See `Shards`."""
        self._partitions.push()

    def move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        """See `Shards`. DeepSpeed offloads selected states but reloads all at once, so states that are to stay on the
        CPU are offloaded again."""
        moved = {kind for kind, is_meant in (("parameters", parameters), ("optimizer", optimizer)) if is_meant}
        if self.optimizer is None:
            if parameters:
                self._partitions.move(device)
            return
        away = self._away | moved if device.type == "cpu" else self._away - moved
        if self._engine.zero_offload_param() is not None or away == self._away:
            return  # with parameters offloaded to the CPU, DeepSpeed moves nothing
        if self._away - away:
            self._engine.reload_states()
            self._away = frozenset()
        include = [state for kind in away - self._away for state in _STATES[kind]]
        if include:
            with offloading_torch_adamw():
                self._engine.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=False)
        self._away = away

    def _whole(self, parameters: Sequence[nn.Parameter], make: Callable[[], Tensor]) -> Tensor:
        """See `Making`. If parameters must be gathered, returns a copy, because gathered parameters are freed again."""
        if not any(hasattr(weight, "ds_id") for weight in parameters):
            return make()
        with GatheredParameters(list(parameters)):
            return make().clone()


def _numel(weight: nn.Parameter) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))


def _rows(name: str, elements: Tensor, *, start: int, width: int, num_elements: int) -> list[Piece]:
    shape = (num_elements // width, width)
    pieces, end = [], start + elements.numel()
    at = start
    while at < end:
        row, column = divmod(at, width)
        count = min(end, (row + 1) * width) - at if column or end - at < width else (end - at) // width * width
        block = elements.narrow(0, at - start, count)
        rows = max(1, count // width)
        pieces.append(Piece(tensor=block.view(rows, -1), name=name, offset=(row, column), shape=shape))
        at += count
    return pieces
