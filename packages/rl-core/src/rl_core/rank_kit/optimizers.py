"""The state that an optimizer keeps for each weight. Its layout is the optimizer's own: nothing here knows its names,
except `step`, the number of steps that a state has accumulated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def make_states(optimizer: Optimizer) -> None:
    """Creates the states of all weights that have none, so that a state can be saved or loaded before the first step.

    The optimizer creates them in a step with zero gradients and the learning rate 0. Accumulated gradients and all
    weights keep their values. If the ranks' parts of a weight are stepped together, this function is collective.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    missing = [weight for weight in weights if weight not in optimizer.state]
    if not missing:
        return
    gradients, rates = [weight.grad for weight in weights], [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in missing:
        value = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        weight.grad = None
        weight.copy_(value)
        _set_step(optimizer.state[weight], 0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def state_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a weight's state that a checkpoint contains: all but the number of steps."""
    return {name: tensor for name, tensor in state.items() if name != "step"}


def set_steps(optimizer: Optimizer, steps_done: int) -> None:
    """Sets the number of steps that the states have accumulated."""
    for state in optimizer.state.values():
        _set_step(state, steps_done)


def _set_step(state: dict[str, Tensor], steps_done: int) -> None:
    if "step" in state:
        state["step"].fill_(steps_done)


def move_states(optimizer: Optimizer, device: torch.device) -> None:
    """Moves the states to `device`."""
    for state in optimizer.state.values():
        state.update({name: tensor.to(device) for name, tensor in state.items()})
