"""Selects prompts that are short enough for `trainer.max_prompt_length` and leave room for a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rl_core.config import Config
from rl_core.config.context import context_of
from rl_core.config.resolving import value_at
from rl_core.errors import DataError
from rl_core.interfaces import Generator
from rl_core.trainer.before.conversation_proof import require_proved
from rl_core.trainer.groups import DataRow

logger = logging.getLogger(__name__)

_PART = 256


async def fitting(rows: Sequence[DataRow], generator: Generator, config: Config, sampling: str) -> list[DataRow]:
    """Has conversations of the rows proved (`require_proved`), returns the rows that `fitting_rows` keeps, and warns of
    dropped rows. Yields to the event loop between chunks of rows, so that signals are handled."""
    require_proved(rows, generator)
    kept: list[DataRow] = []
    for first in range(0, len(rows), _PART):
        await asyncio.sleep(0)
        kept += _short_enough(rows[first : first + _PART], generator, config, sampling)
    longest = _require_some(rows, kept, generator, config, sampling)
    if len(kept) < len(rows):
        logger.warning(
            "dropped %d of %d rows whose prompts or responses are too long: %s",
            len(rows) - len(kept),
            len(rows),
            longest,
        )
    return kept


def fitting_rows(rows: Sequence[DataRow], generator: Generator, config: Config, sampling: str) -> list[DataRow]:
    """Returns the rows whose prompts and stored responses are short enough. Depending on `data.on_long_prompt`, other
    rows are dropped or are an error.

    Args:
        sampling: `TRAINING` or `EVALUATION` of `rl_core.config.context`, the configuration section that contains the
            maximum response length.

    Raises:
        DataError: a prompt or stored response is too long and such rows are not dropped; all rows are too long; or a
            prompt cannot be encoded.
    """
    kept = _short_enough(rows, generator, config, sampling)
    _require_some(rows, kept, generator, config, sampling)
    return kept


def _short_enough(rows: Sequence[DataRow], generator: Generator, config: Config, sampling: str) -> list[DataRow]:
    limits, kept = _limits(config, sampling), []
    for row in rows:
        try:
            length = generator.prompt_length(row.row)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        too_long = next((f"the prompt has {length} tokens; {text}" for limit, text in limits if length > limit), None)
        if too_long is None:
            too_long = _long_response(row, generator, config, sampling)
        if too_long is None:
            kept.append(row)
        elif config.data.on_long_prompt == "error":
            raise DataError(
                f"{row.place}: {too_long}. Shorten it, or leave such rows out with data.on_long_prompt=drop"
            )
    return kept


def _long_response(row: DataRow, generator: Generator, config: Config, sampling: str) -> str | None:
    """Describes a stored response that is too long; None if it is short enough, or responses are sampled."""
    length, key = generator.response_length(row.row), f"{sampling}.max_generate_length"
    if length is None:
        return None
    limit = value_at(config, key)
    return f"the response has {length} tokens; {key} is {limit}" if length > limit else None


def _require_some(
    rows: Sequence[DataRow], kept: Sequence[DataRow], generator: Generator, config: Config, sampling: str
) -> str:
    """Returns the limits as text. Raises DataError if there are rows, but none was kept."""
    texts = [text for _, text in _limits(config, sampling)]
    if rows and generator.response_length(rows[0].row) is not None:
        key = f"{sampling}.max_generate_length"
        texts.append(f"{key} is {value_at(config, key)}")
    longest = "; ".join(texts)
    if rows and not kept:
        raise DataError(
            f"all {len(rows)} rows have too long a prompt or response: {longest}. Shorten the prompts or responses"
        )
    return longest


def _limits(config: Config, sampling: str) -> list[tuple[int, str]]:
    """Limits on prompt length in tokens, each with a text that explains it."""
    limit, context = config.trainer.max_prompt_length, context_of(config)
    limits = [(limit, f"trainer.max_prompt_length is {limit}")]
    if context is not None:
        response = value_at(config, f"{sampling}.max_generate_length")
        room = context[0] - response
        text = (
            f"{context[1]} ({context[0]}) less {sampling}.max_generate_length ({response}) leaves {room} for a prompt"
        )
        limits.append((room, text))
    return limits
