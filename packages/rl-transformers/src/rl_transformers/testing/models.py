"""Tiny Hugging Face checkpoints with a tokenizer, generated locally from a seed, without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v3"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen2", "llama")
"""Families of dense models."""
MOE_FAMILIES: tuple[Family, ...] = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v3")
"""Families with eight experts, two per token. DeepSeek's first layer is dense, and its attention is latent (MLA)."""
ALPHABET = "0123456789+-*=?., abcdefghijklmnopqrstuvwxyz\n"
"""Characters in the tokenizer's vocabulary, one token each."""


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def character_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character of `alphabet`, followed by `<pad>`, `<eos>` and `<unk>`."""
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
    """Writes a tiny model with random weights, and its tokenizer. Returns `directory`.

    Args:
        directory: the checkpoint's directory; created if missing.
        family: the model's architecture, as transformers names it.
        tie_word_embeddings: whether the output layer shares the input embedding.
        dtype: dtype of the stored weights.
        seed: the same seed writes the same weights.
        config: fields of the family's configuration class that override the defaults of the tiny model.
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
        # Five times the usual value, so that attention and log-probs of a random model depend on the tokens.
        "initializer_range": 0.1,
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **_FAMILY_FIELDS.get(family, {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**fields, **config}))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                # Biases of zero and norm weights of one would hide errors in their use.
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
