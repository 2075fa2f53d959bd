"""Tiny Hugging Face checkpoints with a tokenizer, made locally and seeded: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Family = Literal["qwen3", "qwen2", "llama"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
ALPHABET = "0123456789+-*=?., abcdefghijklmnopqrstuvwxyz\n"
"""Characters that the tokenizer knows, one token each."""


def character_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token per character, then `<pad>`, `<eos>` and `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*alphabet, "<pad>", "<eos>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_checkpoint(
    directory: Path,
    *,
    family: Family = "qwen3",
    tie_word_embeddings: bool = True,
    dtype: str = "float32",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes a random model of two layers with grouped key/value heads and its tokenizer; returns `directory`.

    Args:
        directory: is made if missing.
        family: architecture.
        tie_word_embeddings: the output layer shares the input embedding.
        dtype: of the stored weights.
        seed: the same seed writes the same weights.
        config: fields of the family's configuration class that differ from the tiny ones.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        # Five times the usual spread: attention and log-probs of a random model then depend on the tokens.
        "initializer_range": 0.1,
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**fields, **config}))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                # Biases of zero and norms of one would hide an error in how they are used.
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
