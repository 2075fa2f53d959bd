"""Finds the tokens that a chat template writes between two turns of the policy.

Sampled tokens are never rendered or encoded again: they stay in the conversation unchanged. The template only provides
the tokens between two responses: the end of the policy's turn, the observation's messages and the opening of the next
turn. To find them, this module renders a short fixed conversation that contains the same observation, and takes the
text after the assistant's placeholder. A template may write everything differently with tools, so the fixed
conversation has the tools of the real one (`TurnTokens.codec`).

    response      <|im_end|> \\n <|im_start|> user \\n  higher  <|im_end|> \\n <|im_start|> assistant \\n
    sampled  ──►  (the end token once: the sampled one, or the template's if the response was cut off)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rl_core.errors import DataError
from rl_core.interfaces import EXAMPLE_CALL, Message
from rl_rollout.chat import TokenCodec

_SAID = "wh4t.w4s.s4id"
"""Placeholder for a response, which templates should not change and whose last letter tokenizers should not merge with
the text after it."""
_WITH_THOUGHT = f"<think>\nth0ught\n</think>\n\n{_SAID}"
_ASKED: Message = {"role": "user", "content": "?"}
_REPLACES_SAID: Message = {"role": "assistant", "content": _SAID}


class TurnTokens:
    """Finds the tokens that a chat template writes after a response, in conversations with one set of tools."""

    def __init__(self, codec: TokenCodec) -> None:
        self.codec = codec
        self._changes: dict[tuple[tuple[str, ...], tuple[str, ...]], str | None] = {}

    def between(self, response_tokens: Sequence[int], observation: Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens from the end of a response to the start of the next.

        Args:
            response_tokens: the sampled tokens of the response.
            observation: the environment's messages after the response.

        Raises:
            DataError: the template refuses the observation, or does not render the assistant's text.
        """
        head, tail = self._around_said([_ASKED, _REPLACES_SAID, *observation], add_generation_prompt=True)
        return self.behind(head, response_tokens, tail)

    def behind(self, text: str, response_tokens: Sequence[int], tail: str) -> tuple[int, ...]:
        """Encodes `tail`, which the template wrote after `text`, without those end-of-turn tokens that the policy has
        already sampled."""
        closing, num_blank = self._closing
        return without_said_end(response_tokens, self._encode_behind(text, tail), closing, num_blank=num_blank)

    @cached_property
    def _closing(self) -> tuple[tuple[int, ...], int]:
        """The tokens that end every turn of the policy, and the number of whitespace tokens at their start."""
        closing = self._encode_behind(*self._around_said([_ASKED, _REPLACES_SAID], add_generation_prompt=False))
        visible = (bool(str(self.codec.tokenizer.decode([token])).strip()) for token in closing)
        return closing, next((index for index, is_visible in enumerate(visible) if is_visible), len(closing))

    @cached_property
    def example_call(self) -> str | None:
        """`EXAMPLE_CALL` as the template renders it in a response; None if the template renders no calls."""
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]}
        try:
            opening = self.codec.encode_text(self.codec.render([_ASKED]))
            written = self.codec.encode_text(self.codec.render([_ASKED, calling], add_generation_prompt=False))
        except DataError:
            return None  # the template refuses calls; an environment may still define its own format
        # Tokens are compared, not text: as text, two different markers would both start with `<`.
        shared = 0
        while shared < min(len(opening), len(written)) and opening[shared] == written[shared]:
            shared += 1
        call = self.codec.response_text(written[shared:]).strip()
        return call if EXAMPLE_CALL["function"]["name"] in call else None

    def how_it_changes(self, opening: Sequence[Message], observation: Sequence[Message]) -> str | None:
        """Describes how the template changes earlier turns when later ones follow; None if it does not change them.

        To find this, renders two turns after `opening`, once without and once with thinking. The result is cached for
        all conversations with the same roles.
        """
        roles = (_roles(opening), _roles(observation))
        if roles not in self._changes:
            if not self._keeps(opening, observation, _SAID):
                self._changes[roles] = "renders earlier turns differently once later turns follow"
            elif not self._keeps(opening, observation, _WITH_THOUGHT):
                self._changes[roles] = "drops the thinking of earlier turns"
            else:
                self._changes[roles] = None
        return self._changes[roles]

    def _keeps(self, opening: Sequence[Message], observation: Sequence[Message], said: str) -> bool:
        _, tail = self._around_said([_ASKED, _REPLACES_SAID, *observation], add_generation_prompt=True)
        turn = [{"role": "assistant", "content": said}, *observation]
        opened, one_turn = self.codec.render(opening), self.codec.render([*opening, *turn])
        # A template that writes a space before a response expects the policy to sample this space.
        blank = " " if one_turn.startswith(f"{opened} {said}") else ""
        expected = opened + 2 * (blank + said + tail)
        return expected.startswith(one_turn) and self.codec.render([*opening, *turn, *turn]) == expected

    def _around_said(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[str, str]:
        text = self.codec.render(messages, add_generation_prompt=add_generation_prompt)
        head, said, tail = text.partition(_SAID)
        if not said:
            raise DataError(
                "the chat template does not render the assistant's text, so it cannot be used for several turns; give "
                "the model a chat_template.jinja that renders it"
            )
        return head + said, tail

    def _encode_behind(self, head: str, tail: str) -> tuple[int, ...]:
        """Encodes `tail` together with the preceding text, because some tokenizers treat the start of a text
        specially."""
        before, whole = self.codec.encode_text(head), self.codec.encode_text(head + tail)
        return whole[len(before) :] if whole[: len(before)] == before else self.codec.encode_text(tail)


def without_said_end(
    response_tokens: Sequence[int], tail: tuple[int, ...], closing: tuple[int, ...], *, num_blank: int = 0
) -> tuple[int, ...]:
    """Returns `tail` without the end-of-turn tokens that the response already contains.

    A response that reached its length limit or a stop string does not contain them. Then `tail` keeps them, as tokens
    that were not sampled.

    Args:
        response_tokens: the sampled tokens of the response.
        tail: tokens that the template writes after the response.
        closing: tokens that end every turn. Only the start of `tail` that equals the start of `closing` can have been
            sampled.
        num_blank: number of whitespace tokens at the start of `closing`; a response may end without them.
    """
    shared = 0
    while shared < min(len(tail), len(closing)) and tail[shared] == closing[shared]:
        shared += 1
    for start in (0, num_blank):
        for end in range(shared, start, -1):
            said = tail[start:end]
            if tuple(response_tokens[-len(said) :]) == said:
                return tail[end:]
    return tail


def _roles(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message["role"] for message in messages)
