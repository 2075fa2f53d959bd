"""Encodes the response stored in a row as tokens, each marked as trained or not.

Text is cut where the policy would begin to sample and where its turn ends, and each part is encoded separately. So the
prompt gets the same tokens as when the policy samples a response, and no token spans the end of the prompt and the
start of the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import attrs

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Message, Row, require_messages, split_pair
from rl_rollout.answers import answered
from rl_rollout.chat import TokenCodec
from rl_rollout.row_settings import tools_of
from rl_rollout.turn_ends import find_ends

_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns that mark the trained tokens of `input_ids`; `labels` marks all other tokens with −100."""
_READ = ("prompt", "messages", "completion", "chosen", "rejected", "input_ids", "attention_mask")
_READ += (*_MASKS, "labels", "tools", "functions", "chat_template_kwargs")
"""Columns that are read, or that hold the same as another one."""
TrainedTurns = Literal["all", "last"]


@attrs.frozen(kw_only=True)
class Supervised:
    """One sequence, with its trained tokens marked. Both fields have one value per token; the first token is never
    trained."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained token."""
        return self.trained.index(True)


@attrs.frozen
class _Ends:
    """The texts of the tokens that end a turn; None if there is no such token."""

    text: str | None
    call: str | None
    texts: tuple[str, ...]
    """Both, or the end-of-sequence token if the template shows no example of a turn."""

    @classmethod
    def of(cls, codec: TokenCodec, eos: int) -> _Ends:
        def text_of(token: int) -> str:
            return str(codec.tokenizer.convert_ids_to_tokens(token))

        try:
            ends = find_ends(codec)
        except DataError:
            return cls(None, None, (text_of(eos),))
        text, call = (None if end is None else text_of(end) for end in (ends.text, ends.call))
        return cls(text, call, tuple(map(text_of, ends.tokens)))

    def is_in(self, text: str) -> bool:
        return text.endswith(self.texts)


class RowEncoder:
    """Encodes rows as sequences, according to the options of `DatasetGeneratorOptions`."""

    def __init__(
        self,
        codec: TokenCodec,
        *,
        response_key: str,
        trained_roles: Sequence[str],
        trained_turns: TrainedTurns,
        scored_at_end: bool,
    ) -> None:
        """Raises ConfigError if the tokenizer has no end-of-sequence token."""
        end = codec.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                "the model's tokenizer has no eos_token, which ends a response; set one with tokenizer.eos_token = … "
                "and save it there",
                key="trainer.policy.model.path",
            )
        self._codec = codec
        self._end = end
        self._ends = _Ends.of(codec, end)
        self._response_key = response_key
        self._trained_roles = tuple(trained_roles)
        self._trained_turns: TrainedTurns = trained_turns
        self._scored_at_end = scored_at_end

    def unread(self, row: Row) -> list[str]:
        """Returns the names of a row's columns that have no part in its sequences: a column of another name whose text
        is one of its messages, such as the one that data.prompt_key names, has."""
        prompt, messages = row.get("prompt"), row.get("messages")
        spoken = [message for part in (prompt, messages) if isinstance(part, list) for message in part]
        said = [prompt, *(message.get("content") or message.get("value") for message in spoken)]
        return [
            str(name)
            for name, value in row.items()
            if name not in (*_READ, self._response_key, "conversations" if messages or "chosen" in row else "prompt")
            and value not in (None, "", [], {}, *said)
        ]

    def response(self, row: Row) -> Supervised:
        """Encodes a row with one response. Raises DataError if the row has no usable response."""
        if row.get("input_ids") is not None:
            marked = _marked(row)
            self._codec.known(marked.tokens)
            return self._ended(marked)
        if row.get("messages") is not None:
            return self._ended(self._conversation(row, require_messages(row["messages"], "messages")))
        if row.get(self._response_key) is None:
            raise DataError(
                f"the row has no response: neither 'messages' nor 'input_ids' nor {self._response_key!r} "
                f"(generator.response_key); it has {', '.join(map(str, row))}"
            )
        return self._ended(self._answered(row, self._response_key))

    def pair(self, row: Row) -> tuple[Supervised, Supervised]:
        """Encodes a row with a pair of responses; returns the preferred sequence first. Raises DataError if the row has
        no usable pair."""
        for name in ("chosen", "rejected"):
            if row.get(name) is None:
                raise DataError(
                    f"the row has no {name!r} (generator.responses=pair); it has {', '.join(map(str, row))}"
                )
        prompt, answers = row.get("prompt"), (row["chosen"], row["rejected"])
        if isinstance(prompt, str) and not isinstance(row["chosen"], str):
            row = _with_conversation(row)
        elif isinstance(prompt, str) and all(isinstance(one, str) and one.startswith(prompt) for one in answers):
            raise DataError(
                "'chosen' and 'rejected' both begin with the text in 'prompt', which would stand twice; remove the "
                "column 'prompt', or remove the prompt from both"
            )
        preferred, other = (self._ended(self._answered(row, name)) for name in ("chosen", "rejected"))
        return preferred, other

    def _answered(self, row: Row, name: str) -> Supervised:
        """Encodes the row's prompt with the response in column `name`."""
        prompt, response = row.get("prompt"), row[name]
        if prompt is None:
            raise DataError(f"the row has no 'prompt' before its {name!r}; it has {', '.join(map(str, row))}")
        if isinstance(prompt, str):
            if not isinstance(response, str):
                raise DataError(f"{name!r} must be text, as the prompt is, got {type(response).__name__}")
            if name == "prompt":  # generator.response_key
                return self._joined([(self._of_row(row).encode(prompt + self._end_text(prompt)), True)])
            return self._joined(
                [(self._of_row(row).encode(prompt), False), (response + self._end_text(response), True)]
            )
        opening = require_messages(prompt, "a prompt")
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        messages = require_messages(response, repr(name))
        if len(messages) >= len(opening) and all(map(_are_alike, messages, opening)):
            messages[: len(opening)] = opening
        else:
            if opening[-1]["role"] == messages[0]["role"] == "assistant":
                raise DataError(
                    f"the prompt ends with a message of the assistant, and {name!r} begins with another; write both as "
                    f"one message in {name!r}"
                )
            if messages[0]["role"] == "system" or messages[0]["role"] == opening[-1]["role"] == "user":
                raise DataError(
                    f"{name!r} begins with a message of the role {messages[0]['role']!r} that cannot follow the "
                    f"prompt's last message ({opening[-1]['role']!r}) and is not the prompt's first: remove the prompt "
                    f"from {name!r}, or repeat all its messages there unchanged"
                )
            messages = [*opening, *messages]
        return self._conversation(row, messages, num_given=len(opening))

    def _of_row(self, row: Row) -> TokenCodec:
        return self._codec.with_tools(tools_of(row)).with_settings(self._codec.settings_of(row))

    def _end_text(self, response: str) -> str:
        end = str(self._codec.tokenizer.convert_ids_to_tokens(self._end))
        return "" if response.endswith(end) else end

    def _conversation(self, row: Row, messages: Sequence[Message], *, num_given: int = 0) -> Supervised:
        """Encodes a conversation whose first `num_given` messages are the prompt. The later messages of trained roles
        are trained, or only the last of them if `trained_turns` is "last"."""
        roles = [message["role"] for message in messages]
        turns = [
            turn
            for turn in range(num_given, len(roles))
            if roles[turn] in self._trained_roles and _is_weighted(messages[turn])
        ]
        if not turns:
            raise DataError(
                f"the conversation has no message to train on: expected the role {' or '.join(self._trained_roles)} "
                f"(generator.trained_roles), got {', '.join(roles[num_given:]) or 'no message'}"
            )
        trained = turns if self._trained_turns == "all" else turns[-1:]
        if trained[0] == 0 and roles[0] == "assistant":
            raise DataError(
                "the conversation begins with the assistant's message, before which the policy would have no prompt: "
                'remove it, or give it "weight": 0'
            )
        codec = self._of_row(row)
        parts: list[tuple[str | tuple[int, ...], bool]] = []
        written = ""
        for turn in trained:
            is_answer = roles[turn] == "assistant"
            before = codec.render(messages[:turn], add_generation_prompt=is_answer) if turn or is_answer else ""
            if not before.startswith(written):
                raise DataError(
                    "the chat template changes earlier turns (many templates drop the thinking), so one sequence "
                    "cannot hold all turns; train only on the last turn with generator.trained_turns=last"
                )
            whole = answered(codec, before, messages[: turn + 1], self._ends.texts if is_answer else ())
            response = self._until_end(whole[len(before) :])
            if is_answer and not self._ends.is_in(response):
                response += self._end_behind(codec, messages, turn, whole)
            if before or is_answer:
                parts.append((before[len(written) :], False))
            parts.append((response, True))
            written = before + response
        return self._joined(parts)

    def _until_end(self, text: str) -> str:
        """Returns a turn's text up to its last end-of-turn token. If the text has no such token, removes the white
        space that the template adds at the end."""
        ends = [text.rindex(end) + len(end) for end in self._ends.texts if end in text]
        return text[: max(ends)] if ends else text.rstrip()

    def _end_behind(self, codec: TokenCodec, messages: Sequence[Message], turn: int, whole: str) -> str:
        """Returns the token that ends a turn of the assistant, but belongs to the next message: the one that the
        template writes before the message that follows, or for the last message the one that would end it."""
        later = codec.render(messages[: turn + 2], add_generation_prompt=False) if turn + 1 < len(messages) else ""
        written = next((end for end in self._ends.texts if later.startswith(whole.rstrip() + end)), None)
        usual = self._ends.call if messages[turn].get("tool_calls") else self._ends.text
        if (written or usual) is None:
            raise DataError(
                "the chat template writes no special token at the end of the assistant's message, so the policy would "
                "not learn to end its turn, and no engine would stop there: give the model a chat_template.jinja that "
                "writes {{ eos_token }} after the assistant's content"
            )
        return str(written or usual)

    def _joined(self, parts: Sequence[tuple[str | tuple[int, ...], bool]]) -> Supervised:
        """Joins parts, each text or tokens, and whether it is trained."""
        encode = self._codec.encode_text
        encoded = [(encode(part) if isinstance(part, str) else part, is_trained) for part, is_trained in parts]
        tokens = tuple(token for part, _ in encoded for token in part)
        trained = tuple(is_trained for part, is_trained in encoded for _ in part)
        if not tokens or not (encoded[0][0] or encoded[0][1]):
            raise DataError("the prompt has no tokens; a response needs at least one before it")
        # Nothing precedes the first token, so it cannot be predicted.
        trained = (False, *trained[1:])
        if True not in trained:
            raise DataError("the response has no tokens")
        return Supervised(tokens=tokens, trained=trained)

    def _ended(self, sequence: Supervised) -> Supervised:
        if not self._scored_at_end:
            return sequence
        trained = (*(False for _ in sequence.tokens), True)
        return Supervised(tokens=(*sequence.tokens, self._end), trained=trained)


def _with_conversation(row: Row) -> dict[str, Any]:
    """Replaces a text prompt next to conversations, as in ultrafeedback_binarized: the conversations' common beginning
    is the prompt. If they have none, the text is the user's message before both."""
    text = row["prompt"]
    chosen, rejected = (require_messages(row[name], repr(name)) for name in ("chosen", "rejected"))
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = [{"role": "user", "content": text}]
    else:
        prompt, chosen, rejected = split_pair(chosen, rejected)
        said = [message["content"].strip() for message in require_messages(prompt, "a prompt")]
        if text.strip() not in said:
            raise DataError(
                f"the text in 'prompt' is not a message of the beginning that 'chosen' and 'rejected' share, got "
                f"{text!r:.80}; remove the column 'prompt' to use that beginning, or write the prompt as messages"
            )
    return {**row, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _are_alike(one: Message, other: Message) -> bool:
    """Whether two messages are the same, except for keys that only one of them has, such as an id."""
    return all(one[key] == other[key] for key in one.keys() & other.keys()) and ("tool_calls" in one) == (
        "tool_calls" in other
    )


def _is_weighted(message: Message) -> bool:
    """Whether a message is trained on according to its key `weight`, 0 or 1, as in OpenAI's data, or `train` or
    `training`, as in Axolotl's."""
    weights = {name: message[name] for name in ("weight", "train", "training") if name in message}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise DataError(f"a message has the {name} {weight!r:.80}, expected 0 (not trained on) or 1")
    return all(weights.values())


def _marked(row: Mapping[str, Any]) -> Supervised:
    """Encodes a row that already has token ids; its mask columns say which tokens are trained."""
    tokens = row["input_ids"]
    if not _are_integers(tokens) or len(tokens) < 2:
        raise DataError(f"'input_ids' must be a list of at least two token ids, got {str(tokens)[:80]}")
    # Nothing precedes the first token, so it cannot be predicted.
    trained = [False] + [True] * (len(tokens) - 1)
    masks = {name: row[name] for name in _MASKS if row.get(name) is not None}
    if row.get("labels") is not None:
        masks["labels"] = row["labels"]
    for name, mask in masks.items():
        if not isinstance(mask, list):
            raise DataError(f"{name!r} must be a list of {len(tokens)} values, got {mask!r:.80}")
        if len(mask) != len(tokens):
            raise DataError(f"{name!r} has {len(mask)} values for {len(tokens)} tokens of 'input_ids'")
        marked = [value != -100 for value in mask] if name == "labels" else map(bool, mask)
        trained = [is_trained and is_marked for is_trained, is_marked in zip(trained, marked, strict=True)]
    if not any(trained):
        raise DataError(f"no token of 'input_ids' is marked as trained ({', '.join(masks)})")
    return Supervised(tokens=tuple(tokens), trained=tuple(trained))


def _are_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def text_parts(codec: TokenCodec, sequence: Supervised) -> tuple[str, str]:
    """Returns two texts for display: the text before the first trained token, and the text from there on, in which an
    arrow precedes each untrained part."""
    changes = [0, *(i for i, (a, b) in enumerate(pairwise(sequence.trained), start=1) if a != b), len(sequence.tokens)]
    texts = [str(codec.tokenizer.decode(list(sequence.tokens[start:end]))) for start, end in pairwise(changes)]
    spoken = [f" → {text}" if index % 2 else text for index, text in enumerate(texts[1:])]
    return texts[0], "".join(spoken)
