"""Prompts as token ids, token ids as text.

A text prompt is taken as it is: nothing is added, not even a beginning-of-sequence token, because a row may be the
middle of a document and because a prompt that holds a rendered chat template has its special tokens already. Chat
messages go through the tokenizer's chat template, which writes the special tokens that its model expects, and the
tools that the environment offers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core import hub
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Message, Prompt, ToolSchema, require_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MODEL_PATH = "trainer.policy.model.path"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or name. Raises ConfigError if it has none."""
    if not has_tokenizer(path):
        raise ConfigError(
            f"{_MODEL_PATH}: {path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); save the "
            "model's tokenizer there with tokenizer.save_pretrained"
        )
    _require_in_reach(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        # transformers raises whatever the broken file leads to.
        raise ConfigError(
            f"trainer.policy.model.path: {path}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _require_in_reach(name: str) -> None:
    """A hub that does not answer is asked once here: transformers would ask it again and again, for most of a minute.

    Raises ConfigError for what is neither a directory nor in the hub's cache, where the hub is not in reach.
    """
    if hub.is_name(name) and not hub.is_cached(name):
        hub.require_model(name, key=_MODEL_PATH)


def has_tokenizer(path: str) -> bool:
    """Whether a model directory holds a tokenizer; true for a hub name, where only loading tells."""
    directory = Path(path)
    return not directory.is_dir() or any((directory / name).exists() for name in _TOKENIZER_FILES)


class TokenCodec:
    """Prompts into token ids, and token ids into text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template_kwargs: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs)
        self._tools: tuple[ToolSchema, ...] = ()

    def with_tools(self, tools: Sequence[ToolSchema]) -> TokenCodec:
        """This codec, for conversations in which the model is shown these functions.

        Raises:
            ConfigError: the configuration's own settings of the template name tools as well.
        """
        if tools and "tools" in self._chat_template_kwargs:
            raise ConfigError(
                "generator.chat_template_kwargs: got 'tools', and the environment or the row has its own; leave one out"
            )
        codec = copy.copy(self)
        codec._tools = tuple(tools)
        return codec

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, with the template's opening of the assistant's turn after chat messages.

        Raises:
            DataError: neither text nor messages, a template that refuses them, or nothing to encode; text, where the
                model is to be shown tools.
            ConfigError: a template that does not show tools.
        """
        tokens = self.encode_text(self.prompt_text(prompt))
        if not tokens:
            raise DataError(f"the prompt {prompt!r} has no tokens")
        return tokens

    def prompt_text(self, prompt: Prompt) -> str:
        """The text that the policy sees: the prompt itself, or chat messages as the template writes them."""
        if isinstance(prompt, str):
            if self._tools:
                raise DataError(
                    "the environment offers tools, which the chat template shows, but its episode began with text; "
                    "use messages"
                )
            return prompt
        messages = require_messages(prompt, "a prompt")
        self.require_tools_shown(messages)
        return self.render(messages)

    def require_tools_shown(self, messages: Sequence[Message]) -> None:
        """Raises ConfigError if the tools of this codec leave no trace in what the template writes."""
        if self._tools and self.render(messages) == self.with_tools(()).render(messages):
            raise ConfigError(
                "the model is to be shown tools, but its chat template does not show them: give the model a "
                "chat_template.jinja that reads `tools`, or offer none and describe them in the prompt"
            )

    def response_text(self, tokens: Sequence[int]) -> str:
        """What the policy said, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of text as it is; special tokens that it spells out are recognised, none are added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages as the chat template writes them. Raises DataError if there is none or it refuses them."""
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the prompt is a list of chat messages, but the model's tokenizer has no chat template; use text"
            )
        settings: dict[str, Any] = dict(self._chat_template_kwargs)
        if self._tools:
            settings["tools"] = [dict(tool) for tool in self._tools]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_given(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **settings,
                )
            )
        except Exception as error:
            # The template is a program of the model's authors and raises what it likes.
            raise DataError(f"the chat template refuses the prompt: {type(error).__name__}: {error}") from error


def _given(message: Message) -> dict[str, Any]:
    """Without the keys that are None: templates ask whether a message has `tool_calls`."""
    return {key: value for key, value in message.items() if value is not None}
