"""The chat templates that installed packages ship, each with a tokenizer that knows its special tokens."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FOLDERS = {"trl": "chat_templates", "vllm": "transformers_utils/chat_templates"}
_SPECIAL = re.compile(
    r"<\|[a-zA-Z_0-9▁]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<end_of_utterance>|<｜[^｜]+｜>|\[/?[A-Z_]+\]"
)
_ENDS = (
    "<|im_end|>",
    "<turn|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_utterance>",
)


def shipped_templates() -> dict[str, str]:
    """Returns the templates by package and name, such as `trl/qwen3`."""
    found = {}
    for package, folder in _FOLDERS.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for path in sorted((Path(spec.submodule_search_locations[0]) / folder).glob("*.jinja")):
            found[f"{package}/{path.stem}"] = path.read_text(encoding="utf-8")
    return found


@cache
def tokenizer_of(template: str) -> Any:
    """A byte-level tokenizer in which the special tokens that the template writes are special. Its end-of-sequence
    token is the one with which the template ends a turn, or else `</s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next((end for end in _ENDS if end in template), "</s>")
    special = sorted({*_SPECIAL.findall(template)} - {end, "<|endoftext|>"})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=end,
        pad_token="<|endoftext|>",
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast
