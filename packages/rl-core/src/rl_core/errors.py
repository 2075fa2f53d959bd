"""Errors a user can act on. Each message says what was given, what was expected, where, and what to do.

A leaf also is the matching stdlib type, so callers that know nothing of this package catch what they expect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

_P = ParamSpec("_P")
_OWN_PACKAGES = ("rl-core", "rl-fsdp", "rl-deepspeed", "rl-megatron", "rl-rollout", "rl-environments", "rl-examples")


class RLError(Exception):
    """Base of every error that a user's input, data or machine can cause. The command line prints it without a
    traceback."""


class ConfigError(RLError, ValueError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination."""


class ConfigErrors(ConfigError):
    """Several mistakes that were found together. One mistake alone is raised as what it is."""

    def __init__(self, errors: Iterable[RLError]):
        super().__init__(tuple(errors))

    @property
    def errors(self) -> tuple[RLError, ...]:
        """Each mistake as it would be raised alone, a ConfigError, PluginError or DataError, in the order found."""
        return self.args[0]

    def __str__(self) -> str:
        lines = (f"  {number}. {error}" for number, error in enumerate(self.errors, start=1))
        return "\n".join([f"{len(self.errors)} mistakes:", *lines])


class DataError(RLError, ValueError):
    """A data file or row that cannot be used; the message names the file and the row."""


class ShapeError(RLError, ValueError):
    """Tensors whose shapes or dtypes do not fit together."""


class PluginError(RLError, LookupError):
    """A plug-in that is not installed, cannot be imported, or follows another contract version."""


class CheckpointError(RLError, OSError):
    """A checkpoint that is missing, incomplete or does not belong to this run."""


class DiskFullError(CheckpointError):
    """There is no room for what a run has to write; the message says for what, and what is there of it."""


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


def install(requirement: str) -> str:
    """The command that installs a package, with an extra or without; those of this project are on no index and lie in
    its clone."""
    if requirement.partition("[")[0] not in _OWN_PACKAGES:
        return f"pip install {requirement}"
    return f"pip install './packages/{requirement}' in a clone of this project"


class Mistakes:
    """Gathers the errors of checks that do not depend on each other, to be raised together.

    An error's key is what its message begins with, up to the first colon or equals sign. A check that reads keys is run
    only while none of them is mistaken (`about`), so that no error follows from another one.
    """

    def __init__(self) -> None:
        self.errors: list[RLError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, *errors: RLError) -> None:
        """Notes errors, of a ConfigErrors each; one that says what an earlier one says is the same mistake."""
        for error in errors:
            for single in error.errors if isinstance(error, ConfigErrors) else (error,):
                if str(single) not in map(str, self.errors):
                    self.errors.append(single)

    def about(self, *keys: str) -> list[RLError]:
        """The errors about one of the keys, about a key below it, or about a section above it."""
        return [error for error in self.errors if any(_is_about(error, key) for key in keys)]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Notes a mistake that is raised inside, and goes on behind the block."""
        try:
            yield
        except (ConfigError, PluginError, DataError) as error:
            self.add(error)

    def passes(self, check: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Runs a check, notes its mistakes, and says whether there were none."""
        try:
            check(*args, **kwargs)
        except (ConfigError, PluginError, DataError) as error:
            self.add(error)
            return False
        return True

    def raise_found(self) -> None:
        """Raises the error that was found, or one ConfigErrors of several; nothing where none was."""
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else ConfigErrors(self.errors)


def _is_about(error: RLError, key: str) -> bool:
    mistaken, key = f"{re.split('[:=]', str(error), maxsplit=1)[0]}.", f"{key}."
    return key.startswith(mistaken) or mistaken.startswith(key)


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence ` Did you mean 'x'?` for the closest known name, or an empty string.

    A name that begins with three or more typed letters comes first, then one that contains them, then a similar one.
    """
    names = list(known)
    longer = [k for k in names if k.startswith(name)] or [k for k in names if name in k]
    close = longer if len(name) >= 3 and longer else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
