"""Checks an optimizer of the configuration before the run, by steps of small weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from rl_core.config.loading import fitted
from rl_core.errors import ConfigError, nearest
from rl_core.interfaces import OptimizerConfig

_SHAPES = ((5,), (3, 7), (2, 3, 5))


def require_usable_optimizer(config: OptimizerConfig, where: str) -> None:
    """Requires that the optimizer's parameters are known and valid, and that a checkpoint can hold its state. Imports
    torch.

    Args:
        config: name and parameters.
        where: the section's key, for messages.

    Raises:
        ConfigError: they are not.
        PluginError: a factory cannot be imported.
    """
    _require_parameters(config, where)
    import torch

    from rl_core.rank_kit.optimizers import make_states, new_optimizer

    name = f"{where}.name"
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in _SHAPES]
    try:
        optimizer = new_optimizer(config, weights, weights[1:])
        if not isinstance(optimizer, torch.optim.Optimizer):
            made = type(optimizer).__name__
            raise ConfigError(f"{config.name} made {made}; expected a torch.optim.Optimizer", key=name)
        before = [_without_weights(group) for group in optimizer.param_groups]
        make_states(optimizer)
        is_still = all(bool((weight == 1).all()) for weight in weights)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.full_like(weight, 0.1)
            optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{config.name} cannot step a small model: {error}", key=where) from error
    if not is_still:
        raise ConfigError(f"{config.name} changes weights with the learning rate 0; choose another", key=name)
    if [_without_weights(group) for group in optimizer.param_groups] != before:
        raise ConfigError(
            f"{config.name} changes its param_groups in a step, and checkpoints do not contain them; choose an "
            "optimizer that keeps its state per weight",
            key=name,
        )
    for state in optimizer.state.values():
        for kind, value in state.items():
            if not isinstance(value, torch.Tensor):
                given = type(value).__name__
                raise ConfigError(
                    f"{config.name} keeps {kind!r} as {given}, but checkpoints hold only tensors of a state", key=name
                )
            if kind == "step" and (value.numel(), value.sum().item()) != (1, 2):
                raise ConfigError(
                    f"the state `step` of {config.name} is {value.tolist()} after two steps; expected 2", key=name
                )


def _require_parameters(config: OptimizerConfig, where: str) -> None:
    from rl_core.rank_kit.optimizers import optimizer_factory, settings_of

    factory = optimizer_factory(config.name, key=f"{where}.name")
    known, parameters = settings_of(factory), inspect.signature(factory).parameters
    types = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    for name, value in config.params.items():
        key = f"{where}.params.{name}"
        if name not in known:
            names = ", ".join(known) or "none"
            remedy = " Use adam_betas and eps." if config.name == "adamw" else nearest(name, known)
            raise ConfigError(f"{config.name} has no such parameter; it has {names}.{remedy}", key=key)
        if name in types:
            fitted(types[name], value, key)
    if "lr" not in parameters:
        raise ConfigError(f"{config.name} has no parameter `lr`, which every step sets", key=f"{where}.name")
    if "weight_decay" not in parameters and config.weight_decay:
        raise ConfigError(
            f"got {config.weight_decay}, but {config.name} has no weight decay; set it to 0",
            key=f"{where}.weight_decay",
        )


def _without_weights(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
