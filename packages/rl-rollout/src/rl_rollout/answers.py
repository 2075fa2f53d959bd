"""Renders a stored answer so that it continues what the policy would see before it.

The prompt of an answer ends with the template's generation prompt, which may open the thinking (`<think>`). Most
templates render an answer so that it begins with this generation prompt. DeepSeek-R1's template leaves out the thinking
of every answer; then the answer is put together from the generation prompt, the row's thinking and the rendered rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rl_core.errors import DataError
from rl_core.interfaces import Message
from rl_rollout.chat import TokenCodec
from rl_rollout.rendering_proof import THINKING_KEYS

_SETTINGS = tuple({name: value} for name in ("enable_thinking", "thinking") for value in (False, True))
_OPEN, _CLOSE = "<think>", "</think>"


def answered(codec: TokenCodec, before: str, messages: Sequence[Message], ends: Sequence[str] = ()) -> str:
    """Returns the text of a conversation up to the end of its last message, which is an answer to train on.

    Args:
        before: the prompt of that message, with the generation prompt. The text begins with it.
        ends: the tokens that end turns, which the text of the answer must not contain.

    Raises:
        DataError: the template does not render all of the conversation (`TokenCodec.prove`), or the answer cannot
            continue the generation prompt; the message says which change makes it possible.
    """
    _require_no_end(codec, messages, ends)
    try:
        text = _continuation(codec, before, messages)
    except DataError as error:
        setting = _setting(codec, messages)
        raise (error if setting is None else DataError(f"{error}. Or set {setting}")) from error
    if text is not None:
        return text
    whole = codec.render(messages, add_generation_prompt=False)
    same = next(
        (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole))
    )
    raise DataError(
        f"message {len(messages)} cannot be trained on: the policy would begin to respond after "
        f"{before[max(0, same - 12) :]!r}, but the chat template renders the message as "
        f"{whole[max(0, same - 12) : same + 40]!r}, which does not continue this. {_remedy(codec, messages)}"
    )


def _require_no_end(codec: TokenCodec, messages: Sequence[Message], ends: Sequence[str]) -> None:
    """Refuses an answer whose text, thinking or calls contain a token that ends a turn: no policy can sample more after
    that token."""
    *_, answer = messages
    content = answer.get("content") or ""
    special = [str(token) for token in codec.tokenizer.all_special_tokens if str(token) in content]
    behind = codec.render(messages, add_generation_prompt=False).rpartition(content.strip())[2] if special else ""
    said = json.dumps(answer, ensure_ascii=False, default=str)
    found = next((end for end in ends if end in said), None) or next((end for end in special if end in behind), None)
    if found is not None:
        raise DataError(
            f"message {len(messages)} cannot be trained on: its text contains {found!r}, which ends a turn in the chat "
            "template; remove it from the text"
        )


def _continuation(codec: TokenCodec, before: str, messages: Sequence[Message]) -> str | None:
    whole = codec.render(messages, add_generation_prompt=False)
    *_, answer = messages
    if whole.startswith(before):
        codec.prove(messages, opens_turn=False, thinks=True)
        num_thoughts = (answer.get("content") or "").count(_CLOSE) + any(answer.get(key) for key in THINKING_KEYS)
        # A template that reads thinking only from a key writes an empty thought before the thinking in the content, or
        # the generation prompt already has one.
        is_doubled = before.rstrip().endswith(_CLOSE) or whole[len(before) :].count(_CLOSE) > num_thoughts
        return None if num_thoughts and is_doubled else whole
    header = before.rstrip("\n").removesuffix(_OPEN)
    thought = _thought(answer)
    rest = whole[len(header) :].removeprefix(_CLOSE)  # DeepSeek-V3.1 writes the end of the thinking that it drops
    if thought is None or len(header) == len(before.rstrip("\n")) or not whole.startswith(header) or _CLOSE in rest:
        return None
    codec.prove(messages, opens_turn=False)
    return f"{before}{thought}{rest}"


def _thought(answer: Message) -> str | None:
    """Returns an answer's thinking as the policy would continue `<think>` and a line break, up to the answer."""
    content = answer.get("content") or ""
    if _CLOSE in content:
        thought = content.rpartition(_CLOSE)[0]
        return f"{thought.removeprefix(_OPEN).lstrip()}{_CLOSE}"
    thought = next((answer[key] for key in THINKING_KEYS if answer.get(key)), None)
    return None if thought is None else f"{thought.strip()}\n{_CLOSE}\n\n"


def _remedy(codec: TokenCodec, messages: Sequence[Message]) -> str:
    """Says which change makes the answer continue its generation prompt; each one is tried out."""
    *_, answer = messages
    if (setting := _setting(codec, messages)) is not None:
        return f"Set {setting}"
    for changed, remedy in _variants(answer):
        if _fits(codec, [*messages[:-1], changed]):
            return remedy
    return "Give the row as text (`prompt` and a response), or give the model another chat_template.jinja"


def _setting(codec: TokenCodec, messages: Sequence[Message]) -> str | None:
    """Returns a setting of the template with which the answer continues its generation prompt; None without one."""
    for settings in _SETTINGS:
        if _fits(codec.with_settings(settings), messages):
            (name, value), *_ = settings.items()
            return f"generator.chat_template_kwargs.{name}={str(value).lower()}"
    return None


def _variants(answer: Message) -> Iterator[tuple[Message, str]]:
    thought = _thought(answer)
    if thought is None:
        with_thought = {**answer, "content": f"{_OPEN}\nWhy?\n{_CLOSE}\n\n{answer.get('content') or ''}"}
        yield with_thought, f"Put the thinking before the answer: {_OPEN}…{_CLOSE}"
        return
    bare = {key: value for key, value in answer.items() if key not in THINKING_KEYS}
    bare["content"] = (answer.get("content") or "").rpartition(_CLOSE)[2].lstrip()
    thought = thought.partition(_CLOSE)[0].strip()
    for key in THINKING_KEYS:
        yield {**bare, key: thought}, f"Move the thinking from the content into the message's key {key!r}"
    yield bare, "Remove the thinking from the row"


def _fits(codec: TokenCodec, messages: Sequence[Message]) -> bool:
    try:
        return _continuation(codec, codec.render(messages[:-1]), messages) is not None
    except DataError:
        return False
