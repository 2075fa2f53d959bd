"""Errors a user can act on. Each message says what was given, what was expected, where, and what to do.

A leaf also is the matching stdlib type, so callers that know nothing of this package catch what they expect.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLError(Exception):
    """Base of every error that a user's input, data or machine can cause. The command line prints it without a
    traceback."""


class ConfigError(RLError, ValueError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination."""


class DataError(RLError, ValueError):
    """A data file or row that cannot be used; the message names the file and the row."""


class ShapeError(RLError, ValueError):
    """Tensors whose shapes or dtypes do not fit together."""


class PluginError(RLError, LookupError):
    """A plug-in that is not installed, cannot be imported, or follows another contract version."""


class CheckpointError(RLError, OSError):
    """A checkpoint that is missing, incomplete or does not belong to this run."""


class WorkerError(RLError, RuntimeError):
    """A training rank raised, died or did not answer; the message names the rank and what it was doing."""


class GenerationError(RLError, RuntimeError):
    """Rollouts cannot go on: the engine failed, or every rollout of a step did."""


class WeightSyncError(RLError, RuntimeError):
    """The weights an engine received are not the weights that the trainer sent."""


class DeadlineError(RLError, TimeoutError):
    """A wait ran into its deadline; the message names what was waited for and for how long."""


class NonFiniteError(RLError, ArithmeticError):
    """Too many optimizer steps in a row had a loss or gradient that is not finite."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence ` Did you mean 'x'?` for the closest known name, or an empty string.

    A name that begins with three or more typed letters comes first, then one that contains them, then a similar one.
    """
    names = list(known)
    longer = [k for k in names if k.startswith(name)] or [k for k in names if name in k]
    close = longer if len(name) >= 3 and longer else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_error(group: BaseExceptionGroup) -> BaseException:
    """The first leaf of a task group's errors: the one that ended the others."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
