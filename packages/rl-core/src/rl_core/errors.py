"""Errors that a user can fix. Messages should say where the mistake is, what the code got and expected, and what to do.

Each concrete error also derives from the matching built-in exception, so that callers who do not know this package can
catch it.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, Self

_P = ParamSpec("_P")
_OWN_PACKAGES = tuple(
    f"rl-{name}"
    for name in ("core", "transformers", "fsdp", "deepspeed", "megatron", "rollout", "environments", "examples")
)


class RLError(Exception):
    """Base class of all errors caused by the user's input, data or machine. The command line prints them without a
    traceback.

    Args:
        text: what is wrong and what to do, without the key.
        key: the configuration key, or the section, that the error is about; None: none. A plug-in's validator gives
            the field's name, and the loader the section above it.
    """

    def __init__(self, text: object = "", *, key: str | None = None):
        super().__init__(text)
        self.text, self.key = str(text), key

    def below(self, section: str) -> Self:
        """The same error, with `section` in front of its key."""
        return type(self)(self.text, key=section if self.key is None else f"{section}.{self.key}")

    def __str__(self) -> str:
        return self.text if self.key is None else f"{self.key}: {self.text}"


class ConfigError(RLError, ValueError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination."""


class ConfigErrors(ConfigError):
    """Several mistakes found by the same checks. A single mistake is raised without this wrapper."""

    errors: tuple[RLError, ...]
    """The mistakes in the order found, each a ConfigError, PluginError or DataError."""

    def __init__(self, errors: Iterable[RLError]):
        self.errors = tuple(errors)
        lines = (f"  {number}. {error}" for number, error in enumerate(self.errors, start=1))
        super().__init__("\n".join([f"{len(self.errors)} mistakes:", *lines]))
        self.args = (self.errors,)


class DataError(RLError, ValueError):
    """Data that cannot be used, such as a file, a row or a reward. The message says which."""


class ShapeError(RLError, ValueError):
    """Tensors whose shapes or dtypes do not fit together."""


class PluginError(RLError, LookupError):
    """A plug-in that is not installed, cannot be imported, or does not fulfil its contract."""


class CheckpointError(RLError, OSError):
    """A checkpoint that is missing, is incomplete, or does not belong to this run."""


class StorageError(CheckpointError):
    """A file of the run that could not be written. A run can resume from an earlier checkpoint."""


class DiskFullError(StorageError):
    """The disk is full. The message says what could not be written."""


class WorkerError(RLError, RuntimeError):
    """A training rank could not start, raised, died, did not answer, or cannot run a call."""


class GenerationError(RLError, RuntimeError):
    """Generation cannot continue, for example because the engine failed, too many samples failed, too many batches were
    rejected, or the generator's result cannot be used for training."""


class WeightSyncError(RLError, RuntimeError):
    """A weight sync failed, for example because a participant left, or because what an engine received differs from
    what the ranks sent."""


class DeadlineError(RLError, TimeoutError):
    """A wait reached its deadline. The message says what was awaited, and for how long."""


class ForeignCodeError(RLError, RuntimeError):
    """A plug-in or other code that the run calls raised a BaseException that is not an Exception, as `sys.exit()` does.
    The message names the code."""


class NonFiniteError(RLError, ArithmeticError):
    """Too many consecutive optimizer steps had a loss or gradient that is not finite, or log-probs are not finite, so
    that rewards cannot be computed."""


def install(requirement: str) -> str:
    """The command that installs a package, with or without an extra. The packages of this project are on no package
    index, so they are installed from a clone."""
    if requirement.partition("[")[0] not in _OWN_PACKAGES:
        return f"pip install {requirement}"
    return f"pip install './packages/{requirement}' in a clone of this project"


class Mistakes:
    """Collects the errors of independent checks, to raise them together.

    Before a check runs, the caller uses `about` to look up the keys that the check reads, and skips the check if one
    of them already has an error. So one mistake is not reported as several.
    """

    def __init__(self) -> None:
        self.errors: list[RLError] = []

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, *errors: RLError) -> None:
        """Records errors, those inside a ConfigErrors one by one, and drops repeated messages."""
        for error in errors:
            for single in error.errors if isinstance(error, ConfigErrors) else (error,):
                if str(single) not in map(str, self.errors):
                    self.errors.append(single)

    def about(self, *keys: str) -> list[RLError]:
        """The errors about one of the keys, a key below it, or a section above it."""
        return [error for error in self.errors if any(_is_about(error, key) for key in keys)]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context that records a ConfigError, PluginError or DataError raised in its block, instead of letting the
        error propagate."""
        try:
            yield
        except (ConfigError, PluginError, DataError) as error:
            self.add(error)

    def passes(self, check: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Runs a check and records its mistakes. Returns whether it found none."""
        with self.gathered():
            check(*args, **kwargs)
            return True
        return False

    def raise_found(self) -> None:
        """Raises the recorded error, or one ConfigErrors if there are several. Does nothing if there are none."""
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else ConfigErrors(self.errors)


def _is_about(error: RLError, key: str) -> bool:
    mistaken, key = f"{error.key}.", f"{key}."
    return key.startswith(mistaken) or mistaken.startswith(key)


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence ` Did you mean 'x'?` for the closest known name, or an empty string.

    If `name` has at least three characters, a known name that begins with `name` is preferred, then one that contains
    `name`. Otherwise, the known name that is most similar to `name` is used. Upper and lower case count as equal.
    """
    name, names = name.lower(), {each.lower(): each for each in known}
    longer = [k for k in names if k.startswith(name)] or [k for k in names if name in k]
    close = longer if len(name) >= 3 and longer else difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {names[close[0]]!r}?" if close else ""


def raised_at(error: BaseException) -> str:
    """Returns `(file.py:line)` of the last frame outside installed packages and the standard library. If all frames are
    inside them, returns the place of the last frame. For an error that was never raised, returns an empty string."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    libraries = (str(Path(os.__file__).parent), *installed)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(file, line) for file, line in frames if not file.startswith("<")]  # such as <frozen importlib._bootstrap>
    own = [(file, line) for file, line in lines if not file.startswith(libraries)]
    return next((f"({Path(file).name}:{line})" for file, line in reversed(own or lines)), "")
