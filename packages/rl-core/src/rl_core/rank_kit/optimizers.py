"""Optimizers by name, and the state that an optimizer keeps for each weight.

The layout of a state is the optimizer's own: nothing here knows the names of its tensors, except `step`, the number of
steps that a state has accumulated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from rl_core.errors import ConfigError, PluginError, nearest
from rl_core.interfaces import OptimizerConfig
from rl_core.plugins import import_object

Weights = list[nn.Parameter]
OnWhole = Callable[[nn.Parameter, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""(weight, tensor with this rank's part of the weight, function of the whole tensor that keeps its shape) → this rank's
part of the function's result. Collective if ranks hold parts. A weight with three axes is a stack of matrices; its
function treats each matrix by itself, so it may be called with fewer matrices."""


def sgd(
    weights: Weights, *, lr: float, weight_decay: float, momentum: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """torch's SGD, whose weight decay is added to the gradient. Without dampening, which torch's first step ignores, so
    that a step from a state saved before the first step would differ."""
    return SGD(weights, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)


def adafactor(
    weights: Weights,
    *,
    lr: float,
    weight_decay: float,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
) -> Optimizer:
    """torch's Adafactor (Shazeer & Stern 2018, arXiv 1804.04235)."""
    return Adafactor(weights, lr=lr, weight_decay=weight_decay, beta2_decay=beta2_decay, eps=eps, d=d)


class MuonAndAdamW(Optimizer):
    """Muon (arXiv 2502.16982) for hidden matrices, AdamW for all other weights.

    With gradient G: B ← μ B + (1 − μ) G, and W ← (1 − lr · weight decay) W − lr · scale · O(update). The update is B
    or, with `nesterov`, μ B + (1 − μ) G. O(X) = `orthogonalized`. Everything but O is computed where the weights are.

    Args:
        weights: all weights; both optimizers use the same learning rate and weight decay.
        matrices: those of `weights` that Muon steps. A weight with three axes is a stack of matrices (experts); each is
            stepped by itself.
        on_whole: see `OnWhole`.
        momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: as of `torch.optim.Muon`. The scale of an
            m × n matrix is 0.2 · √max(m, n) with `match_rms_adamw`, so that a step is about as large as AdamW's and the
            same learning rate fits both; √max(1, m / n) with `original`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        lr: float,
        weight_decay: float,
        adam_betas: tuple[float, float],
        adam_eps: float,
        matrices: Set[nn.Parameter],
        on_whole: OnWhole,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    ):
        if not 0 <= momentum < 1 or ns_steps < 1 or eps <= 0:
            raise ValueError(
                f"got momentum={momentum}, ns_steps={ns_steps}, eps={eps}; expected momentum from 0 to below 1, "
                "ns_steps of at least 1, and eps above 0"
            )
        others = [weight for weight in weights if weight not in matrices]
        self._adamw = AdamW(
            [{"params": others}], lr=lr, betas=adam_betas, eps=adam_eps, weight_decay=weight_decay, fused=True
        )
        self._momentum, self._nesterov, self._on_whole = momentum, nesterov, on_whole
        self._direction = partial(orthogonalized, coefficients=ns_coefficients, num_steps=ns_steps, eps=eps)
        self._matches_adamw = adjust_lr_fn == "match_rms_adamw"
        own = {"params": [weight for weight in weights if weight in matrices], "lr": lr, "weight_decay": weight_decay}
        super().__init__([own, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a step of both optimizers. A weight without a gradient is left as it is."""
        own, others = self.param_groups
        self._adamw.param_groups, self._adamw.state = [others], self.state
        self._adamw.step()
        for weight in own["params"]:
            if weight.grad is not None:
                self._step_matrix(weight, weight.grad, own["lr"], own["weight_decay"])

    def _step_matrix(self, weight: nn.Parameter, gradient: Tensor, rate: float, weight_decay: float) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(buffer, self._momentum) if self._nesterov else buffer
        direction = self._on_whole(weight, update, self._scaled_direction)
        weight.mul_(1 - rate * weight_decay).add_(direction, alpha=-rate)

    def _scaled_direction(self, update: Tensor) -> Tensor:
        if update.dim() == 3:
            return torch.stack([self._scaled_direction(matrix) for matrix in update]) if len(update) else update
        rows, columns = update.shape
        scale = 0.2 * math.sqrt(max(rows, columns)) if self._matches_adamw else math.sqrt(max(1, rows / columns))
        return scale * self._direction(update)


def orthogonalized(
    matrix_MN: Tensor, *, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Approximately U Vᵀ of a matrix U S Vᵀ, by the Newton-Schulz iteration of Muon: X / ‖X‖, then `num_steps` times
    X ← a X + (b A + c A²) X with A = X Xᵀ and (a, b, c) = `coefficients`.

    In the matrix's own dtype, float32. `torch.optim.Muon` iterates in bfloat16, and the iteration enlarges rounding
    errors of small singular values up to a ^ num_steps = 485 times. Three steps with learning rates up to 1e-3, on one
    rank and by the reference, then differed by 2.6e-5 in a weight of a small model, instead of by 3e-8.
    """
    a, b, c = coefficients
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if is_tall else matrix_MN
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


FACTORIES: dict[str, Callable[..., Any]] = {
    "adamw": AdamW,
    "muon": MuonAndAdamW,
    "sgd": sgd,
    "adafactor": adafactor,
}
"""Name → what makes the optimizer."""
_SET_BY_KEYS = ("lr", "weight_decay", "adam_betas", "adam_eps", "matrices", "on_whole")


def hidden_matrices(
    module: nn.Module, outputs: Iterable[nn.Module | None], shape_of: Callable[[nn.Parameter], Sequence[int]]
) -> set[nn.Parameter]:
    """The weights that Muon steps: all with two or three axes, except those of embeddings, convolutions and `outputs`.
    A weight that an embedding shares is left out.

    Args:
        module: the model.
        outputs: output layers and value heads.
        shape_of: the shape of a whole weight.
    """
    found, left_out = set(), set()
    for child in module.modules():
        is_hidden = not isinstance(child, nn.Embedding | nn.modules.conv._ConvNd) and not any(
            child is output for output in outputs
        )
        own = [weight for weight in child.parameters(recurse=False) if len(shape_of(weight)) in (2, 3)]
        (found if is_hidden else left_out).update(own)
    return found - left_out


def is_elementwise(config: OptimizerConfig) -> bool:
    """Whether the optimizer steps each element of a weight by itself, so that ranks can step their parts. Muon counts
    as elementwise: it gathers what it needs itself."""
    return config.name != "adafactor" and (
        ":" not in config.name or getattr(optimizer_factory(config.name), "is_elementwise", False)
    )


def new_optimizer(
    config: OptimizerConfig,
    weights: Weights,
    matrices: Collection[nn.Parameter],
    on_whole: OnWhole = lambda weight, tensor, function: function(tensor),
) -> Optimizer:
    """Returns the optimizer of all trained weights.

    Args:
        config: its name and settings.
        weights: the trained weights, or this rank's parts of them if `is_elementwise`.
        matrices: those weights that are hidden matrices (`hidden_matrices`).
        on_whole: how a function of whole weights is computed; by default, all weights are whole.
    """
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **config.params}
    if config.name == "adamw":
        settings |= {"betas": config.adam_betas, "eps": config.eps, "fused": True}
    if config.name == "muon":
        settings |= {"adam_betas": config.adam_betas, "adam_eps": config.eps}
        settings |= {"matrices": set(matrices), "on_whole": on_whole}
    factory = optimizer_factory(config.name)
    if "weight_decay" not in inspect.signature(factory).parameters:
        del settings["weight_decay"]
    return factory(weights, **settings)


def optimizer_factory(name: str, *, key: str | None = None) -> Callable[..., Any]:
    """What makes the optimizer of this name: one of `FACTORIES`, or the object at `package.module:factory`. Raises
    ConfigError or PluginError, about `key`, if there is none."""
    if ":" in name:
        found = import_object(name, key=key)
        if not callable(found):
            kind = type(found).__name__
            raise PluginError(f"{name} is {kind}; expected a function that makes an optimizer", key=key)
        return found
    if name not in FACTORIES:
        names = ", ".join(FACTORIES)
        raise ConfigError(
            f"{name!r} is not an optimizer ({names}, or package.module:factory).{nearest(name, FACTORIES)}", key=key
        )
    return FACTORIES[name]


def settings_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a factory that `optimizer_config.params` may set: all that no other key sets."""
    if factory is AdamW:
        return {}
    parameters = list(inspect.signature(factory).parameters.items())[1:]
    return {name: parameter for name, parameter in parameters if name not in _SET_BY_KEYS}


@attrs.frozen
class StateLayout:
    """The tensors that an optimizer keeps for one weight."""

    axes: tuple[tuple[int | None, ...], ...]
    """For each tensor, the weight's axis along which each of its axes lies; None: an axis of size 1."""
    num_axes: int

    @property
    def num_alike(self) -> int:
        """Number of tensors with the weight's shape."""
        return sum(axes == tuple(range(self.num_axes)) for axes in self.axes)

    def num_elements(self, shape: Sequence[int]) -> int:
        """Number of elements of all tensors, for a weight of this shape."""
        return sum(math.prod(1 if axis is None else shape[axis] for axis in axes) for axes in self.axes)


def state_layout(config: OptimizerConfig, *, num_axes: int, is_matrix: bool) -> StateLayout:
    """Steps a small weight whose axes have different lengths, and reads its state.

    Raises:
        ConfigError: a tensor of the state has a length that is not one of the weight's.
    """
    shape = (3, 5, 7, 11, 13)[:num_axes]
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = new_optimizer(config, [weight], [weight] if is_matrix else [])
    make_states(optimizer)
    found = []
    for kind, tensor in state_tensors(optimizer.state[weight]).items():
        unknown = [length for length in tensor.shape if length not in (*shape, 1)]
        if unknown:
            raise ConfigError(
                f"{config.name} keeps {kind!r} of the shape {tuple(tensor.shape)} for a weight of the shape {shape}, "
                "so its size for other weights is unknown",
                key="optimizer_config.name",
            )
        found.append(tuple(None if length == 1 else shape.index(length) for length in tensor.shape))
    return StateLayout(tuple(found), num_axes)


@torch.no_grad()
def make_states(optimizer: Optimizer) -> None:
    """Creates the states of all weights that have none, so that a state can be saved or loaded before the first step.
    Collective, if steps are.

    The optimizer creates them in a step with zero gradients, without weight decay, and with the learning rate 0.
    Weights and accumulated gradients keep their values.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    missing = [weight for weight in weights if weight not in optimizer.state]
    if not missing:
        return
    gradients, settings = [weight.grad for weight in weights], [dict(group) for group in optimizer.param_groups]
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group.update(dict.fromkeys({"lr", "weight_decay"} & group.keys(), 0.0))
    for weight in missing:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight in missing:
        _set_step(optimizer.state[weight], 0)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update({name: kept[name] for name in ("lr", "weight_decay") if name in kept})
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def state_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a weight's state that a checkpoint contains: all but the number of steps."""
    return {name: tensor for name, tensor in state.items() if name != "step" and isinstance(tensor, Tensor)}


def set_steps(optimizer: Optimizer, steps_done: int) -> None:
    """Sets the number of steps that the states have accumulated."""
    for state in optimizer.state.values():
        _set_step(state, steps_done)


def _set_step(state: dict[str, Tensor], steps_done: int) -> None:
    if isinstance(step := state.get("step"), Tensor):
        step.fill_(steps_done)


def move_states(optimizer: Optimizer, device: torch.device) -> None:
    """Moves the states to `device`."""
    for state in optimizer.state.values():
        state.update({name: tensor.to(device) for name, tensor in state.items() if isinstance(tensor, Tensor)})
