"""Writes random chat models that are small enough for a test, with bytes as tokens and a ChatML template."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "max_window_layers": 3,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "float32",
}
"""Sizes of a small copy. Other fields are taken from the large model's configuration."""


def write_tiny_chat_model(directory: Path, *, seed: int) -> None:
    """Writes a Qwen2 of about 100k parameters with random weights, and its tokenizer."""
    from transformers import Qwen2Config

    tokenizer = _byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_special_tokens(tokenizer),
    )
    _write(config, tokenizer, directory, seed=seed)


def write_tiny_copy(directory: Path, fields: Mapping[str, Any], *, seed: int) -> None:
    """Writes a small copy of a model, of the same type and with random weights, and a byte tokenizer.

    Args:
        directory: the directory to create.
        fields: the content of the large model's `config.json`.
        seed: seed of the weights.
    """
    from transformers import AutoConfig

    tokenizer = _byte_tokenizer()
    small = {name: value for name, value in _SMALL.items() if fields.get(name) is not None}
    if fields.get("kv_lora_rank"):  # latent attention has one key and value head per query head
        small["num_key_value_heads"] = _SMALL["num_attention_heads"]
    given = {**fields, **small, "vocab_size": len(tokenizer), **_special_tokens(tokenizer)}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    _write(config, tokenizer, directory, seed=seed)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    chat_tokenizer.chat_template = _CHAT_TEMPLATE
    return chat_tokenizer


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def _write(config: Any, tokenizer: Any, directory: Path, *, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(model, tokenizer, directory)


def add_chat_template(directory: Path, template: str) -> None:
    """Adds a chat template to the tokenizer of the model in `directory`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def save_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes a model and its tokenizer in Hugging Face format. Without a GPU, sets DS_ACCELERATOR. Otherwise DeepSpeed,
    which `save_pretrained` imports if it is installed, would guess the device and print a warning."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
