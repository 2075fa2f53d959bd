"""Finds the tokens that end the policy's turns, from what a chat template writes after the assistant's text and calls.

    ChatML      text <|im_end|> \\n                 the token that follows the text, whatever follows the turn
    gpt-oss     text <|return|>   text <|end|>     only the last turn ends with <|return|>; earlier ones with <|end|>
    GLM-4.5     text   text <|user|>               the last turn has no end; the next message's marker ends a turn
    Gemma 4     call <|tool_response>              a turn with calls may end with another token than one with text

Only special and added tokens can end a turn: an engine cannot stop at a piece of text, because the same text may occur
within a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import EXAMPLE_CALL, Message
from rl_rollout.chat import TokenCodec

SAID = "wh4t.w4s.s4id"
"""Placeholder for a response, which templates should not change and whose last letter tokenizers should not merge with
the text after it."""
ASKED: Message = {"role": "user", "content": "?"}
REPLACES_SAID: Message = {"role": "assistant", "content": SAID}
_TOOL_ANSWERS: Message = {
    "role": "tool",
    "content": "?",
    "name": EXAMPLE_CALL["function"]["name"],
    "tool_call_id": EXAMPLE_CALL["id"],
}


@attrs.frozen(kw_only=True)
class TurnEnds:
    """The ends of the policy's turns."""

    text: int | None
    """The token that ends a turn of text; None if the template writes no such token."""
    call: int | None
    """The token that ends a turn with calls; None if the template writes none, or renders no calls."""
    closing: tuple[int, ...]
    """What the template writes after the text of the last turn, up to and including `text`. Empty if the end belongs to
    the next message, or there is none."""
    is_kept: bool
    """Whether earlier turns of text end as the last one does."""
    others: frozenset[int]
    """Special tokens that the template names, but does not write around messages and calls with these settings. If the
    policy ends a turn with one of them, such as Llama 3.1's `<|eom_id|>`, it takes the place of `closing`."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens at which an engine must stop."""
        return tuple(dict.fromkeys(end for end in (self.text, self.call) if end is not None))


def find_ends(codec: TokenCodec) -> TurnEnds:
    """Renders fixed conversations with the codec's tools, and compares their ends.

    Raises:
        DataError: there is no chat template, or it refuses or does not render an assistant's text.
    """
    tokenizer: Any = codec.tokenizer
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    last, later = _tails(codec, REPLACES_SAID, ASKED)
    if codec.render([ASKED], add_generation_prompt=False) == codec.render([ASKED]):
        # A generation prompt that is always written follows the last turn too; it begins with a mark of its own.
        first = next((index for index, token in enumerate(last) if token in marks), len(last))
        last = last[: first + 1]
    text, closing, is_kept = _end(last, later, marks)
    call, seen = None, {*last, *later}
    try:
        called, answered = _tails(codec, _calling(SAID), _TOOL_ANSWERS)
        # Whatever also stands between two calls does not end the turn.
        between = _between_calls(codec)
        call, _, _ = _end(called, answered, marks - between)
        seen |= {*called, *answered, *between}
    except DataError:
        pass  # the template renders no calls
    seen |= {*codec.encode_text(codec.render([ASKED, _calling(SAID)]))} if call is not None else set()
    template = str(tokenizer.chat_template)
    unseen = set(tokenizer.all_special_ids) - seen
    others = (token for token in unseen if str(tokenizer.convert_ids_to_tokens(token)) in template)
    return TurnEnds(text=text, call=call, closing=closing, is_kept=is_kept, others=frozenset(others))


def stop_tokens(codec: TokenCodec) -> tuple[int, ...]:
    """Returns the tokens at which an engine must stop in conversations and in text: the ends of turns, and the
    tokenizer's end-of-sequence token. A template that shows no turn of the assistant adds none."""
    end = codec.tokenizer.eos_token_id
    return tuple(dict.fromkeys([*template_ends(codec), *([end] if isinstance(end, int) else [])]))


def template_ends(codec: TokenCodec) -> tuple[int, ...]:
    """Returns `TurnEnds.tokens`; none without a template, or if it shows no turn of the assistant."""
    try:
        return find_ends(codec).tokens
    except DataError:
        return ()


def _end(last: tuple[int, ...], later: tuple[int, ...], marks: set[int]) -> tuple[int | None, tuple[int, ...], bool]:
    """Returns the end token, what precedes and includes it, and whether earlier turns end in the same way.

    Args:
        last: what follows the placeholder in the last message.
        later: what follows it if another message comes next.
        marks: the tokens that may end a turn.
    """
    shared = tuple(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(last, later, strict=False)))
    for closing, is_kept in ((shared, True), (last, False)):
        ends = [index for index, token in enumerate(closing) if token in marks]
        if ends:
            return closing[ends[-1]], closing[: ends[-1] + 1], is_kept
    end = next(iter(later[len(shared) :]), None)
    return (end if end in marks else None), (), end in marks


def _calling(*words: str) -> Message:
    function = EXAMPLE_CALL["function"]
    calls = [{**EXAMPLE_CALL, "function": {**function, "arguments": {"word": word}}} for word in words]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tails(codec: TokenCodec, said: Message, following: Message) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last = around_said(codec, [ASKED, said], add_generation_prompt=False)
    later = around_said(codec, [ASKED, said, following], add_generation_prompt=True)
    return encode_behind(codec, *last), encode_behind(codec, *later)


def _between_calls(codec: TokenCodec) -> set[int]:
    try:
        text = codec.render([ASKED, _calling(SAID, SAID)], add_generation_prompt=False)
    except DataError:
        return set()  # the template allows one call per turn
    parts = text.split(SAID)
    return set(codec.encode_text(parts[1])) if len(parts) == 3 else set()  # else the template writes only one call


def around_said(codec: TokenCodec, messages: Sequence[Message], *, add_generation_prompt: bool) -> tuple[str, str]:
    """Returns the rendered text up to and including the placeholder `SAID`, and the text after it."""
    text = codec.render(messages, add_generation_prompt=add_generation_prompt)
    head, said, tail = text.partition(SAID)
    if not said:
        raise DataError(
            "the chat template does not render the assistant's text, so it cannot be used for several turns; give "
            "the model a chat_template.jinja that renders it"
        )
    return head + said, tail


def encode_behind(codec: TokenCodec, head: str, tail: str) -> tuple[int, ...]:
    """Encodes `tail` together with the preceding text, because some tokenizers treat the start of a text specially."""
    before, whole = codec.encode_text(head), codec.encode_text(head + tail)
    return whole[len(before) :] if whole[: len(before)] == before else codec.encode_text(tail)
