"""Selects the parameters that `trainer.<model>.model.trainable` names. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from rl_core.errors import ConfigError

Parts = Sequence[Sequence[str]]
"""The tensors of a checkpoint that a parameter holds: one, or several if the model stores them together. Each tensor
has one name, or several if it is tied."""


def require_expressions(expressions: Sequence[str], key: str) -> None:
    """Raises ConfigError unless there is an expression, and each is valid. `key`: the configuration's key."""
    if not expressions:
        raise ConfigError("got an empty list, which would freeze every parameter; leave it out to train all", key=key)
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise ConfigError(f"{expression!r} is not a regular expression: {error}", key=key) from error


def trained_parameters(expressions: Sequence[str], parameters: Mapping[str, Parts], key: str) -> frozenset[str]:
    """The names of the parameters that are trained. A checkpoint's tensor is trained if an expression matches
    (`re.search`) one of its names.

    Args:
        expressions: regular expressions, checked by `require_expressions`.
        parameters: all parameters of the model, each with the checkpoint's tensors that it holds.
        key: the configuration's key.

    Raises:
        ConfigError: an expression matches no tensor, or a parameter holds trained and frozen tensors.
    """
    names = [name for parts in parameters.values() for part in parts for name in part]
    for expression in expressions:
        if not any(re.search(expression, name) for name in names):
            raise ConfigError(
                f"{expression!r} matches no parameter of the model; near names are "
                f"{', '.join(_nearest(expression, names))}",
                key=key,
            )
    trained = set()
    for parameter, parts in parameters.items():
        matched = [any(re.search(one, name) for one in expressions for name in part) for part in parts]
        if any(matched) and not all(matched):
            with_them, without = (
                next(p[0] for p, m in zip(parts, matched, strict=True) if m is is_in) for is_in in (True, False)
            )
            raise ConfigError(
                f"{with_them} is trained and {without} is frozen, but the model holds both in one parameter "
                f"({parameter}): name both or neither",
                key=key,
            )
        if all(matched):
            trained.add(parameter)
    return frozenset(trained)


def unit_of(name: str) -> str:
    """The part of a model that a weight sync sends as a whole, by the name of one of its tensors: a layer (`layers.3.`)
    or, outside the layers, the tensor. Engines store tensors of one layer together, and load them only together."""
    layer = re.match(r".*?\.\d+\.", name)
    return name if layer is None else layer[0]


def _nearest(expression: str, names: Iterable[str]) -> list[str]:
    """Up to three names that are similar to the expression's text."""
    asked = re.sub(r"[\\^$()\[\]]|\.\*", "", expression)
    return difflib.get_close_matches(asked, names, n=3, cutoff=0.0)
