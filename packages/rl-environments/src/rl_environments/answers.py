"""What several environments read out of a response or a row: numbers, and answers as SQuAD compares them."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rl_core.errors import DataError
from rl_core.interfaces import Row

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and doubled spaces: SQuAD's normalisation (Rajpurkar et al. 2016)."""
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def is_exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer is one of those that are accepted, both normalised."""
    return normalized(answer) in {normalized(each) for each in accepted}


def last_number(text: str) -> Decimal | None:
    """The last number that stands in the text; thousands may be parted by commas."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def number_behind_hashes(text: str) -> Decimal | None:
    """GSM8K's form: the number behind the last `####`; None where there is none."""
    _, hashes, behind = text.rpartition("####")
    match = _NUMBER.match(behind.replace("$", "").strip()) if hashes else None
    return Decimal(match[0].replace(",", "")) if match else None


def number_of_row(row: Row, environment: str) -> Decimal:
    """The row's right answer, from `answer` or `reward_spec.ground_truth`. Raises DataError: no number there."""
    value = right_answer(row)
    try:
        number = Decimal(str(value).replace(",", ""))
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        columns = ", ".join(map(str, row))
        raise DataError(
            f"a row of {environment} needs `answer` or `reward_spec.ground_truth`, a number; got {value!r:.80} "
            f"(the row has {columns})"
        )
    return number


def right_answer(row: Row) -> Any:
    """`answer`, else `reward_spec.ground_truth`; None where the row has neither."""
    spec = row.get("reward_spec")
    if row.get("answer") is not None or not isinstance(spec, dict):
        return row.get("answer")
    return spec.get("ground_truth")


def require_prompt(row: Row, environment: str) -> None:
    """Raises DataError for a row whose `prompt` is neither text nor messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, str | bytes | type(None)) and not (isinstance(prompt, str) and prompt):
        raise DataError(f"a row of {environment} needs `prompt`, text or a list of messages; got {prompt!r:.80}")
