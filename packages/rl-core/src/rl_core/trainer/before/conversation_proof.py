"""Has the generator prove, before a run, that the chat template renders the conversations of the rows completely."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Generator
from rl_core.trainer.groups import DataRow

logger = logging.getLogger(__name__)

_MOST_ROWS = 64
"""Rows whose conversations are proved if they are of a new kind, spread over the file. Other rows with new kinds are
proved when the run encodes them, before the first step."""
_MOST_SAMPLED = 8
"""Rows whose conversations are proved with their own texts and values."""
_MOST_CHARACTERS = 200_000
"""After so many characters of rows the proof ends, so that it takes well below half a second."""


def require_proved(rows: Sequence[DataRow], generator: Generator) -> None:
    """Has the generator prove a sample of the rows (`Generator.prove`), and logs how long it took.

    Raises:
        DataError, ConfigError: the template does not render a row's conversation completely; with the row's place.
    """
    if not rows:
        return
    started, characters, number, kinds = time.perf_counter(), 0, 0, 0
    for number, row in enumerate(rows[:: -(-len(rows) // _MOST_ROWS)], start=1):
        try:
            kinds = generator.prove(row.row, anew=number <= _MOST_SAMPLED)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{row.place}: {error}") from error
        characters += len(str(row.row))
        if characters > _MOST_CHARACTERS:
            break
    if kinds:
        taken = time.perf_counter() - started
        logger.info("conversation proof: %.2f s, %d kinds of conversations, %d rows", taken, kinds, number)
