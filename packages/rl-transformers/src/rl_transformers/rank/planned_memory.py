"""The parts of memory plans for Hugging Face models that do not depend on the sharding."""

from __future__ import annotations

import attrs
from torch import nn

from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.model_shapes import ModelShape
from rl_transformers.rank.distributing import decoder_layers
from rl_transformers.rank.token_scorer import Scorer


def units_of(scorer: Scorer) -> list[list[nn.Parameter]]:
    """The parameters of each decoder layer, followed by the parameters outside the layers."""
    layers = [list(layer.parameters()) for layer in decoder_layers(scorer)]
    inside = {id(parameter) for layer in layers for parameter in layer}
    return [*layers, [parameter for parameter in scorer.parameters() if id(parameter) not in inside]]


@attrs.frozen(kw_only=True)
class ActivationBytes:
    """Bytes that one micro-batch needs on a rank at the moments that may be the peak. The formulas are derived from
    rehearsals (`rl rehearse`), which run transformers' code and record which tensors exist at each moment."""

    num_layers: int
    hidden: float
    """Hidden states between two layers."""
    inputs: float
    """Tensors that one layer keeps until backward. With full recomputation: the layer's input. With selective
    checkpointing: also the results of its matrix products. Without checkpointing: as much as `kept`."""
    kept: float
    """Tensors that the largest layer keeps while it is computed with gradients."""
    passing: float
    """Gradients that exist in addition to `kept` at the peak of the layer's backward."""
    after_layers: float
    """Tensors after the last layer: a float32 copy of the last norm's input, the norm's results, the hidden states of
    the scored tokens, and their gradient."""
    logits: float

    @classmethod
    def of(cls, spec: WorkerSpec, shape: ModelShape, tokens: float) -> ActivationBytes:
        """Activation bytes of `tokens` tokens on this rank."""
        size = 2 if spec.bf16 else 4
        layers = range(shape.num_layers)
        hidden = tokens * shape.hidden_size * size
        kept = max(tokens * size * _kept_elements(shape, layer, in_bf16=spec.bf16) for layer in layers)
        rows = min(tokens, spec.logprobs_chunk_size)
        return cls(
            num_layers=shape.num_layers,
            hidden=hidden,
            inputs=_kept_until_backward(spec, shape, tokens, hidden=hidden, kept=kept),
            kept=kept,
            passing=tokens * size * max(_backward_elements(shape, layer) for layer in layers),
            after_layers=hidden * (6 if spec.bf16 and spec.role != "critic" else 4),
            # Logits exist in float32 and, if it differs, also in the dtype of matrix products.
            logits=0 if spec.role == "critic" else rows * shape.vocab_size * (4 + (2 if spec.bf16 else 0)),
        )

    @property
    def scoring_output(self) -> float:
        """Bytes at the output layer, without gradients."""
        return 6 * self.hidden + self.logits

    @property
    def at_output(self) -> float:
        """Bytes during the output layer's backward."""
        return self.num_layers * self.inputs + self.after_layers + self.logits

    @property
    def in_layer(self) -> float:
        """Bytes during the backward of the model's last layer, while all other layers still keep their `inputs`."""
        return self.inputs * (self.num_layers - 1) + self.in_first_layer

    @property
    def in_first_layer(self) -> float:
        """Bytes during the backward of the model's first layer, after the backward of all other layers."""
        return self.kept + self.passing + self.hidden


def _kept_until_backward(spec: WorkerSpec, shape: ModelShape, tokens: float, *, hidden: float, kept: float) -> float:
    if spec.gradient_checkpointing != "selective":
        return hidden if spec.gradient_checkpointing else kept
    size = 2 if spec.bf16 else 4
    layers = range(shape.num_layers)
    return hidden + sum(tokens * size * _product_elements(shape, layer) for layer in layers) / shape.num_layers


def _product_elements(shape: ModelShape, layer: int) -> float:
    """Elements per token in the results of one layer's matrix products and attention."""
    if shape.latent is not None:
        latent, heads = shape.latent, shape.num_heads
        query = heads * (latent.qk_head_dim + latent.qk_rope_head_dim)
        down = latent.kv_rank + latent.qk_rope_head_dim + (latent.q_rank or 0)
        attention = query + down + heads * (latent.qk_head_dim + 2 * latent.v_head_dim)
    else:
        attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    attention += shape.hidden_size
    if layer not in shape.moe_layers:
        return attention + 2 * shape.ffn_hidden_size + shape.hidden_size
    per_expert = 2 * shape.expert_ffn_hidden_size + shape.hidden_size
    shared = 2 * shape.shared_ffn_hidden_size + (shape.hidden_size if shape.shared_ffn_hidden_size else 0)
    return attention + shape.num_experts + shape.experts_per_token * per_expert + shared


def _kept_elements(shape: ModelShape, layer: int, *, in_bf16: bool) -> float:
    """Elements per token that transformers' code of one layer keeps from forward to backward, in units of the compute
    dtype. An RMS norm keeps its normalised and scaled outputs, and in bfloat16 also its input in float32."""
    copy = 2 if in_bf16 else 0
    norms = 2 * (copy + 2) * shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if shape.latent is not None:
        heads = shape.latent.qk_head_dim + shape.latent.qk_rope_head_dim
        attention = shape.num_heads * (4 * heads + 4 * shape.latent.v_head_dim) + 4 * shape.latent.kv_rank
    else:
        attention = 2 * query + 2 * key + ((copy + 1) * (query + key) if shape.has_qk_norm else 0)
    if layer not in shape.moe_layers:
        return norms + attention + 4 * shape.ffn_hidden_size
    experts = shape.experts_per_token * (2 * shape.hidden_size + 4 * shape.expert_ffn_hidden_size)
    return norms + attention + 3 * shape.num_experts + 4 * shape.shared_ffn_hidden_size + experts


def _backward_elements(shape: ModelShape, layer: int) -> float:
    """Elements per token of the gradients that exist at the peak of one layer's backward, besides `_kept_elements`."""
    if layer not in shape.moe_layers:
        return 2 * shape.ffn_hidden_size
    return 3 * shape.experts_per_token * shape.hidden_size
