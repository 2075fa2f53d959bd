"""Reads numbers from responses and rows, and compares answers as SQuAD does; shared by several environments."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rl_core.errors import DataError
from rl_core.interfaces import Row

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d*)?")
_BEHIND_HASHES = re.compile(r"####\s*(-?)(?:\$\s*)?(-?[\d.,]*\d)")


def normalized(text: str) -> str:
    """Normalises text as SQuAD does (Rajpurkar et al. 2016): converts it to lower case and removes punctuation,
    articles and repeated spaces. A text of only articles keeps them, as in the answer `A` to a multiple-choice
    question, and a text of only punctuation keeps it. Otherwise such a text would equal an empty answer."""
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    candidates = (re.sub(r"\b(a|an|the)\b", " ", letters), letters, text.lower())
    return " ".join(next(filter(str.strip, candidates), "").split())


def is_exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the normalised answer equals one of the normalised accepted answers."""
    return normalized(answer) in {normalized(each) for each in accepted}


def last_number(text: str) -> Decimal | None:
    """Returns the last number in the text, or None if there is none. Commas may separate thousands."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number_behind_hashes(text: str) -> Decimal | None:
    """Returns the last number that follows a `####`, as in GSM8K's solutions, or None if there is none. The number may
    have a `$` and commas between thousands."""
    found = _BEHIND_HASHES.findall(text)
    return finite_number("".join(found[-1])) if found else None


def number_of_row(row: Row, environment: str) -> Decimal:
    """Returns the row's correct answer, from `answer` or else `reward_spec.ground_truth`. Raises DataError if the value
    is not a number."""
    value = right_answer(row)
    number = finite_number(value)
    if number is None:
        columns = ", ".join(map(str, row))
        raise DataError(
            f"a row of {environment} needs `answer` or `reward_spec.ground_truth`, a number; got {value!r:.80} "
            f"(the row has {columns})"
        )
    return number


def finite_number(value: Any) -> Decimal | None:
    """Converts a number, or text that contains only a number, to a Decimal; None if the number is not finite or the
    text is not a number. Commas may separate thousands (or lakhs), but `1,5` and `1, 2` are not a number."""
    text = str(value).strip()
    try:
        number = Decimal(text.replace(",", "") if "," not in text or _GROUPED.fullmatch(text) else "")
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def right_answer(row: Row) -> Any:
    """Returns the row's `answer`, else its `reward_spec.ground_truth`; None if the row has neither."""
    spec = row.get("reward_spec")
    if row.get("answer") is not None or not isinstance(spec, dict):
        return row.get("answer")
    return spec.get("ground_truth")


def require_prompt(row: Row, environment: str) -> None:
    """Raises DataError if the row's `prompt` is missing, an empty string, or bytes."""
    prompt = row.get("prompt")
    if isinstance(prompt, str | bytes | type(None)) and not (isinstance(prompt, str) and prompt):
        raise DataError(f"a row of {environment} needs `prompt`, text or a list of messages; got {prompt!r:.80}")
