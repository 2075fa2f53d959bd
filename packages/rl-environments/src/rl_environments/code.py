"""The environment `code`: the policy writes a Python program, which the row's tests judge in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs.validators import optional

from rl_core.errors import ConfigError
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult, above, at_least, between, without_thought
from rl_environments.code_tests import ExpectedTest, expected_tests
from rl_environments.options import is_number, one_of, options_of
from rl_environments.sandbox import ProgramLimits, ProgramOutcome, Sandbox, shared_sandbox
from rl_environments.sandbox.slots import MOST_SLOTS

_FENCED = re.compile(r"^([ \t]*)```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")


def _limits(given: Mapping[str, Any] | ProgramLimits) -> ProgramLimits:
    if isinstance(given, ProgramLimits):
        return given
    known = {field.name for field in attrs.fields(ProgramLimits)}
    if not isinstance(given, Mapping) or set(given) - known:
        raise ConfigError(f"got {given!r}; expected a mapping with keys among {', '.join(sorted(known))}", key="limits")
    for name, value in given.items():
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        is_right = is_whole or (name == "wall_s" and isinstance(value, float))
        if not is_right or isinstance(value, bool):
            raise ConfigError(
                f"got {value!r}; expected {'a number' if name == 'wall_s' else 'an integer'}", key=f"limits.{name}"
            )
    try:
        # The kernel's limits are integers, and in YAML `1e9` is a float.
        return ProgramLimits(**{name: value if name == "wall_s" else int(value) for name, value in given.items()})
    except ConfigError as error:
        raise error.below("limits") from error


def _is_text(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"got {value!r}; expected text that is not empty", key=field.name)


def _is_list_of_text(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(path, str) for path in value):
        raise ConfigError(f"got {value!r}; expected a list of paths, such as [/srv/data]", key=field.name)


@attrs.frozen(kw_only=True)
class CodeOptions:
    """Options of the environment `code`, from `environment.options` or `environment.options.code`."""

    reward: Literal["all", "fraction"] = attrs.field(default="all", validator=one_of("all", "fraction"))
    """`all`: 1 if all tests pass, else 0; tests after the first failing one are not run. `fraction`: the fraction of
    tests that pass."""
    max_tests: int | None = attrs.field(default=None, validator=[is_number(int), at_least(1)])
    """Number of tests to run, counted from the first; None: all."""
    limits: ProgramLimits = attrs.field(factory=ProgramLimits, converter=_limits)
    """Limits of each test: fields of `rl_environments.sandbox.ProgramLimits`."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = attrs.field(
        default="auto", validator=one_of("auto", "bubblewrap", "landlock", "none")
    )
    """`auto` uses bubblewrap, else Landlock, and fails if neither works. `none` runs programs without protection."""
    python: str | None = attrs.field(default=None, validator=optional(_is_text))
    """Path of the interpreter that runs the programs. None: the system's, or this process's if the system's does not
    work."""
    readable: Sequence[str] = attrs.field(default=(), validator=_is_list_of_text)
    """Directories that programs may read besides the system's."""
    slots: int | None = attrs.field(default=None, validator=[is_number(int), between(1, MOST_SLOTS)])
    """Maximum number of programs that this user runs on the machine at a time; None: one per CPU core."""
    wait_s: float = attrs.field(default=280.0, validator=[is_number(float), above(0)])
    """Longest wait for a slot in seconds. Keep it below `environment.timeout_s`; otherwise that timeout expires first,
    and its error does not name the slot."""


class CodeEnvironment(Environment):
    """Takes the program from the last fenced block of the response, and runs it on the row's tests. The reward is 1 if
    all of them pass, else 0; or, with the option `reward=fraction`, the fraction that passes.

    Metrics: `accuracy` (all tests pass), `passed` (the fraction that passes; tests that are not run count as failed),
    `has_program`, `syntax_error`, `timed_out` (a test reached its CPU or wall-clock limit), `sandbox_<mechanism>`.
    """

    placement = "in_process"  # it only awaits processes and compares bounded text

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: Prompt = row["prompt"]
        self._options = options_of(CodeOptions, "code", options)
        self._tests = expected_tests(row)[: self._options.max_tests]

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        options_of(CodeOptions, "code", options)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        expected_tests(row)

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`. Raises ConfigError if no sandbox works on this machine, and SandboxError or
        DeadlineError if the sandbox fails. In these cases the sample fails and gets no reward, because the program is
        not to blame."""
        sandbox = await shared_sandbox(
            self._options.sandbox,
            python=self._options.python,
            readable=tuple(self._options.readable),
            slots=self._options.slots,
        )
        program = program_in(action.answer)
        outcomes = [] if program is None else await self._outcomes(sandbox, program)
        passed = sum(_pass(self._tests, outcomes)) / len(self._tests)
        metrics = {
            "accuracy": float(passed == 1.0),
            "passed": passed,
            "has_program": float(program is not None),
            "syntax_error": float(any(outcome.end == "syntax_error" for outcome in outcomes)),
            "timed_out": float(any(outcome.end in ("cpu_limit", "wall_limit") for outcome in outcomes)),
            f"sandbox_{sandbox.mechanism}": 1.0,
        }
        reward = passed if self._options.reward == "fraction" else metrics["accuracy"]
        return StepResult(reward=reward, done=True, metrics=metrics)

    async def _outcomes(self, sandbox: Sandbox, program: str) -> list[ProgramOutcome]:
        """Runs the tests in order and returns their outcomes. With the reward `all`, stops after the first test that
        fails."""
        outcomes: list[ProgramOutcome] = []
        async with sandbox.opened(program, limits=self._options.limits, wait_s=self._options.wait_s) as session:
            for expected in self._tests:
                outcomes.append(await session.run(expected.test))
                if self._options.reward == "all" and not expected.passes(outcomes[-1]):
                    break
        return outcomes


def program_in(response: str) -> str | None:
    """Returns the last fenced block that is marked as Python or names no language, or None if there is none.

    Blocks in the model's thinking do not count, nor does an unterminated block (the response was cut off). As in
    Markdown, the indentation of the fence, for example in a list, is removed from every line of the block.
    """
    blocks = [found for found in _FENCED.findall(without_thought(response)) if found[1].lower() in _PYTHON]
    if not blocks:
        return None
    indentation, _, body = blocks[-1]
    return re.sub(rf"^[ \t]{{1,{len(indentation)}}}", "", body, flags=re.MULTILINE) if indentation else body


def _pass(tests: Sequence[ExpectedTest], outcomes: Sequence[ProgramOutcome]) -> list[bool]:
    return [expected.passes(outcome) for expected, outcome in zip(tests, outcomes, strict=False)]
