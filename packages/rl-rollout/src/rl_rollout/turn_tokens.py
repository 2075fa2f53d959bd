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

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EXAMPLE_CALL, Message
from rl_rollout.chat import TokenCodec
from rl_rollout.observations import NEEDS_CALLS, PlaceholderTurns, require_shown
from rl_rollout.openings import Openings
from rl_rollout.turn_ends import (
    ASKED,
    REPLACES_SAID,
    SAID,
    TurnEnds,
    around_said,
    encode_behind,
    find_ends,
    template_ends,
)

_WITH_THOUGHT = f"<think>\nth0ught\n</think>\n\n{SAID}"


class TurnTokens:
    """Finds the tokens that a chat template writes after a response, in conversations with one set of tools."""

    def __init__(self, codec: TokenCodec) -> None:
        self.codec = codec
        self.placeholders = PlaceholderTurns(codec)
        self.openings = Openings(codec)
        self._changes: dict[tuple[tuple[str, ...], tuple[str, ...]], str | None] = {}

    def between(self, response_tokens: Sequence[int], observation: Sequence[Message]) -> tuple[tuple[int, ...], bool]:
        """Returns the tokens from the end of a response to the start of the next, and whether they are `exact`
        (`behind`).

        Args:
            response_tokens: the sampled tokens of the response.
            observation: the environment's messages after the response.

        Raises:
            DataError: the template refuses the observation, or does not render the assistant's text.
        """
        before = self.placeholders.before(observation)
        text = self.codec.render([ASKED, before, *observation])
        head, said, tail = text.rpartition(SAID) if "tool_calls" in before else text.partition(SAID)
        require_shown(tail, observation)
        if "tool_calls" in before:
            return self._behind_call(head + said, response_tokens, tail)
        return self.behind(head + said, response_tokens, tail)

    def _behind_call(self, head: str, response_tokens: Sequence[int], tail: str) -> tuple[tuple[int, ...], bool]:
        """Encodes what the template wrote after a turn with calls, from the token that ends such a turn."""
        tokens, end = encode_behind(self.codec, head, tail), self.ends.call
        if end is None or end not in tokens or response_tokens[-1:] not in ((), (end,)):
            raise ConfigError(NEEDS_CALLS)
        return tokens[tokens.index(end) + len(response_tokens[-1:]) :], True

    def behind(self, text: str, response_tokens: Sequence[int], tail: str) -> tuple[tuple[int, ...], bool]:
        """Encodes `tail`, which the template wrote after `text`, without those end-of-turn tokens that the policy has
        already sampled. Also returns whether response and result together are exact, that is, what the template could
        write: False if the response ends with a token at which engines stop, but which the template does not write
        there, such as the end-of-sequence token of a base model in a conversation."""
        tokens, ends, said = encode_behind(self.codec, text, tail), self.ends, tuple(response_tokens[-1:])
        if ends.closing and tokens[: len(ends.closing)] == ends.closing:
            if {*said} & ends.others:
                return tokens[len(ends.closing) :], True
            rest = without_said_end(response_tokens, tokens, *self._closing)
        else:  # this end belongs to the next message
            is_said = said == tokens[:1] and {*said} <= {*ends.tokens}
            rest = tokens[1:] if is_said else tokens
        return rest, rest != tokens or not {*said} & {*ends.tokens, *ends.others, *self.codec.eos_tokens}

    @cached_property
    def ends(self) -> TurnEnds:
        """The tokens that end a turn of the policy. Raises DataError, as `find_ends` does."""
        return find_ends(self.codec)

    def text_of(self, response_tokens: Sequence[int]) -> str:
        """Returns a response as text (`TokenCodec.response_text`), without the token that ends the turn, which need not
        be a special token of the tokenizer."""
        is_ended = {*response_tokens[-1:]} <= {*self._stops}
        return self.codec.response_text(response_tokens[:-1] if is_ended else response_tokens)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return template_ends(self.codec)

    @property
    def other_ends(self) -> str | None:
        """Describes how the ends of earlier turns differ from what the policy sampled; None if they do not."""
        if self.ends.text is None:
            return "ends turns without a special token at which the engine could stop"
        return None if self.ends.is_kept else "ends the last turn with other tokens than earlier turns"

    @cached_property
    def _closing(self) -> tuple[tuple[int, ...], int]:
        """The tokens that follow the text of the last turn, and the number of whitespace tokens at their start."""
        closing = encode_behind(
            self.codec, *around_said(self.codec, [ASKED, REPLACES_SAID], add_generation_prompt=False)
        )
        visible = (bool(str(self.codec.tokenizer.decode([token])).strip()) for token in closing)
        return closing, next((index for index, is_visible in enumerate(visible) if is_visible), len(closing))

    @property
    def marked_header(self) -> str | None:
        """What the template writes between the generation prompt and the text of an answer, such as gpt-oss's channel,
        if special tokens are in it; else None. The decoded text of a response would have only a part of it."""
        special = {*self.codec.tokenizer.all_special_ids}
        return self._header if special & {*self.codec.encode_text(self._header)} else None

    @property
    def blank(self) -> str:
        """White space that the template writes between the generation prompt and the text of an answer, which it
        expects the policy to sample; "" if there is none."""
        return self._header if self._header.isspace() else ""

    @cached_property
    def _header(self) -> str:
        head, _ = around_said(self.codec, [ASKED, REPLACES_SAID], add_generation_prompt=False)
        opened = self.codec.render([ASKED])
        return head.removesuffix(SAID)[len(opened) :] if head.startswith(opened) else ""

    def said(self, response_tokens: Sequence[int]) -> str | None:
        """Returns the text of an answer, without what the template writes before it, and without its thinking if the
        template writes a header with special tokens between the two. None if the response lacks this header."""
        if self.marked_header is None:
            return self.text_of(response_tokens).removeprefix(self.blank)
        header, size = self.codec.encode_text(self.marked_header), len(response_tokens)
        ends = (end for end in range(size, 0, -1) if tuple(response_tokens[max(0, end - len(header)) : end]) == header)
        end = next(ends, None)
        return None if end is None else self.text_of(response_tokens[end:])

    @cached_property
    def example_call(self) -> str | None:
        """`EXAMPLE_CALL` as the template renders it in a response; None if the template renders no calls."""
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]}
        try:
            opening = self.codec.encode_text(self.codec.render([ASKED]))
            written = self.codec.encode_text(self.codec.render([ASKED, calling], add_generation_prompt=False))
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
            if self.other_ends is not None:
                self._changes[roles] = self.other_ends
            elif not self._keeps(opening, observation, SAID):
                self._changes[roles] = "renders earlier turns differently once later turns follow"
            elif not self._keeps(opening, observation, _WITH_THOUGHT):
                self._changes[roles] = "drops the thinking of earlier turns"
            else:
                self._changes[roles] = None
        return self._changes[roles]

    def _keeps(self, opening: Sequence[Message], observation: Sequence[Message], said: str) -> bool:
        turn = [self.placeholders.before(observation, said), *observation]
        opened, one_turn = self.codec.render(opening), self.codec.render([*opening, *turn])
        if "tool_calls" in turn[0]:
            twice = opened + 2 * one_turn.removeprefix(opened)
            return one_turn.startswith(opened) and self.codec.render([*opening, *turn, *turn]) == twice
        _, tail = around_said(self.codec, [ASKED, REPLACES_SAID, *observation], add_generation_prompt=True)
        # If the next message's marker ends a turn, as in GLM-4, the policy can sample another marker than that one.
        blank = self.blank if one_turn.startswith(f"{opened}{self.blank}{said}") and self.ends.closing else ""
        expected = opened + 2 * (blank + said + tail)
        return expected.startswith(one_turn) and self.codec.render([*opening, *turn, *turn]) == expected


def without_said_end(
    response_tokens: Sequence[int], tail: tuple[int, ...], closing: tuple[int, ...], num_blank: int = 0
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
