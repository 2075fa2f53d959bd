"""Derives from the parameters of a loss function which columns and scores it reads. The docstring of `objective`
explains each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rl_core.columns import FIELDS, KEPT_COLUMNS, ROUTE_COLUMNS
from rl_core.errors import PluginError, nearest

CURRENT = ("logprobs", "entropies", "predicted_values")
"""Scores that the current model computes."""
_OF_INPUTS = (*ROUTE_COLUMNS, *KEPT_COLUMNS)
COLUMNS = tuple(name for name, field in FIELDS.items() if field.axes == "T" and name not in _OF_INPUTS)
"""Per-token columns of a batch that a loss may read."""


def require_loss_parameters(function: Callable[..., Any]) -> None:
    """Raises PluginError unless all parameters of a loss and of its `prepare` function are known, and are consistent
    with each other and with what the loss declares about corrections."""
    name, prepare = function_name(function), getattr(function, "prepare", None)
    parameters = positional_with_defaults(function, name)
    prepare_parameters = positional_with_defaults(prepare, name) if prepare else {}
    if prepare is None and (made := [parameter for parameter in parameters if parameter.startswith("x_")]):
        raise PluginError(
            f"{name} reads {made[0]!r}, but has no `prepare` function that computes it; decorate it with prepared_by"
        )
    for parameter in parameters:
        _require_known_parameter(name, parameter, "sequence_T")
    for parameter in prepare_parameters:
        _require_known_parameter(name, parameter, "sequence_T", "group_T")
    reads_weights = "correction_weights_T" in {**parameters, **prepare_parameters}
    declared = getattr(function, "corrections", None)
    if declared is not None and (declared == "reads") != reads_weights:
        has = "has the" if reads_weights else "has no"
        raise PluginError(
            f"{name}: declares corrections {declared!r}, but {has} parameter correction_weights_T; a loss has this "
            "parameter if and only if it declares 'reads'"
        )
    if current := [
        parameter
        for parameter in prepare_parameters
        if parameter.removesuffix("_T") in CURRENT or parameter.startswith("x_")
    ]:
        raise PluginError(
            f"{name}: its prepare function reads {current[0]!r}, which is computed only after this function has run; "
            "read a column of the batch instead, such as old_logprobs_T"
        )


def column_of(parameter: str) -> str:
    """The column that a parameter reads: the parameter's name without `_T`; `mask_T` reads `loss_mask`."""
    return "loss_mask" if parameter == "mask_T" else parameter.removesuffix("_T")


def function_name(function: Callable[..., Any]) -> str:
    """The function's name, for messages."""
    return getattr(function, "__name__", repr(function))


def positional_with_defaults(function: Callable[..., Any], where: str) -> dict[str, bool]:
    """Positional parameter → whether it has a default. Raises PluginError for a parameter that cannot be passed by
    name, such as `*args`."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(
                f"{where}: parameter {parameter} cannot be passed by name; list columns as plain parameters"
            )
        found[name] = parameter.default is not parameter.empty
    return found


def _require_known_parameter(where: str, name: str, *indices: str) -> None:
    known = [f"{column}_T" for column in (*CURRENT, *COLUMNS)] + ["mask_T", *indices]
    if name not in known and not (name.startswith("x_") and name.endswith("_T")):
        raise PluginError(
            f"{where}: parameter {name!r} is neither a column nor a value of the current model "
            f"({', '.join(known)}, x_…_T).{nearest(name, known)} A setting must be keyword-only: put it after `*`"
        )
