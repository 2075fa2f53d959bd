"""Finds the text with which a prompt opens the response, such as the `<think>` of a template's generation prompt.

A chat template ends a prompt with the assistant's marker. What follows the marker belongs to the response, although the
policy does not sample it. The marker is what all renderings of an assistant's turn, opened or answered, have in common.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from rl_core.errors import DataError
from rl_core.interfaces import THOUGHT_TOKENS, Message, opened_thought, unfinished_thought
from rl_rollout.chat import TokenCodec
from rl_rollout.turn_ends import SAID

_THEN = "th3n.s4id"
_NUM_LAST = 256
"""Number of tokens at the end of a prompt that are decoded first."""


class Openings:
    """Finds the openings of prompts with one template and set of tools."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self.after_marker = lru_cache(1024)(self._after_marker)
        """Samples of a group have the same prompt."""

    def of_chat(self, prompt: Sequence[int]) -> str:
        """Returns the text after the last marker of the assistant in a prompt, or in the part that follows the previous
        response. Without a marker, a template lets the same turn continue, and only known marks of thinking count."""
        opening = self.after_marker(tuple(prompt[-_NUM_LAST:]))
        if opening is None and len(prompt) > _NUM_LAST:
            opening = self._after_marker(prompt)
        return opened_thought(self._text(prompt[-_NUM_LAST:])) if opening is None else opening

    def of_text(self, prompt: Sequence[int], before: str) -> str:
        """Returns the mark of a thought with which a prompt of text ends. A thought that is unfinished in the text
        `before` this part of the prompt continues, and is returned from its mark on."""
        text = self._text(prompt)
        return unfinished_thought(before + text) if unfinished_thought(before) else opened_thought(text)

    def _after_marker(self, prompt: Sequence[int]) -> str | None:
        if self._marker is None:
            return None
        _, marker, opening = self._text(prompt).rpartition(self._marker)
        return opening if marker else None

    @cached_property
    def _marker(self) -> str | None:
        asked: Message = {"role": "user", "content": SAID}
        answered: Message = {"role": "assistant", "content": _THEN}
        try:
            opened = self._codec.render([asked]).rpartition(SAID)[2]
        except DataError:
            return None
        marker = opened
        for messages in ([asked, answered], [asked, answered, {"role": "user", "content": "?"}]):
            try:
                text = self._codec.render(messages, add_generation_prompt=False)
            except DataError:
                continue  # the template refuses such conversations
            header = text.partition(SAID)[2].partition(_THEN)[0]
            same = takewhile(lambda pair: pair[0] == pair[1], zip(marker, header, strict=False))
            marker = "".join(character for character, _ in same)
        # A marker ends before a thought and before a token that only begins like the rendered answer.
        tokenizer: Any = self._codec.tokenizer
        tokens = {*THOUGHT_TOKENS, *tokenizer.get_added_vocab()}
        places = [(token, place) for token in tokens for place in _places(opened, token)]
        ends = [at for token, at in places if token in THOUGHT_TOKENS or at < len(marker) < at + len(token)]
        marker = marker[: min(ends, default=None)]
        # The part from the last special token on stands before every response, whatever message comes before.
        special = map(str, tokenizer.all_special_tokens)
        return marker[max((marker.rfind(token) for token in special), default=0) :].lstrip("\n") or None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._codec.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _places(text: str, token: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(token), text)]
