"""The sizes of a model that meshes and memory plans need, read from `config.json` without transformers.

Activation memory is estimated from the shapes of the tensors that matrix products, norms, rotary embedding, gating and
attention keep for the backward pass. Attention scores are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rl_core.errors import ConfigError

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Fields of `config.json` with the number of experts per layer. In a dense model, none is above 0."""
_SIZES = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


@attrs.frozen(kw_only=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_rank: int | None
    """Rank of the query projection; None: a single full-rank matrix."""
    kv_rank: int
    qk_head_dim: int
    """Head size of queries and keys, without the rotary part."""
    qk_rope_head_dim: int
    v_head_dim: int


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a causal language model with gated feed-forward layers and RMS norms."""

    model_type: str
    """Name of the architecture in transformers, e.g. `qwen3`."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Feed-forward size of the dense layers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """Whether the output layer shares the input embedding."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    latent: LatentAttention | None = None
    moe_layers: tuple[int, ...] = ()
    """Layers with experts, ascending; empty for a dense model."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0
    """Total feed-forward size of all shared experts."""
    has_expert_bias: bool = False
    """Whether the router adds a bias per expert, stored as a buffer."""

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return bool(self.moe_layers)

    def layer_parameters(
        self, layer: int, *, tensor: int = 1, expert: int = 1, expert_tensor: int = 1
    ) -> tuple[int, int]:
        """Number of parameters of one layer on one rank: (outside the experts, in the experts). `tensor` ranks split
        the matrices, `expert` ranks split the experts, and `expert_tensor` ranks split each expert's matrices."""
        hidden = self.hidden_size
        outside = 2 * hidden + self._attention_parameters(tensor)
        if layer not in self.moe_layers:
            return outside + 3 * hidden * self.ffn_hidden_size // tensor, 0
        outside += self.num_experts * hidden + 3 * hidden * self.shared_ffn_hidden_size // tensor
        per_expert = 3 * hidden * self.expert_ffn_hidden_size // expert_tensor
        return outside, self.num_experts // expert * per_expert

    def vocabulary_parameters(self, tensor: int = 1) -> int:
        """Number of parameters of the embedding (or of the output layer) on one of `tensor` ranks that split its
        rows."""
        return -(-self.vocab_size // tensor) * self.hidden_size

    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a shared embedding counts once."""
        layers = sum(sum(self.layer_parameters(layer)) for layer in range(self.num_layers))
        return layers + self.hidden_size + self.vocabulary_parameters() * (1 if self.is_tied else 2)

    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses; of each layer's experts, only `experts_per_token` count."""
        if not self.is_moe:
            return self.num_parameters()
        per_layer = 3 * self.hidden_size * self.expert_ffn_hidden_size * (self.num_experts - self.experts_per_token)
        return self.num_parameters() - per_layer * len(self.moe_layers)

    def key_value_elements(self, *, tensor: int = 1) -> int:
        """Elements per token in one layer's key/value cache, on one of `tensor` ranks. A rank has at least one
        key/value head, and with latent attention the complete latent vectors."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.qk_rope_head_dim
        return 2 * max(1, self.num_kv_heads // tensor) * self.head_dim

    def _attention_parameters(self, tensor: int) -> int:
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            outputs = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim // tensor
            projections = hidden * outputs + self.num_heads * self.head_dim // tensor * hidden
            return projections + outputs * self.has_qkv_bias + 2 * self.head_dim * self.has_qk_norm
        query_size = self.num_heads * (latent.qk_head_dim + latent.qk_rope_head_dim) // tensor
        if latent.q_rank is None:
            query = hidden * query_size
        else:
            query = hidden * latent.q_rank + latent.q_rank + latent.q_rank * query_size
        down = hidden * (latent.kv_rank + latent.qk_rope_head_dim) + latent.kv_rank
        up = latent.kv_rank * self.num_heads * (latent.qk_head_dim + latent.v_head_dim) // tensor
        return query + down + up + self.num_heads * latent.v_head_dim // tensor * hidden

    def activation_elements(self, layer: int, *, tensor: int = 1, expert_tensor: int = 1) -> float:
        """Estimated elements per token that one layer keeps until its backward pass, on one of `tensor` ranks. These
        ranks split attention heads and feed-forward units, and outside matrix products they split the tokens (sequence
        parallelism). `expert_tensor` ranks split the feed-forward units of each expert."""
        hidden = 4 * self.hidden_size / tensor
        if self.latent is None:
            query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            attention = 5 * query + 6 * key_value
        else:
            heads = self.latent.qk_head_dim + self.latent.qk_rope_head_dim
            attention = self.num_heads * (4 * heads + 4 * self.latent.v_head_dim) + 4 * self.latent.kv_rank
        if layer not in self.moe_layers:
            return hidden + (attention + 4 * self.ffn_hidden_size) / tensor
        per_expert = 2 * self.hidden_size / tensor + 4 * self.expert_ffn_hidden_size / expert_tensor
        router = 3 * self.num_experts / tensor
        shared = 4 * self.shared_ffn_hidden_size / tensor
        return hidden + attention / tensor + router + shared + self.experts_per_token * per_expert


def read_config(path: str | None) -> dict[str, Any] | None:
    """`config.json` of a local model directory; None for a hub name or a directory that a recipe has yet to create.
    Raises ConfigError if the file cannot be read."""
    file = Path(path or "") / "config.json"
    if path is None:
        return None
    try:
        if not file.is_file():
            return None
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a model's configuration ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: cannot be read as a model's configuration (got {fields!r:.80}, not an object)")
    return fields


def written_config(path: str) -> dict[str, Any] | None:
    """`config.json` of a local directory or of a model in the hub's cache; None if there is none on this machine.
    Raises ConfigError if the file cannot be read."""
    if (local := read_config(path)) is not None or Path(path).exists():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # without it, nothing here has downloaded a model
        return None
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a name on the hub
        return None
    return read_config(str(Path(cached).parent)) if isinstance(cached, str) else None


def model_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of the model that a `config.json` describes.

    Args:
        config: the contents of `config.json`.
        where: key path of the model, for messages.

    Raises:
        ConfigError: a size or `model_type` is missing, or a size differs between layers.
    """
    try:
        for name in _SIZES:
            if not isinstance(config[name], int):
                raise ConfigError(
                    f"its config.json has {name}={config[name]!r:.80}; expected one number for all layers", key=where
                )
        heads = config["num_attention_heads"]
        return ModelShape(
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            is_tied=config.get("tie_word_embeddings", False),
            has_qkv_bias=config["model_type"] in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias")),
            has_qk_norm=config["model_type"] in ("qwen3", "qwen3_moe"),
            latent=_latent(config),
            **_experts(config),
        )
    except KeyError as error:
        raise ConfigError(
            f"its config.json has no {error}; expected the sizes of a transformer, named as in Llama's", key=where
        ) from error


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
    )


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    counts = [config.get(name) for name in EXPERT_COUNTS]
    num_experts = next((count for count in counts if count), 0)
    layers = _moe_layers(config) if num_experts else ()
    if not layers:
        return {}
    expert_size = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared_size = config.get("shared_expert_intermediate_size") or expert_size * (config.get("n_shared_experts") or 0)
    return {
        "moe_layers": layers,
        "num_experts": num_experts,
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn_hidden_size": expert_size,
        "shared_ffn_hidden_size": shared_size,
        "has_expert_bias": config["model_type"] == "deepseek_v3",
    }


def _moe_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers = np.arange(config["num_hidden_layers"])
    is_moe = layers >= config.get("first_k_dense_replace", 0)
    is_moe &= (layers + 1) % config.get("decoder_sparse_step", 1) == 0
    is_moe &= ~np.isin(layers, config.get("mlp_only_layers") or ())
    return tuple(np.flatnonzero(is_moe).tolist())
