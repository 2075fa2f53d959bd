"""Finds stop strings in text that is still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStringWatch:
    """Decodes one response piece by piece and says when it contains a stop string.

    Each piece is decoded together with the piece before, because a token's text depends on its neighbours. A piece that
    ends inside a multi-byte character waits for the next token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(map(len, stop)) - 1
        self._tail = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def sees_stop(self, token: int) -> bool:
        """Takes the next token; true once the text so far contains a stop string."""
        self._pending.append(token)
        known = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return False
        self._tail += text[len(known) :]
        found = any(stop in self._tail for stop in self._stop)
        self._tail = self._tail[-self._keep :] if self._keep else ""
        self._context, self._pending = self._pending, []
        return found

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
