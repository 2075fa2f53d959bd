"""Chat templates in the formats of known model families, each with a tokenizer that knows its special tokens.

The tokenizers are byte-level BPE; those of the SentencePiece families are BPE with a leading-space mark. Their merges
are learned here from a few sentences. As in real tokenizers, many token sequences are the encoding of no text.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import attrs

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOL_CHATML = """\
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else 'You are a helpful assistant.') }}
{%- if tools %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[1 if has_system else 0:] %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool' }}
        {%- if 'name' in message %}{{ ' ' + message.name }}{% endif %}
        {%- if 'tool_call_id' in message %}{{ ' #' + message.tool_call_id }}{% endif %}
        {{- '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- if 'tool_calls' in message %}
            {%- for call in message.tool_calls %}
                {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Shows tools in the system message, tool calls in assistant messages, and the tool's name and call id in tool
messages.
"""

TOOLS_LAST = """\
{{- bos_token }}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + ('(of ' ~ (tools | length) ~ ')' if tools else '') + message.content + '[/RESULT]' }}
    {%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""Shows the tools before the last user message, so a new user message changes earlier text. Each result states the
number of tools.
"""

THINKING_CHATML = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

LLAMA2 = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content.strip() + ' ' + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant') }}
    {%- endif %}
{%- endfor %}"""

REASONING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
"""The generation prompt opens the thinking; the template drops the thinking of earlier turns."""


@attrs.frozen(kw_only=True)
class Family:
    """A chat template, its tokens and its properties."""

    template: str
    end_of_turn: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    """Added tokens that are not special, so decoding never skips them."""
    bos: str | None = None
    is_sentence_piece: bool = False
    observers: tuple[str, ...] = ("user",)
    """The roles that observations may have."""
    has_system: bool = True
    keeps_thinking: bool = True
    shows_tools: bool = False


FAMILIES = {
    "chatml": Family(
        template=CHATML,
        end_of_turn="<|im_end|>",
        special=("<|im_start|>", "<|endoftext|>"),
        plain=("<think>", "</think>", "<tool_response>", "</tool_response>"),
        observers=("user", "tool"),
    ),
    "tool_chatml": Family(
        template=TOOL_CHATML,
        end_of_turn="<|im_end|>",
        special=("<|im_start|>", "<|endoftext|>"),
        plain=("<tool_call>", "</tool_call>"),
        observers=("user", "tool"),
        shows_tools=True,
    ),
    "tools_last": Family(
        template=TOOLS_LAST,
        end_of_turn="</s>",
        special=("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[RESULT]", "[/RESULT]"),
        bos="<s>",
        observers=("tool",),
        has_system=False,
        shows_tools=True,
    ),
    "thinking_chatml": Family(
        template=THINKING_CHATML,
        end_of_turn="<|im_end|>",
        special=("<|im_start|>", "<|endoftext|>"),
        plain=("<think>", "</think>", "<tool_response>", "</tool_response>"),
        observers=("user", "tool"),
        keeps_thinking=False,
    ),
    "llama3": Family(
        template=LLAMA3,
        end_of_turn="<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
        observers=("user", "tool"),
    ),
    "gemma": Family(
        template=GEMMA,
        end_of_turn="<end_of_turn>",
        special=("<start_of_turn>", "<eos>"),
        bos="<bos>",
        is_sentence_piece=True,
        has_system=False,
    ),
    "llama2": Family(
        template=LLAMA2, end_of_turn="</s>", special=(), bos="<s>", is_sentence_piece=True, has_system=False
    ),
    "reasoning": Family(
        template=REASONING,
        end_of_turn="<|end|>",
        special=("<|User|>", "<|Assistant|>"),
        plain=("<think>", "</think>"),
        bos="<|begin|>",
        has_system=False,
        keeps_thinking=False,
    ),
}

_SENTENCES = [
    "The number is greater than 17, so guess again. What is 12 + 30?",
    "user assistant system tool model ipython: you are a helpful assistant.",
    "Zahlen, Größe, Übung — naïve café, 東京, emoji 🙂🙃, tabs\tand\n\nnew lines\n",
    "[INST] think about it, then answer: lower, higher, found! [/INST]",
]


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer of the family, with its template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    trained = Tokenizer(models.BPE())
    if family.is_sentence_piece:
        pre_tokenizer: Any = pre_tokenizers.Metaspace(prepend_scheme="first")
        decoder: Any = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
        )
        letters, single_bytes = [], [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        pre_tokenizer, decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters, single_bytes = pre_tokenizers.ByteLevel.alphabet(), []
    trained.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=letters, special_tokens=single_bytes, show_progress=False
    )
    trained.train_from_iterator(_SENTENCES * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"]], byte_fallback=family.is_sentence_piece)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.add_tokens(list(family.plain))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.end_of_turn,
        bos_token=family.bos,
        extra_special_tokens=list(family.special),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = family.template
    return fast
