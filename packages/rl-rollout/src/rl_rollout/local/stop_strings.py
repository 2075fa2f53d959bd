"""Finds stop strings in text that is still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStringWatch:
    """Decodes one response token by token, and finds out when its text contains a stop string.

    New tokens are decoded together with those before them, because a token's text depends on its neighbours. Tokens
    that end inside a multi-byte character are not searched until further tokens complete the character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(map(len, stop)) - 1
        self._tail = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def sees_stop(self, token: int) -> bool:
        """Takes the next token of the response. Returns whether this token completes a stop string."""
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
