"""Converts prompts to token ids, and token ids to text.

The tokenizer's chat template renders chat messages, with the special tokens that the model expects and the tools that
the environment offers. A prompt of text begins with the tokens with which the tokenizer begins a text. No other text
gets additional tokens: it continues a prompt, or is a rendered template, which already contains its special tokens.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rl_core import hub
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import (
    CHANNEL_TOKENS,
    EXAMPLE_CALL,
    THOUGHT_TOKENS,
    Message,
    Prompt,
    Row,
    ToolSchema,
    require_messages,
)
from rl_rollout.rendering_proof import kind_of, require_complete
from rl_rollout.row_settings import template_settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MODEL_PATH = "trainer.policy.model.path"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, given by directory or hub name. Raises ConfigError if the model has no tokenizer,
    or if the tokenizer cannot be downloaded or loaded."""
    if not has_tokenizer(path):
        raise ConfigError(
            f"{path} contains no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); save the model's tokenizer there "
            "with tokenizer.save_pretrained",
            key=_MODEL_PATH,
        )
    _require_in_reach(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        # A broken file can make transformers raise any exception.
        raise ConfigError(
            f"{path}: its tokenizer cannot be loaded: {type(error).__name__}: {error}", key=_MODEL_PATH
        ) from error


def _require_in_reach(name: str) -> None:
    """Asks the hub once for a model that is not cached, because transformers would retry an unreachable hub for most of
    a minute.

    Raises ConfigError if the hub is unreachable and `name` is neither a directory nor in the hub's cache.
    """
    if hub.is_name(name) and not hub.is_cached(name):
        hub.require_model(name, key=_MODEL_PATH)


def has_tokenizer(path: str) -> bool:
    """Whether a model directory holds a tokenizer. True for a hub name: only loading shows whether that model has
    one."""
    directory = Path(path)
    return not directory.is_dir() or any((directory / name).exists() for name in _TOKENIZER_FILES)


@attrs.frozen
class CallForm:
    """How a template reads messages with calls: templates of one family can need what others refuse."""

    has_null_content: bool
    """Empty content is None (DeepSeek-R1), else ""."""
    has_text_arguments: bool
    """Arguments are JSON text (DeepSeek-V3), else mappings."""

    def of(self, message: Message) -> dict[str, Any]:
        """Returns a message in normal form (`require_messages`) as the template reads it."""
        given = dict(message)
        if "tool_calls" not in given:
            return given
        if self.has_text_arguments:
            given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
        if self.has_null_content and not given["content"]:
            given["content"] = None
        return given


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


_CALL_FORMS = tuple(CallForm(*form) for form in itertools.product((False, True), repeat=2))
_CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]},
)


def codec_of(
    model_path: str, *, chat_template_kwargs: Mapping[str, Any], add_special_tokens: bool = True
) -> TokenCodec:
    """Loads the codec of a model. Raises ConfigError as `load_tokenizer` does."""
    tokenizer = load_tokenizer(model_path)
    from transformers import AutoConfig

    text_config: Any = AutoConfig.from_pretrained(model_path).get_text_config(decoder=True)
    codec = TokenCodec(
        tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        add_special_tokens=add_special_tokens,
        vocab_size=text_config.vocab_size,
        eos_tokens=_eos_tokens(model_path),
    )
    if (name := codec._unread(chat_template_kwargs)) is not None:
        raise ConfigError(
            f"got {name!r}, which the model's chat template does not read; remove it",
            key="generator.chat_template_kwargs",
        )
    return codec


@attrs.define
class Proofs:
    """What the copies of a codec know about their template."""

    kinds: set[Hashable] = attrs.field(factory=set)
    """The kinds of conversations that the template renders completely."""
    anew: bool = False
    """Whether conversations are proved even if their kind is known, to prove them with their own texts and values."""


def _eos_tokens(path: str) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens that the generation configuration of a model names; none without one."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # there is no such file
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


class TokenCodec:
    """Encodes prompts and decodes responses with a model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any],
        add_special_tokens: bool = True,
        vocab_size: int | None = None,
        eos_tokens: Sequence[int] = (),
    ) -> None:
        """
        Args:
            tokenizer: the model's tokenizer.
            chat_template_kwargs: further arguments of its chat template.
            add_special_tokens: whether a prompt of text begins with the tokens that the tokenizer writes before a text.
            vocab_size: number of tokens that the model knows, of which the tokenizer may have more; None: unknown.
            eos_tokens: the end-of-sequence tokens of the model's generation configuration, besides the tokenizer's.
        """
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.eos_tokens = frozenset(end for end in (*eos_tokens, tokenizer.eos_token_id) if isinstance(end, int))
        self._add_special_tokens = add_special_tokens
        self._chat_template_kwargs = dict(chat_template_kwargs)
        self._tools: tuple[ToolSchema, ...] = ()
        self._found_form: list[CallForm] = []
        self._row_settings: dict[str, Any] = {}
        self.proofs = Proofs()

    def with_tools(self, tools: Sequence[ToolSchema]) -> TokenCodec:
        """Returns a copy of this codec for conversations in which the model sees these functions.

        Raises:
            ConfigError: the configuration's `chat_template_kwargs` also contain `tools`.
        """
        if tools and "tools" in self._chat_template_kwargs:
            raise ConfigError(
                "got 'tools', but the environment or the row also has tools; remove one of the two",
                key="generator.chat_template_kwargs",
            )
        codec = copy.copy(self)
        codec._tools = tuple(tools)
        return codec

    def settings_of(self, row: Row) -> dict[str, Any]:
        """Returns the row's `chat_template_kwargs`. Raises DataError if they are not a mapping, or if the template does
        not contain one of the names, so that it would have no effect."""
        settings = template_settings_of(row)
        if (name := self._unread(settings)) is not None:
            raise DataError(
                f"the row's 'chat_template_kwargs' have {name!r}, which the model's chat template does not read; "
                "remove it"
            )
        return settings

    def _unread(self, settings: Mapping[str, Any]) -> str | None:
        template = str(self.tokenizer.chat_template or "")
        unread = (name for name in settings if re.search(rf"\b{re.escape(name)}\b", template) is None)
        return next(unread, None) if template else None

    def with_settings(self, settings: Mapping[str, Any]) -> TokenCodec:
        """Returns a copy of this codec whose template gets further settings, such as a row's."""
        codec = copy.copy(self)
        codec._row_settings = {**self._row_settings, **settings}
        return codec

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Encodes a prompt. After chat messages, the template opens the assistant's turn.

        Raises:
            DataError: the prompt is neither text nor messages, is empty, or is text although the environment offers
                tools; or the tokenizer has no chat template, or the template refuses the messages.
            ConfigError: the codec has tools, but the template does not show them.
        """
        return self.encode_with_text(prompt)[0]

    def encode_with_text(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Like `encode`, but also returns the prompt's text, as `prompt_text` does."""
        text = self.prompt_text(prompt)
        tokens = self.encode_opening(text) if isinstance(prompt, str) else self.encode_text(text)
        if not tokens:
            raise DataError(f"the prompt {prompt!r} has no tokens")
        return tokens, text

    def prompt_text(self, prompt: Prompt) -> str:
        """Returns the text that the policy sees: the prompt itself, or chat messages as the template writes them."""
        if isinstance(prompt, str):
            for name, found in (("tools", self._tools), ("chat_template_kwargs", self._row_settings)):
                if found:
                    raise DataError(
                        f"the row or its environment has {name}, which only a chat template can show, but its prompt "
                        "is text; use messages"
                    )
            return prompt
        messages = require_messages(prompt, "a prompt")
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with a message of the assistant, which the template closes, so the policy would begin "
                "another one; remove it, or write the whole prompt as text, rendered with transformers' "
                "apply_chat_template(…, continue_final_message=True, tokenize=False)"
            )
        self.prove(messages)
        return self.render(messages)

    def prove(
        self,
        messages: Sequence[Message],
        *,
        opens_turn: bool = True,
        thinks: bool = False,
    ) -> None:
        """Requires that the template renders these messages and this codec's tools completely (`require_complete`). A
        conversation of a kind that was proved before is proved only if `proofs.anew`.

        Args:
            opens_turn: whether the policy responds next.
            thinks: whether the thinking of the last message has to be in the rendering.
        """
        if self.tokenizer.chat_template is None:
            return  # `render` refuses the messages
        key = (json.dumps([self._tools, self._row_settings]), opens_turn, thinks, kind_of(messages))
        if self.proofs.anew or key not in self.proofs.kinds:

            def render(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
                return self.with_tools(tools).render(messages, add_generation_prompt=opens_turn)

            require_complete(render, messages, self._tools, thoughts={len(messages) - 1} if thinks else ())
            self.proofs.kinds.add(key)

    def response_text(self, tokens: Sequence[int]) -> str:
        """Decodes a response to text, without special tokens. Marks of thinking stay in the text if they are special
        tokens, because a reader could not tell thinking and answer apart without them."""
        marks = self._thought_marks
        if marks.isdisjoint(tokens):
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        hidden = {*self.tokenizer.all_special_ids} - marks
        shown = [token for token in tokens if token not in hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))

    @cached_property
    def _thought_marks(self) -> frozenset[int]:
        """The special tokens that mark thinking."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        names = THOUGHT_TOKENS | (CHANNEL_TOKENS if "<|channel|>" in special else frozenset())
        return frozenset(token for name, token in special.items() if name in names)

    def encode_opening(self, text: str) -> tuple[int, ...]:
        """Encodes the text with which a sequence begins. It gets the tokens that the tokenizer adds at the start of a
        text, unless it begins with them, but not those that the tokenizer adds at the end.

        Raises ConfigError if the tokenizer encodes the text differently behind its own tokens.
        """
        tokens = self.encode_text(text)
        if not self._add_special_tokens:
            return tokens
        whole = tuple(self.tokenizer(text)["input_ids"])  # pyright: ignore
        starts = (start for start in range(len(whole) + 1) if whole[start : start + len(tokens)] == tokens)
        start = next(starts, None)
        if start is None:
            raise ConfigError(
                "the tokenizer encodes text differently when it adds its special tokens, so they cannot be added alone "
                f"(text: {text!r:.80}); set the key to false",
                key="data.add_special_tokens",
            )
        return tokens if tokens[:start] == whole[:start] else whole[:start] + tokens

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Encodes text. Special tokens that the text contains are recognised, and none are added. Raises DataError if
        the model does not know one of the tokens."""
        return self.known(tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]))  # pyright: ignore

    def known(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens. Raises DataError if one of them is beyond the model's vocabulary."""
        highest = max(tokens, default=0)
        if self._vocab_size is not None and highest >= self._vocab_size:
            raise DataError(
                f"token {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}) is beyond the model's vocabulary "
                f"(0…{self._vocab_size - 1}); give the model an embedding for it (resize_token_embeddings in "
                "transformers), or remove the token"
            )
        return tokens

    def may_be_unknown(self, value: object) -> bool:
        """Whether the text of a value has a token that the tokenizer, but not the model, knows by name."""
        text = str(value) if self._unknown_names else ""
        return any(token in text for token in self._unknown_names)

    @cached_property
    def _unknown_names(self) -> tuple[str, ...]:
        if self._vocab_size is None:
            return ()
        added = self.tokenizer.added_tokens_decoder
        return tuple(str(token) for number, token in added.items() if number >= self._vocab_size)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Renders messages with the chat template. Raises DataError if there is no template, or if the template refuses
        the messages."""
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the prompt is a list of chat messages, but the model's tokenizer has no chat template; use text"
            )
        form = self._call_form() if any("tool_calls" in message for message in messages) else _CALL_FORMS[0]
        return self._rendered([form.of(message) for message in messages], add_generation_prompt)

    def _call_form(self) -> CallForm:
        """Finds the form in which the template shows an example call unchanged: its name and its arguments, which are
        neither JSON text within JSON text nor Python's notation. Without such a form, returns the first one."""
        if self._found_form == []:
            function = EXAMPLE_CALL["function"]
            (name, value), *_ = function["arguments"].items()
            for form in _CALL_FORMS:
                try:
                    text = self._rendered([form.of(message) for message in _CALLED], False)
                except DataError:
                    continue
                shown = all(part in text for part in (function["name"], name, value))
                if shown and '\\"' not in text and repr(function["arguments"]) not in text:
                    self._found_form.append(form)
                    break
            else:
                self._found_form.append(_CALL_FORMS[0])
        return self._found_form[0]

    def _rendered(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        settings: dict[str, Any] = {**self._chat_template_kwargs, **self._row_settings}
        if self._tools:
            settings["tools"] = [dict(tool) for tool in self._tools]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **settings,
                )
            )
        except Exception as error:
            # The template is a program by the model's authors and may raise anything.
            raise DataError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
