"""The environment `mathematics`: math-verify compares the policy's answer with the row's as mathematical
expressions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Action, Prompt, Row, StepResult, above, at_least, between
from rl_environments.judge_pool import shared_pool
from rl_environments.options import is_number, options_of
from rl_environments.tools.call_formats import without_thought

_MOST_PROCESSES = 4


@attrs.frozen(kw_only=True)
class MathematicsOptions:
    """Options of the environment `mathematics`, from `environment.options` or `environment.options.mathematics`."""

    cpu_s: float = attrs.field(default=10.0, validator=[is_number(float), above(0), between(0, 86400)])
    """CPU time in seconds for comparing one answer, at most a day; an answer that takes longer counts as wrong."""
    processes: int | None = attrs.field(default=None, validator=[is_number(int), at_least(1)])
    """Number of processes that compare answers, about 150 MB each; None: one per CPU core, at most four."""
    wait_s: float = attrs.field(default=280.0, validator=[is_number(float), above(0)])
    """Longest wait for a verdict in seconds. Keep it below `environment.timeout_s`; otherwise that timeout expires
    first, and its error does not name the verdict."""


class MathematicsEnvironment:
    """Reward 1 if the response's answer equals the row's, else 0.

    An answer that takes more than `cpu_s` to compare, or that crashes the comparing process, counts as wrong. The
    policy wrote it, and failing the sample would spare the policy the reward of zero. The sample fails if the process
    was ended for another reason, if there is no verdict within `wait_s`, or if the reference cannot be parsed.

    Metrics: `accuracy`, `has_answer` (an expression was found in the response, or the comparison failed), `given_up`
    (the comparison took too long or crashed its process).
    """

    placement = "in_process"  # it only awaits processes

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: Prompt = row["prompt"]
        self._options = options_of(MathematicsOptions, "mathematics", options)
        self._reference = reference_answer(row)

    @staticmethod
    def require_options(options: Mapping[str, Any]) -> None:
        """See `OptionsChecking`."""
        options_of(MathematicsOptions, "mathematics", options)

    @staticmethod
    def require_row(row: Row) -> None:
        """See `RowChecking`."""
        reference_answer(row)

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """Raises what `JudgePool.verdict` raises."""
        processes = self._options.processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        verdict = await shared_pool(processes).verdict(
            without_thought(action.text), self._reference, cpu_s=self._options.cpu_s, wait_s=self._options.wait_s
        )
        metrics = {
            "accuracy": float(verdict.is_right),
            "has_answer": float(verdict.has_answer),
            "given_up": float(verdict.is_given_up),
        }
        return StepResult(reward=metrics["accuracy"], done=True, metrics=metrics)

    async def close(self) -> None:
        pass


def reference_answer(row: Row) -> str:
    """Returns the row's `reward_spec.ground_truth`, else its `answer`; of a worked solution, only the part after the
    last `####`.

    Raises:
        DataError: the row has neither, or the value is empty, or the value is neither text nor a number.
    """
    spec = row.get("reward_spec")
    given = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    given = row.get("answer") if given is None else given
    is_number_given = isinstance(given, int | float) and not isinstance(given, bool)
    text = str(given).rpartition("####")[2].strip() if isinstance(given, str) or is_number_given else ""
    if not text:
        columns = ", ".join(map(str, row))
        raise DataError(
            "a mathematics row needs reward_spec.ground_truth or answer, a number or text such as '\\frac{1}{2}'; got "
            f"{given!r:.200} (the row has {columns})"
        )
    return text
