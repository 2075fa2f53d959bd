"""Separates a response's thinking from its answer, by the marks with which public models enclose their thinking."""

from __future__ import annotations

import re

_THOUGHTS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM, Nemotron, …
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis", "<|end|>"),  # gpt-oss
)
_FINAL = re.compile(r"(<\|start\|>assistant)?<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>")
"""Header of gpt-oss's answer."""
_OPENED = re.compile(f"({'|'.join(re.escape(opening) for opening, _ in _THOUGHTS)})\\S*\\s*\\Z")
THOUGHT_TOKENS = frozenset({mark for pair in _THOUGHTS for mark in pair if mark != "<|end|>"})
"""Marks that may be single tokens. If they are special tokens, a response's text must keep them."""
CHANNEL_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"})
"""The same for gpt-oss, whose marks consist of several tokens."""


def without_thought(text: str) -> str:
    """Returns the text after the last end of a thought, up to the next beginning of a thought, which was cut off."""
    behind = _behind(text)
    return _FINAL.sub("", behind.removesuffix(unfinished_thought(behind)), count=1)


def unfinished_thought(text: str) -> str:
    """Returns the end of the text from the mark of a thought that does not end; "" if there is none."""
    behind = _behind(text)
    starts = [place for opening, _ in _THOUGHTS if (place := behind.find(opening)) >= 0]
    return behind[min(starts) :] if starts else ""


def opened_thought(text: str) -> str:
    """Returns the mark of a thought with which the text ends, and the white space after it; "" if there is none."""
    found = _OPENED.search(text)
    return found[0] if found and unfinished_thought(found[0]) else ""


def _behind(text: str) -> str:
    for opening, closing in _THOUGHTS:
        if closing != "<|end|>" or opening in text:
            text = text.rpartition(closing)[2]
    return text
