"""Implements `Shards` for parameters that are separate tensors, and helpers that both FSDP generations use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.optimizers import make_states, move_states, set_steps, state_tensors
from rl_core.rank_kit.perturbation import Piece
from rl_fsdp.optimizers import optimizer_of
from rl_fsdp.perturbation import trained_pieces
from rl_transformers.rank.lora import adapter_tensors
from rl_transformers.rank.rank_mesh import whole
from rl_transformers.rank.token_scorer import Scorer
from rl_transformers.rank.value_head import ValueScorer, head_tensors
from rl_transformers.rank.weights import checkpoint_tensors, exported_weights


class TensorShards:
    """`Shards` of a model whose parameters are separate tensors: whole on a single rank, DTensors under FSDP2."""

    def __init__(self, scorer: Scorer, spec: WorkerSpec):
        self.scorer = scorer
        self.module: nn.Module = scorer
        self.optimizer = optimizer_of(scorer, spec.optimizer)
        self._stays_on_cpu: bool = spec.options.cpu_offload

    def backward(self, loss: Tensor) -> None:
        """See `Shards`. The loss is not scaled, because FSDP2 is configured to sum gradients."""
        loss.backward()

    def let_go(self) -> None:
        """Frees gathered parameters. After backward none are left, because FSDP2 frees them itself."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def has_gradients(self) -> bool:
        """See `Shards`."""
        return any(parameter.grad is not None for parameter in self.scorer.parameters())

    def step(self, settings: StepSettings) -> float:
        """See `Shards`."""
        scale_gradients(self.scorer, settings.gradient_scale)
        return step_if_finite(self.optimizer, settings, self._clip(settings.max_grad_norm))

    def _clip(self, max_norm: float) -> float:
        """Returns the gradient norm over all ranks; scales gradients down to `max_norm` if `max_norm` is above 0 and
        the norm is finite."""
        parameters = [p for p in self.scorer.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = whole(norm).item()
        if max_norm > 0 and math.isfinite(total):
            clip_grads_with_norm_(parameters, max_norm, norm)
        return total

    def clear_gradients(self) -> None:
        """See `Shards`."""
        self.optimizer.zero_grad()

    def exported(self, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields one tensor at a time."""
        return self.scorer.exported_weights(only_trained=only_trained)

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields one tensor at a time."""
        return exported_weights(self.scorer.model, self.scorer.compute_dtype)

    def gradients(self) -> dict[str, Tensor]:
        """See `Shards`."""
        gradients = {}
        for name, weight in self.scorer.named_weights():
            gradient = whole(torch.zeros_like(weight) if weight.grad is None else weight.grad)
            gradients.update(checkpoint_tensors(self.scorer.model, name, gradient.detach().cpu().clone()))
        return gradients

    def adapters(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yields one tensor at a time."""
        return adapter_tensors(self.scorer.model, dtype)

    def head(self) -> dict[str, Tensor]:
        """See `Shards`."""
        assert isinstance(self.scorer, ValueScorer)
        return {name: whole(weight.detach()) for name, weight in head_tensors(self.scorer).items()}

    def state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Returns the tensors themselves, not copies, so that a checkpoint is read directly into them."""
        if with_optimizer:
            make_states(self.optimizer)
        tensors = {}
        for name, weight in self.scorer.named_weights():
            tensors[f"model/{name}"] = weight.detach()
            if with_optimizer:
                kept = state_tensors(self.optimizer.state[weight])
                tensors |= {f"optimizer/{name}/{kind}": tensor for kind, tensor in kept.items()}
        return tensors

    def take(self, state: Mapping[str, Tensor], *, with_optimizer: bool, steps_done: int) -> None:
        """Sets the number of steps; the checkpoint was already read into the tensors."""
        if with_optimizer:
            set_steps(self.optimizer, steps_done)

    def pieces(self) -> list[Piece]:
        """See `Shards`."""
        return list(trained_pieces(self.state(with_optimizer=False)))

    def take_pieces(self) -> None:
        """Does nothing: the pieces are the parameters themselves."""

    def move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        """See `Shards`."""
        if self._stays_on_cpu:
            return
        if parameters:
            self.scorer.to(device)
        if optimizer:
            move_states(self.optimizer, device)


def scale_gradients(scorer: Scorer, factor: float) -> None:
    """Multiplies every gradient by `factor` in place."""
    if factor != 1.0:
        for parameter in scorer.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def step_if_finite(optimizer: Optimizer, settings: StepSettings, grad_norm: float) -> float:
    """Takes a step if the norm is finite, clears the gradients, and returns the norm."""
    if math.isfinite(grad_norm):
        settings.put_into(optimizer.param_groups)
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm
