"""Any Hugging Face causal language model as a scorer of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from rl_core.algorithms.logprobs import chunked_logprobs
from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_fsdp.attention import PACKED_ATTENTION, gather_rows
from rl_fsdp.backend import SECTIONS
from rl_fsdp.micro_batch import ModelInput, model_input, predicted_tokens


class TokenScorer(nn.Module):
    """Log-probs and entropies of tokens from a causal language model.

    The output layer's weight is used inside `forward`, so a sharding wrapper around this module gathers it too.
    The model stays in evaluation mode: dropout would make log-probs differ from those the engine sampled with.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, compute_dtype: torch.dtype):
        super().__init__()
        self.model = model.eval()
        self.chunk_tokens = chunk_tokens
        self.compute_dtype = compute_dtype
        self.hidden_scale = _hidden_scale(model.config)

    def forward(self, inputs: ModelInput, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Scores every token that has a token before it.

        Args:
            inputs: a micro-batch.
            temperature: > 0, divides the logits.

        Returns:
            Log-probs [S] and entropies [S], float32 (float64 for a float64 model).
        """
        output = self.model.get_output_embeddings()
        assert isinstance(output, nn.Linear)
        packing = {}
        if inputs.packed is not None:
            packing = {"position_ids": inputs.positions_BL, "packed_sequences": inputs.packed}
        with self.autocast():
            hidden_BLH = self.model.base_model(input_ids=inputs.tokens_BL, use_cache=False, **packing).last_hidden_state
        hidden_SH = gather_rows(hidden_BLH.flatten(0, 1), inputs.source_S).to(self.compute_dtype)
        if self.hidden_scale != 1.0:
            hidden_SH = hidden_SH * self.hidden_scale
        logprobs_S, entropies_S = chunked_logprobs(
            hidden_SH,
            output.weight,
            inputs.target_S,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            bias_V=output.bias,
        )
        assert entropies_S is not None
        return logprobs_S, entropies_S

    def autocast(self) -> torch.autocast:
        """bfloat16 where that is computed in; else no casts."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the model's own code; a tied weight comes once."""
        return self.model.named_parameters()

    def exported_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names of a Hugging Face checkpoint, in `compute_dtype`; a tied weight comes once."""
        for name, weight in self.named_weights():
            yield from checkpoint_tensors(self.model, name, weight.detach().to(self.compute_dtype))


def load_scorer(spec: WorkerSpec, device: torch.device) -> TokenScorer:
    """Loads the model of `spec`, for training or (without an optimizer) frozen.

    Parameters are float32 where they are trained or computed with, else bfloat16; float64 throughout for a checkpoint
    stored in float64.

    Raises:
        ConfigError: there is no such model, or its code cannot do what is asked.
    """
    path, where, is_trained = spec.model.path, SECTIONS[spec.role], spec.optimizer is not None
    assert path is not None
    config = _load_config(path, where)
    compute_dtype = torch.bfloat16 if spec.bf16 else torch.float64 if config.dtype == torch.float64 else torch.float32
    try:
        with no_progress_bars():
            dtype = torch.float32 if spec.bf16 and is_trained else compute_dtype
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}.model.path: {path!r} cannot be loaded as a causal language model: {error}"
        ) from error
    _require_linear_output(model, where)
    nn.Module.to(model, device).requires_grad_(is_trained)
    scorer = TokenScorer(model, chunk_tokens=spec.logprobs_chunk_size, compute_dtype=compute_dtype)
    _require_same_scores(scorer, use_sample_packing=spec.use_sample_packing, where=where)
    if spec.gradient_checkpointing and is_trained:
        _recompute_layers(model, where)
    return scorer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every model it reads or writes, across the run's own display."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter as it stands in a checkpoint: transformers may hold several tensors (experts) as one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


def _load_config(path: str, where: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = (
            "it has no config.json" if Path(path).is_dir() else "no directory here, nor a model that can be fetched"
        )
        raise ConfigError(f"{where}.model.path: {path!r} is no Hugging Face model ({reason}): {error}") from error


def _hidden_scale(config: PretrainedConfig) -> float:
    """Cohere multiplies logits by `logit_scale`, Granite divides by `logits_scaling`; the same on hidden states."""
    return getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)


def _require_linear_output(model: PreTrainedModel, where: str) -> None:
    name = type(model).__name__
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        raise ConfigError(
            f"{where}.model.path: {name} caps its logits (final_logit_softcapping), which chunked log-probs lack"
        )
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"{where}.model.path: the output layer of {name} is not one linear layer, which log-probs are computed from"
        )


def _require_same_scores(scorer: TokenScorer, *, use_sample_packing: bool, where: str) -> None:
    """Proves on two short sequences that the scorer agrees with the model's own logits of each sequence alone.

    It finds layers that look across packed sequences (state-space, convolution), attention that takes no bounds, and
    output layers that are more than a matrix. Leaves the model with the attention that the scorer needs.
    """
    model, name = scorer.model, type(scorer.model).__name__
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in (7, 5)]
    batch = Batch.from_sequences([{"tokens": tokens_T} for tokens_T in sequences])
    inputs = model_input(batch, predicted_tokens(batch), use_sample_packing=use_sample_packing, device=model.device)
    remedy = "set trainer.use_sample_packing=false" if use_sample_packing else "this backend cannot train it"
    with torch.no_grad(), scorer.autocast():
        expected_S = torch.cat([_own_logprobs(model, tokens_T) for tokens_T in sequences])
        if use_sample_packing:
            model.set_attn_implementation(PACKED_ATTENTION)
        try:
            scores_S, _ = scorer(inputs, temperature=1.0)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}.model.path: {name} does not run as in training ({error}); {remedy}") from error
    # Log-probs of a random model all lie near −log V: what tells one token from another is their spread.
    spread = (expected_S - expected_S.mean()).norm().clamp(min=1e-3)
    error = ((scores_S - expected_S).norm() / spread).item()
    limit = 0.1 if scorer.compute_dtype == torch.bfloat16 else 1e-3
    if not error < limit:
        raise ConfigError(
            f"{where}.model.path: log-probs of {name} differ from its own logits by {error:.1e} (relative), "
            f"expected below {limit:g}; {remedy}"
        )


def _own_logprobs(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    tokens_T = tokens_T.to(model.device)
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
    logits_TV = logits_TV.to(torch.promote_types(torch.float32, logits_TV.dtype))
    return logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None]).squeeze(1)


def _recompute_layers(model: PreTrainedModel, where: str) -> None:
    """Wraps every decoder layer's `forward`, not its call: hooks of a sharding wrapper stay outside and run once.

    transformers' own switch works in training mode only, which would also switch dropout on.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{where}: {type(model).__name__} marks no layers for gradient checkpointing: "
            "set trainer.gradient_checkpointing=false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
