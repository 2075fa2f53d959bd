"""Creates a transformers model with random weights that expose differences in computation, and computes its scores and
gradients.

The mean square of every norm's input is a few times the norm's eps, so that a wrong eps has an effect. Attention is
sharp, biases are not zero, experts' scores are well separated, and log-probs spread over several nats. The weights
that transformers initialises are overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_core.errors import ConfigError

_MOST_PARAMETERS = 50_000_000
"""Largest number of parameters of a small model. A larger model has a size that `shrunken` does not reduce."""
_SHARPNESS = 1.2
"""Standard deviation of the elements of queries, keys and router scores."""
_LOGITS = 1.0
"""Standard deviation of the logits."""
_WRITERS = ("o_proj", "out_proj", "dense", "wo", "c_proj", "down_proj", "w2", "embed_tokens", "wte", "word_embeddings")
"""Layers whose outputs are added to the residual stream, which only norms read."""
_NORMALISED = {"q_proj": "q_norm", "k_proj": "k_norm", "q_a_proj": "q_a_layernorm"}
"""Layer → a norm. If the model has this norm, only the norm reads the layer's output."""


@attrs.frozen(kw_only=True, eq=False)
class ReferenceScores:
    """The results by which models are compared."""

    logprobs_T: Tensor
    """float32, all sequences concatenated; 0 at the first token of each."""
    gradients: Mapping[str, Tensor]
    """Gradients of sum_t weights[t] · −logprobs[t], under the names of a checkpoint; a tied weight appears once."""
    magnitudes: Mapping[str, float]
    """Root mean square of each parameter, under the same names."""


def random_model(config: Mapping[str, Any], where: str, *, seed: int = 0) -> Any:
    """Creates the transformers model of a small configuration, in float32 and evaluation mode.

    Args:
        config: all fields of the small configuration, including `model_type`.
        where: key path of the model, for messages.
        seed: the same seed makes the same weights.

    Raises:
        ConfigError: transformers cannot build the model, or the model is not small.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name not in ("model_type", "dtype")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = AutoConfig.for_model(config["model_type"], **fields)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(made).parameters())
            if size > _MOST_PARAMETERS:
                raise ConfigError(
                    f"a small copy of the model has {size:,} parameters; expected at most {_MOST_PARAMETERS:,}",
                    key=where,
                )
            # Computes experts one by one, because a grouped product needs sizes that are multiples of 16 bytes.
            plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, **plainly).eval()
        except ConfigError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise ConfigError(f"transformers cannot build a small copy of the model: {error}", key=where) from error
        _fill(model)
    return model


@torch.no_grad()
def _fill(model: Any) -> None:
    config = model.config
    eps = next((v for n in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if (v := getattr(config, n, None))), 1e-6)
    small = min(max(2.0 * eps**0.5, 1e-3), 0.5)
    names = {name for name, _ in model.named_modules()}
    is_tied = model.get_output_embeddings() is not None and any(
        model.get_output_embeddings().weight is p for p in model.get_input_embeddings().parameters()
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = name.split(".")
        layer = parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]
        beside = ".".join([*parts[:-2], _NORMALISED.get(layer, "")])
        scale = small if layer in _WRITERS or (layer in _NORMALISED and beside in names) else 1.0
        if layer.endswith("e_score_correction_bias"):
            nn.init.normal_(tensor, std=0.2)
        elif name not in dict(model.named_parameters()):
            continue
        elif "norm" in layer.lower():
            center = _LOGITS / (small * config.hidden_size**0.5) if is_tied and _is_last_norm(parts) else 1.0
            nn.init.normal_(tensor, mean=0.0 if parts[-1] == "bias" else center, std=0.2 * center)
        elif tensor.dim() < 2:
            nn.init.normal_(tensor, std=0.5 * scale)
        elif layer in ("embed_tokens", "wte", "word_embeddings"):
            nn.init.normal_(tensor, std=scale)
        else:
            gain = _LOGITS if layer == "lm_head" else _SHARPNESS
            nn.init.normal_(tensor, std=gain * scale * tensor.shape[-1] ** -0.5)
            if layer == "kv_a_proj_with_mqa":
                tensor[: config.kv_lora_rank] *= small  # the remaining rows are rotated, not normalised


def _is_last_norm(parts: list[str]) -> bool:
    return not any(part.isdigit() for part in parts)


def write_model(model: Any, config: Mapping[str, Any], directory: Path) -> None:
    """Writes the weights as in a checkpoint, and the configuration unchanged (`save_pretrained` would rewrite it).

    Args:
        model: created by `random_model`.
        config: the configuration from which it was created.
        directory: an existing directory.
    """
    weights = {**dict(model.named_parameters()), **dict(_kept_buffers(model))}
    tensors = as_in_a_checkpoint(model, {name: tensor.detach() for name, tensor in weights.items()})
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    (directory / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")


def _kept_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def as_in_a_checkpoint(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under their names in a checkpoint. transformers stacks the experts of a layer; a checkpoint
    has tensors of each expert."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def reference_scores(model: Any, sequences: list[Tensor], weights_T: Tensor) -> ReferenceScores:
    """Log-probs of sequences, each computed alone, and the gradient of the negated weighted sum of the log-probs.

    Args:
        model: a transformers model.
        sequences: int64 tokens of each sequence.
        weights_T: float, for all sequences concatenated. A sequence whose weights are all 0 is scored without a
            gradient.
    """
    parts, start = [], 0
    for tokens_S in sequences:
        weights_S = weights_T[start : start + len(tokens_S)]
        is_trained = bool(weights_S.any())
        with torch.set_grad_enabled(is_trained):
            logits_SV = model(input_ids=tokens_S[None], use_cache=False).logits[0, :-1].float()
            logprobs_S = logits_SV.log_softmax(-1).gather(1, tokens_S[1:, None]).squeeze(1)
            if is_trained:
                (-logprobs_S * weights_S[1:]).sum().backward()
        parts += [torch.zeros(1), logprobs_S.detach()]
        start += len(tokens_S)
    named = dict(model.named_parameters())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    weights = as_in_a_checkpoint(model, {name: p.detach() for name, p in named.items()})
    return ReferenceScores(
        logprobs_T=torch.cat(parts),
        gradients=as_in_a_checkpoint(model, gradients),
        magnitudes={name: float(weight.square().mean().sqrt()) for name, weight in weights.items()},
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Context with one torch thread: on a busy machine, tiny models are many times slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
