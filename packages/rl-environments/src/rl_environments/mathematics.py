"""The environment `mathematics`: math-verify compares the policy's answer with the row's as mathematical
expressions."""

from __future__ import annotations

import ast
import contextlib
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult, above, at_least, between
from rl_environments.judge_pool import shared_pool
from rl_environments.mathematical_text import choice_and_value, last_box, positional
from rl_environments.options import is_number, options_of

logger = logging.getLogger(__name__)

MOST_TRIED = 10_000
"""Most references that are tried before a run, over all rows, at about 10 ms each. A number, not a time, so that a run
that leaves out refused rows has the same rows when it resumes."""
_PROOF_CPU_S = 10.0
_PLAIN = re.compile(r"[-+]?(?:(\d{1,4000}|\d{1,3}(,\d{3})+)(\.\d+)?|\\[dt]?frac\{\d{1,9}\}\{[1-9]\d{0,8}\})|[A-D]")
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


class MathematicsEnvironment(Environment):
    """Reward 1 if the response's answer equals the row's, else 0.

    An answer that takes more than `cpu_s` to compare, or that crashes the comparing process, counts as wrong. The
    policy wrote it, and failing the sample would spare the policy the reward of zero. The sample fails if the process
    was ended for another reason, or if there is no verdict within `wait_s`.

    Metrics: `accuracy`, `has_answer` (an expression was found in the response, or the comparison failed), `given_up`
    (the comparison took too long or crashed its process).
    """

    placement = "in_process"  # it only awaits processes

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: Prompt = row["prompt"]
        self._options = options_of(MathematicsOptions, "mathematics", options)
        self._references = reference_answers(row)

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        options_of(MathematicsOptions, "mathematics", options)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`. Lets math-verify read references that are not plain numbers, at most
        `MOST_TRIED` in all."""
        for reference in reference_answers(row):
            problem = _proofs.problem(reference)
            if problem is not None:
                raise DataError(
                    f"the reference answer {reference!r:.200} cannot be used: {problem}. Write the answer alone, as a "
                    "number or in LaTeX (`\\frac{1}{2}`, `\\text{Monday}`), or leave the row out"
                )

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """Raises what `JudgePool.verdict` raises."""
        processes = self._options.processes or _default_processes()
        verdict = await shared_pool(processes).verdict(
            action.answer, self._references, cpu_s=self._options.cpu_s, wait_s=self._options.wait_s
        )
        metrics = {
            "accuracy": float(verdict.is_right),
            "has_answer": float(verdict.has_answer),
            "given_up": float(verdict.is_given_up),
        }
        return StepResult(reward=metrics["accuracy"], done=True, metrics=metrics)


def reference_answers(row: Row) -> tuple[str, ...]:
    """Returns the row's right answers, from `reward_spec.ground_truth`, else `answer`, else `solution`; of a worked
    solution, only the part after the last `####`, or in the last `\\boxed{}`. A list of texts, also as JSON text
    (`'["34"]'`, as in Skywork-OR1), has several answers, each of which is right. A number keeps all its digits: 1e-05
    is `0.00001`.

    Raises:
        DataError: the row has neither, or the value is empty, or it is neither text nor a finite number.
    """
    spec = row.get("reward_spec")
    given = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    given = next((each for each in (given, row.get("answer"), row.get("solution")) if each is not None), None)
    texts = [text for each in _listed(given) for text in _alternatives(_text(each))]
    if not texts or not all(texts):
        columns = ", ".join(map(str, row))
        raise DataError(
            "a mathematics row needs reward_spec.ground_truth or answer, a number or text such as '\\frac{1}{2}', or a "
            f"list of right answers as text; got {given!r:.200} (the row has {columns})"
        )
    return tuple(texts)


def _listed(given: Any) -> Sequence[Any]:
    """Returns a list's items, and another value as the only item. A list as text is a list only if its items are texts:
    `[1, 2]` is an interval."""
    if isinstance(given, str) and re.match(r"\s*\[\s*[\"']", given):
        with contextlib.suppress(ValueError, SyntaxError):
            given = ast.literal_eval(given)
    return given if isinstance(given, list | tuple) and all(isinstance(item, str) for item in given) else [given]


def _alternatives(text: str) -> Sequence[str]:
    """Returns letter and value of a multiple-choice answer with both, `\\textbf{(D)}\\ 12`; another text alone."""
    choice = choice_and_value(text)
    return choice if choice and choice[1] else [text]


def _text(given: Any) -> str:
    """Returns an answer as text, or an empty text if it is none; of a worked solution, its answer."""
    if isinstance(given, str):
        text = given.rpartition("####")[2].strip()
        return last_box(text) or text
    is_finite = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    return positional(given) if is_finite else ""


class _Proofs:
    """Which references of this process's rows math-verify can read; each is tried once."""

    def __init__(self) -> None:
        self._problems: dict[str, str | None] = {}

    def problem(self, reference: str) -> str | None:
        """Returns why no answer could be judged by the reference; None if it is usable or not tried."""
        if _PLAIN.fullmatch(reference) or (len(self._problems) >= MOST_TRIED and reference not in self._problems):
            return None
        if reference not in self._problems:
            self._problems[reference] = shared_pool(_default_processes()).problem(reference, cpu_s=_PROOF_CPU_S)
            if len(self._problems) == MOST_TRIED:
                logger.warning(
                    "mathematics: tried %d references; those of further rows are not tried before the run", MOST_TRIED
                )
        return self._problems[reference]


_proofs = _Proofs()


def _default_processes() -> int:
    return min(_MOST_PROCESSES, os.cpu_count() or 1)
