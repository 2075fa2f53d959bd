"""Runs the checks with which environments reject unsuitable options and rows before a run, and reads the rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from rl_core import plugins
from rl_core.config import Config
from rl_core.config.resolving import value_at
from rl_core.config.specs import environment_options
from rl_core.errors import ConfigError, DataError, Mistakes, PluginError, RLError, raised_at
from rl_core.interfaces import Environment, Row
from rl_core.seams import call_problem
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.groups import DataRow

logger = logging.getLogger(__name__)


def configured_rows(config: Config, key: str) -> list[DataRow]:
    """Reads the rows of the data files that a key names. With `data.on_refused_row=drop`, leaves out rows without a
    usable prompt and rows that their environments' own checks refuse, and warns of them.

    Raises:
        DataError, ConfigError: as `read_rows`; or all rows are refused.
    """
    unread: list[DataError] = []
    rows = read_rows(
        value_at(config, key),
        key=key,
        prompt_key=config.data.prompt_key,
        asks_in_chat=config.data.apply_chat_template,
        refused=unread if config.data.on_refused_row == "drop" else None,
    )
    if unread:
        _warn(
            f"{key}: left out {len(unread)} of {len(unread) + len(rows)} rows without a usable prompt; the first: "
            f"{unread[0]}"
        )
    if config.data.on_refused_row == "error" or config.generator.type != "environment":
        return rows
    names = [config.environment.env_class or row.row.get("env_class") for row in rows]
    checks = {name: _row_checks(config, name) for name in set(map(str, names))}
    reasons = [_refusal(checks[str(name)], row.row) for name, row in zip(names, rows, strict=True)]
    refusals = {row.place: reason for row, reason in zip(rows, reasons, strict=True) if reason is not None}
    if not refusals:
        return rows
    first = "{}: {}".format(*next(iter(refusals.items())))
    if len(refusals) == len(rows):
        raise DataError(f"the environment refuses all its rows; the first: {first}", key=key)
    _warn(f"{key}: left out {len(refusals)} of {len(rows)} rows that the environment refuses; the first: {first}")
    return [row for row in rows if row.place not in refusals]


def _row_checks(config: Config, name: str) -> list[Callable[[Row], None]]:
    """The checks of an environment's rows; none if its name or options are wrong, which `gather_unplayable` records."""
    options = environment_options(config.environment)
    try:
        environment: type[Environment] = plugins.load("rl_core.environments", name)
        environment.require_options(options)
    except Exception:
        return []
    return [environment.require_row, lambda row: environment.require_episode(row, options)]


def _refusal(checks: Sequence[Callable[[Row], None]], row: Row) -> str | None:
    """Why an environment's checks refuse a row; None if they do not, or if a check fails in another way, which
    `gather_unplayable` records."""
    try:
        for check in checks:
            check(row)
    except DataError as error:
        return str(error)
    except Exception:
        return None
    return None


@lru_cache(64)
def _warn(message: str) -> None:
    """Logs a warning once, because the rows are read for several checks."""
    logger.warning(message)


def gather_unplayable(
    name: str,
    environment: type[Environment],
    options: Mapping[str, Any],
    rows: Sequence[DataRow],
    mistakes: Mistakes,
    *,
    remedy: str = "",
) -> None:
    """Records what an environment's own checks find: a mistake in the options, and the first row that the environment
    cannot play. Also records a check that cannot be called.

    Args:
        name: the environment's name, for messages.
        options: `environment.options`, as the environment gets them.
        remedy: what ends the message about a refused row.
    """
    is_right = mistakes.passes(_require_options, name, environment.require_options, options)
    is_right &= mistakes.passes(_require_rows, name, environment.require_row, rows, remedy)
    if is_right:
        mistakes.passes(_require_rows, name, environment.require_episode, rows, remedy, options)


def _require_options(name: str, check: Callable[..., Any], options: Mapping[str, Any]) -> None:
    _require_callable(name, check)
    with _naming(name, check, ConfigError, "the options"):
        check(options)


def _require_rows(name: str, check: Callable[..., Any], rows: Sequence[DataRow], remedy: str, *further: Any) -> None:
    _require_callable(name, check)
    for row in rows:
        try:
            with _naming(name, check, DataError, "a row"):
                check(row.row, *further)
        except DataError as error:
            raise DataError(f"{row.place}: {error}{remedy}") from error


def _require_callable(name: str, check: Callable[..., Any]) -> None:
    """Requires that a check has the contract's parameters and needs no instance."""
    expected = vars(Environment)[check.__name__].__func__
    problem = call_problem(expected.__name__, expected, check)
    if problem is not None:
        needs_instance = next(iter(inspect.signature(check).parameters), None) == "self"
        right = f"`def {expected.__name__}({', '.join([*inspect.signature(expected).parameters][1:])})`"
        remedy = "define it as a class method" if needs_instance else f"define it as {right}"
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
