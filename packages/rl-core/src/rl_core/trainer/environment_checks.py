"""Runs the checks with which environments reject unsuitable options and rows before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rl_core.errors import ConfigError, DataError, Mistakes, PluginError, RLError, raised_at
from rl_core.interfaces import EpisodeChecking, OptionsChecking, RowChecking
from rl_core.seams import call_problem
from rl_core.trainer.data import DataRow


def gather_unplayable(
    name: str, environment: object, options: Mapping[str, Any], rows: Sequence[DataRow], mistakes: Mistakes
) -> None:
    """Records what an environment's own checks find (`OptionsChecking`, `RowChecking`, `EpisodeChecking`): a mistake in
    the options, and the first row that the environment cannot play. Also records a check that cannot be called.

    Args:
        name: the environment's name, for messages.
        environment: its class or factory.
        options: `environment.options`, as the environment gets them.
    """
    is_right = True
    if isinstance(environment, OptionsChecking):
        is_right = mistakes.passes(_require_options, name, environment, options)
    if isinstance(environment, RowChecking):
        check = environment.require_row
        is_right &= mistakes.passes(_require_rows, name, RowChecking.require_row, check, rows)
    if is_right and isinstance(environment, EpisodeChecking):
        check = environment.require_episode
        mistakes.passes(_require_rows, name, EpisodeChecking.require_episode, check, rows, options)


def _require_options(name: str, environment: OptionsChecking, options: Mapping[str, Any]) -> None:
    _require_callable(name, OptionsChecking.require_options, environment.require_options)
    with _naming(name, OptionsChecking.require_options, ConfigError, "the options"):
        environment.require_options(options)


def _require_rows(
    name: str, expected: Callable[..., Any], check: Callable[..., Any], rows: Sequence[DataRow], *further: Any
) -> None:
    _require_callable(name, expected, check)
    for row in rows:
        try:
            with _naming(name, expected, DataError, "a row"):
                check(row.row, *further)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error


def _require_callable(name: str, expected: Callable[..., Any], check: Callable[..., Any]) -> None:
    """Requires that a check has the contract's parameters and needs no instance."""
    problem = call_problem(expected.__name__, expected, check)
    if problem is not None:
        needs_instance = next(iter(inspect.signature(check).parameters), None) == "self"
        right = f"`def {expected.__name__}({', '.join([*inspect.signature(expected).parameters][1:])})`"
        remedy = "define it as a static method" if needs_instance else f"define it as {right}"
        raise PluginError(f"the environment {name!r}: its {problem}; {remedy}")


@contextmanager
def _naming(name: str, check: Callable[..., Any], refusal: type[RLError], what: str) -> Iterator[None]:
    """Context that converts an exception of a user's check, such as a KeyError, to the error that the check should have
    raised."""
    try:
        yield
    except RLError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {error} {raised_at(error)}".rstrip()
        raise refusal(
            f"{check.__name__} of the environment {name!r} raised {raised}; to refuse {what}, raise "
            f"rl_core.errors.{refusal.__name__}"
        ) from error
