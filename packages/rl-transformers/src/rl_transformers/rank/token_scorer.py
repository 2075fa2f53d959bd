"""Scores tokens with a Hugging Face causal language model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rl_core.algorithms.logprobs import chunked_logprobs
from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.model_files import require_all_weights
from rl_core.rank_kit.weight_buckets import broken_weights_file
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_transformers.attention_proof import default_attention, sdpa_with_mask, with_eager_attention
from rl_transformers.expert_choices import ExpertChoices
from rl_transformers.kept_tensors import KeptTensors, kept_tensors
from rl_transformers.pretrained import no_progress_bars
from rl_transformers.proof.reference_models import random_model
from rl_transformers.proof.shrunken_models import shrunken
from rl_transformers.rank.attention import PACKED_ATTENTION, packed_attention_of_rows
from rl_transformers.rank.lora import Making, add_adapters, as_they_are
from rl_transformers.rank.micro_batch import ModelInput, autocast, model_input, predicted_tokens, predicting_states
from rl_transformers.rank.rank_mesh import UlyssesGroup
from rl_transformers.rank.recomputation import recompute_layers
from rl_transformers.rank.router_replay import follow, require_followed_routes
from rl_transformers.rank.value_head import ValueScorer, load_head
from rl_transformers.rank.weights import exported_weights, freeze_others, trained_or_all

logger = logging.getLogger(__name__)

_UNPACKED = "set trainer.use_sample_packing=false"
_SEPARABLE = {"full_attention", "sliding_attention", "chunked_attention", "moe", "dense", "sparse"}
"""Kinds of layers (`layer_types`) in which packed sequences stay separate. The packed attention refuses chunks."""


class TokenScorer(nn.Module):
    """Log-probs and entropies of tokens from a causal language model.

    The output layer's weight is used inside `forward`, so that a sharding wrapper around this module gathers it too.
    The model stays in evaluation mode, because dropout would change log-probs relative to the engine's.
    """

    score_names = ("logprobs", "entropies")

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, compute_dtype: torch.dtype):
        super().__init__()
        self.model = model.eval()
        self.chunk_tokens = chunk_tokens
        self.compute_dtype = compute_dtype
        self.hidden_scale = _hidden_scale(model.config)
        self.kept = KeptTensors(files={})
        """What `save_model` copies from the checkpoint; empty on ranks above 0 and for a model that is not trained."""
        self.choices: ExpertChoices | None = None
        """Set if the model's routers follow a batch's routes."""

    def forward(self, inputs: ModelInput, *, temperature: float, with_entropy: bool = True) -> tuple[Tensor, ...]:
        """Scores the tokens that `inputs` selects.

        Args:
            inputs: a micro-batch.
            temperature: > 0, divides the logits.
            with_entropy: whether to compute entropies.

        Returns:
            Log-probs [S] and, if computed, entropies [S]; float32 (float64 for a float64 model).
        """
        output = self.model.get_output_embeddings()
        assert isinstance(output, nn.Linear)
        if self.choices is not None:
            follow(self.choices, inputs.routes)
        hidden_SH = predicting_states(self.model, inputs, self.compute_dtype)
        if self.hidden_scale != 1.0:
            hidden_SH = hidden_SH * self.hidden_scale
        logprobs_S, entropies_S = chunked_logprobs(
            hidden_SH,
            output.weight,
            inputs.target_S,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            bias_V=output.bias,
            with_entropy=with_entropy,
            kept=inputs.kept,
        )
        return (logprobs_S,) if entropies_S is None else (logprobs_S, entropies_S)

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters in a saved state: see `trained_or_all`. A tied weight appears once."""
        return trained_or_all(self.model.named_parameters())

    def exported_weights(
        self, making: Making = as_they_are, *, only_trained: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The model under the names of a Hugging Face checkpoint, in `compute_dtype`: see `exported_weights`."""
        return exported_weights(self.model, self.compute_dtype, making, only_trained=only_trained)


Scorer = TokenScorer | ValueScorer


def load_scorer(
    spec: WorkerSpec, device: torch.device, *, routes_key: str | None = None, keeps_float32: bool = True
) -> Scorer:
    """Loads the model of `spec`: for training, or frozen if the spec has no optimizer. A critic gets a value head.

    Parameters are float32 if they are trained or if float32 is the compute dtype, else bfloat16. Without
    `spec.bf16`, a checkpoint stored in float64 keeps float64.

    Args:
        spec: the model to load.
        device: the model's device. On `meta`, the model has the same structure without memory and is not checked.
        routes_key: the configuration key that enables router replay, which error messages name; None: routers make
            their own choices.
        keeps_float32: trained parameters are float32 even if the compute dtype is bfloat16. False: they have the
            compute dtype, and the sharding code keeps a float32 copy.

    Raises:
        ConfigError: the model does not exist, or this code cannot score or train it.
    """
    path, where, is_trained = spec.model.path, SECTIONS[spec.role], spec.optimizer is not None
    kept = KeptTensors(files={})
    assert path is not None
    config, is_empty = _load_config(path, where), device.type == "meta"
    compute_dtype = torch.bfloat16 if spec.bf16 else torch.float64 if config.dtype == torch.float64 else torch.float32
    is_critic, is_adapted = spec.role == "critic", spec.model.lora.rank > 0
    dtype = torch.float32 if spec.bf16 and is_trained and not is_adapted and keeps_float32 else compute_dtype
    if spec.bf16 and not is_empty:
        _require_right_code(spec, config, where)
    try:
        auto_class = AutoModel if is_critic else AutoModelForCausalLM
        if is_empty:
            with device:
                model = auto_class.from_config(config, dtype=dtype, attn_implementation="eager")
        else:
            with no_progress_bars():
                loaded: Any = auto_class.from_pretrained(
                    path, dtype=dtype, attn_implementation="eager", output_loading_info=True
                )
            model, found = loaded
            require_all_weights(found["missing_keys"], f"{where}.model.path: {path}")
            if is_trained and not is_critic:
                kept = kept_tensors(model, found["unexpected_keys"], path, f"{where}.model.path")
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _unloadable(broken_weights_file(path) or path, where, error) from error
    model.requires_grad_(is_trained)
    if is_trained and spec.model.trainable is not None:
        freeze_others(model, spec.model.trainable, f"{where}.model.trainable")
    if is_adapted:
        add_adapters(model, spec.model.lora, path=path, seed=spec.seed, where=where)
    nn.Module.to(model, device)
    if is_empty:
        model.set_attn_implementation(PACKED_ATTENTION if spec.use_sample_packing else _planned_attention(model, where))
    if is_critic:
        scorer = ValueScorer(model, compute_dtype=compute_dtype)
        scorer.value_head.requires_grad_(is_trained)
        if not is_empty:
            load_head(scorer, path, where)
            _require_same_states(model, spec, compute_dtype, where)
    else:
        scorer = TokenScorer(model, chunk_tokens=spec.logprobs_chunk_size, compute_dtype=compute_dtype)
        scorer.kept = kept
        if not is_empty:
            _require_linear_output(model, where)
            _require_same_scores(scorer, spec, where)
        if routes_key is not None:
            scorer.choices = ExpertChoices.of(model, where=routes_key)
            if not is_empty:
                inputs = two_sequences(model, spec, device)
                require_followed_routes(model, scorer.choices, inputs, compute_dtype, routes_key)
    if spec.gradient_checkpointing and is_trained:
        recompute_layers(model, spec.gradient_checkpointing, where)
    if not keeps_float32:
        # The parameters include adapters and heads. Buffers, such as rotary frequencies, keep their dtype.
        for weight in scorer.parameters():
            weight.data = weight.data.to(compute_dtype)
    return scorer


def require_structure(spec: WorkerSpec, config: PretrainedConfig) -> None:
    """Raises ConfigError if `load_scorer` would refuse the model of `spec`, as far as its configuration `config` shows
    this: reads no weights. A model that cannot be built on `meta`, or of which no small copy can be made, is not
    checked there."""
    where, is_critic = SECTIONS[spec.role], spec.role == "critic"
    try:
        with torch.device("meta"):
            model = (AutoModel if is_critic else AutoModelForCausalLM).from_config(config, attn_implementation="eager")
        if spec.model.lora.rank > 0:
            add_adapters(model, spec.model.lora, path=spec.model.path or "", seed=spec.seed, where=where)
        if not is_critic:
            _require_linear_output(model, where)
        if spec.use_sample_packing:
            require_separable_layers(model, where, _UNPACKED)
        if spec.model.trainable is not None:
            freeze_others(model, spec.model.trainable, f"{where}.model.trainable")
    except ConfigError:
        raise
    except ValueError as error:  # a kind of model that has no such class
        raise _unloadable(spec.model.path or "", where, error) from error
    except Exception as error:  # code of a model may raise anything; the load at the start reports what is wrong
        logger.debug("%s.model: its structure was not checked: %s", where, error)
    _require_right_code(spec, config, where)


def _require_right_code(spec: WorkerSpec, config: PretrainedConfig, where: str) -> None:
    """Makes the checks of results on a small copy of the model, in float32, where the limit is a hundredth of
    bfloat16's."""
    is_critic = spec.role == "critic"
    small = _small_copy(config, where, AutoModel if is_critic else AutoModelForCausalLM)
    if small is None:
        return
    if is_critic:
        _require_same_states(small, spec, torch.float32, where)
    else:
        scorer = TokenScorer(small, chunk_tokens=spec.logprobs_chunk_size, compute_dtype=torch.float32)
        _require_same_scores(scorer, spec, where)


def _small_copy(config: PretrainedConfig, where: str, auto_class: Any = AutoModelForCausalLM) -> PreTrainedModel | None:
    """A small model of the same kind with random weights, on the CPU; of several models, the text model. None if
    `shrunken` does not know its sizes, or if it cannot run."""
    text = config.get_text_config()
    fields, own_names = text.to_dict(), text.attribute_map
    fields |= {name: fields[own] for name, own in own_names.items() if own in fields}
    try:
        small = shrunken(fields, where)
        model = random_model(small | {own: small[name] for name, own in own_names.items() if name in small}, where)
        if auto_class is AutoModel:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
                model = AutoModel.from_config(model.config, **plainly).eval()
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():  # each layer has an effect, wherever the model has norms
            if weight.dim() > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(("weight", "bias")):
                nn.init.normal_(weight, mean=float(name.endswith("weight")), std=0.1, generator=generator)
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception as error:  # as in `require_structure`
        logger.debug("%s.model: no small copy was made: %s", where, error)
        return None
    return model


def _unloadable(path: Path | str, where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be loaded as a causal language model: {error}", key=f"{where}.model.path")


def _load_config(path: str, where: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers' field checks may raise anything
        raise ConfigError(
            f"transformers cannot read the configuration of {path!r}; expected a model directory or the name of a "
            f"model that can be downloaded: {error}",
            key=f"{where}.model.path",
        ) from error


def _hidden_scale(config: PretrainedConfig) -> float:
    """Factor of the hidden states, equivalent to Cohere's `logit_scale` (a factor of logits) and Granite's
    `logits_scaling` (a divisor of logits)."""
    return getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)


def _require_linear_output(model: PreTrainedModel, where: str) -> None:
    name = type(model).__name__
    for cap in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if getattr(model.config, cap, None) is not None:
            raise ConfigError(f"{name} caps its logits ({cap}); choose another model", key=f"{where}.model.path")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"the output layer of {name} is not one linear layer; choose another model", key=f"{where}.model.path"
        )


def _require_same_scores(scorer: TokenScorer, spec: WorkerSpec, where: str) -> None:
    """Requires that the scorer's log-probs agree with log-probs from the model's own logits, computed one sequence at a
    time.

    Besides the faults that `_require_agreement` names, this check detects output layers that compute more than a matrix
    product, a bias and a constant factor.
    """
    _require_agreement(
        scorer.model,
        spec,
        scorer.compute_dtype,
        lambda inputs: inputs.scored_by(scorer, temperature=1.0)[0],
        partial(_own_logprobs, scorer.model),
        where,
    )


def _require_same_states(model: PreTrainedModel, spec: WorkerSpec, compute_dtype: torch.dtype, where: str) -> None:
    """Requires that the hidden states from which values are computed agree with the hidden states of the model's own
    code, computed one sequence at a time."""

    def as_trained(inputs: ModelInput) -> Tensor:
        states_SH = predicting_states(model, inputs, compute_dtype)
        return states_SH if inputs.score_S is None else states_SH[inputs.score_S]

    def alone(tokens_T: Tensor) -> Tensor:
        return model(tokens_T[None].to(model.device), use_cache=False).last_hidden_state[0, :-1]

    _require_agreement(model, spec, compute_dtype, as_trained, alone, where)


def _planned_attention(model: PreTrainedModel, where: str) -> str:
    """The attention implementation of rows for a model on `meta`."""
    attention, small = default_attention(model), _small_copy(model.config, where)
    if small is None:
        return attention
    run = partial(small, input_ids=torch.zeros(1, 12, dtype=torch.int64), use_cache=False)
    return attention if with_eager_attention(small, run, sdpa_with_mask)[1] is None else "eager"


def _require_agreement(
    model: PreTrainedModel,
    spec: WorkerSpec,
    compute_dtype: torch.dtype,
    as_trained: Callable[[ModelInput], Tensor],
    alone: Callable[[Tensor], Tensor],
    where: str,
) -> None:
    """Compares the results of the training code for two short sequences with the results of the model's own code for
    each sequence alone.

    This comparison detects layers that mix packed sequences (state-space, convolution) and attention that ignores the
    bounds of sequences. `require_separable_layers` also refuses such layers by name, because a small effect is within
    the limit, and sparse attention has an effect only in long sequences. The model's own code computes attention
    eagerly. Afterwards the model uses the attention function of training; rows use eager attention if SDPA ignores a
    setting of a layer.
    """
    name, sequences = type(model).__name__, _two_token_sequences(model, spec)
    inputs = two_sequences(model, spec, model.device)
    remedy = "this backend cannot train it"
    if spec.use_sample_packing:
        require_separable_layers(model, where, _UNPACKED)
        remedy = _UNPACKED + (
            ", or trainer.share_prefixes=false if only shared prompts cause the difference"
            if spec.share_prefixes
            else ""
        )
    attention = PACKED_ATTENTION if spec.use_sample_packing else default_attention(model)
    attend = packed_attention_of_rows if spec.use_sample_packing else sdpa_with_mask
    with torch.no_grad(), autocast(model, compute_dtype):
        try:
            expected, fault = with_eager_attention(
                model, lambda: torch.cat([alone(tokens_T) for tokens_T in sequences]), attend
            )
            if fault is not None and spec.use_sample_packing:
                raise ConfigError(f"packed, {fault}; {_UNPACKED}")
            if fault is not None and attention != "eager":
                logger.info("%s: attention is computed by the model's own code, because with SDPA %s", where, fault)
                attention = "eager"
            model.set_attn_implementation(attention)
            found = as_trained(inputs)
        except ConfigError as error:
            raise ConfigError(str(error), key=f"{where}.model.path") from error
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} cannot run with the inputs of training ({error}); {remedy}", key=f"{where}.model.path"
            ) from error
    message = f"the results of {name} in training differ from those of its own code"
    require_close(found, expected, compute_dtype, message, remedy, key=f"{where}.model.path")


def require_separable_layers(model: PreTrainedModel, where: str, remedy: str) -> None:
    """Raises ConfigError if layers would mix packed sequences, or need the tokens of other Ulysses ranks."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _SEPARABLE
    if kinds:
        raise ConfigError(
            f"{type(model).__name__} has layers of the kind {', '.join(sorted(kinds))}, whose sequences cannot be "
            f"packed or split over ranks; {remedy}",
            key=f"{where}.model.path",
        )


def require_close(
    found: Tensor, expected: Tensor, compute_dtype: torch.dtype, message: str, remedy: str, *, key: str
) -> None:
    """Raises ConfigError with `message` and `remedy` unless scores agree within the accuracy of `compute_dtype`."""
    # Log-probs of a random model are all near −log V, so differences are measured relative to their spread.
    spread = (expected - expected.mean()).norm().clamp(min=1e-3)
    error = ((found - expected).norm() / spread).item()
    limit = 0.1 if compute_dtype == torch.bfloat16 else 1e-3
    if not error < limit:
        raise ConfigError(f"{message} by {error:.1e} (relative), expected below {limit:g}; {remedy}", key=key)


def _two_token_sequences(model: PreTrainedModel, spec: WorkerSpec) -> list[Tensor]:
    """Two sequences of 7 and 5 tokens. If prefixes are shared, both are preceded by the same 20 tokens."""
    generator, vocab_size = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
    start_T, *ends = (torch.randint(vocab_size, (n,), generator=generator) for n in (20, 7, 5))
    return [torch.cat([start_T, end_T]) if spec.share_prefixes else end_T for end_T in ends]


def two_sequences(
    model: PreTrainedModel, spec: WorkerSpec, device: torch.device, *, ulysses: UlyssesGroup | None = None
) -> ModelInput:
    """The model input of two short sequences, the same on every rank, for checking a model."""
    batch = Batch.from_sequences([{"tokens": tokens_T} for tokens_T in _two_token_sequences(model, spec)])
    return model_input(
        batch,
        predicted_tokens(batch),
        use_sample_packing=spec.use_sample_packing,
        share_prefixes=spec.share_prefixes,
        device=device,
        ulysses=ulysses,
    )


def _own_logprobs(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    tokens_T = tokens_T.to(model.device)
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
    logits_TV = logits_TV.to(torch.promote_types(torch.float32, logits_TV.dtype))
    return logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None]).squeeze(1)
