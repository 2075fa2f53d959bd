"""Loads the engine's model, checks whether the engine can serve it, and replaces all of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rl_core import plugins
from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous, TensorRecord
from rl_core.rank_kit.model_files import require_all_weights
from rl_core.rank_kit.weight_buckets import broken_weights_file, bucket_records, unpack_bucket
from rl_core.rank_kit.weight_deltas import HeldWeights, has_only_trained, received
from rl_transformers.attention_proof import default_attention, sdpa_with_mask, with_eager_attention
from rl_transformers.pretrained import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def load_model(path: str, *, dtype: str, device: str, model_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """Loads a causal language model for generation.

    Args:
        path: directory or Hugging Face name of the model.
        dtype: torch's name of the dtype, e.g. `float32`.
        device: torch's name of the device, e.g. `cpu`.
        model_kwargs: further arguments of `from_pretrained`, e.g. `attn_implementation`, and fields of the model's
            configuration to change. Without `trust_remote_code`, a model's own code is refused.

    Raises:
        ConfigError: the model does not exist, is incomplete or cannot be loaded, or its configuration lists layers
            (`layer_types`) other than full and sliding-window attention, such as Mamba or linear attention.
    """
    arguments = {"trust_remote_code": False, **model_kwargs}
    asked = arguments.pop("attn_implementation", None)
    try:
        _require_servable(path, AutoConfig.from_pretrained(path, **arguments))
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True, **arguments
            )
        model, found = loaded
        require_all_weights(found["missing_keys"], f"trainer.policy.model.path: {path}")
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{broken_weights_file(path) or path}: the local engine cannot load this model: {type(error).__name__}: "
            f"{error}",
            key="trainer.policy.model.path",
        ) from error
    model.to(device)  # pyright: ignore[reportArgumentType]
    model.eval().requires_grad_(False)
    _select_attention(model, asked)
    return model


@torch.no_grad()
def _select_attention(model: PreTrainedModel, asked: str | None) -> None:
    """Selects the attention implementation `asked`. None: SDPA, or eager attention if SDPA ignores a layer's setting.

    Raises:
        ConfigError: results with `asked` differ from those with eager attention.
    """
    tokens_BL = torch.arange(12, device=model.device)[None] % model.config.get_text_config().vocab_size
    expected, fault = with_eager_attention(
        model, lambda: model(input_ids=tokens_BL, use_cache=False).logits.float(), sdpa_with_mask
    )
    model.set_attn_implementation(asked or ("eager" if fault else default_attention(model)))
    if asked in (None, "eager"):
        return
    found = model(input_ids=tokens_BL, use_cache=False).logits.float()
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    limit = 1e-3 if model.dtype == torch.float32 else 0.1
    if asked != "sdpa":
        fault = None if error < limit else f"logits differ by {error:.1e} (relative), expected below {limit:g}"
    if fault is not None:
        raise ConfigError(
            f"got {asked}, which does not compute this model: {fault}; leave it out, or set it to eager",
            key="generator.inference_engine.engine_init_kwargs.attn_implementation",
        )


def _require_servable(path: str, config: Any) -> None:
    layer_types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if layer_types - _SERVED_LAYERS:
        raise ConfigError(
            f"{path}: the local engine serves only {' and '.join(sorted(_SERVED_LAYERS))} layers, but this model has "
            f"{', '.join(sorted(layer_types - _SERVED_LAYERS))}; set generator.inference_engine.backend=vllm",
            key="trainer.policy.model.path",
        )


def eos_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a response: the end tokens of the generation configuration and of the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    tokens = [configured] if isinstance(configured, int) else list(configured or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(tokens))


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> list[float]:
    """Returns log p(token t | tokens before it) at temperature 1 for each token; 0.0 for the first."""
    tokens_T = torch.tensor(tokens, device=model.device)
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0].float()
    logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
    return [0.0, *logprobs_T.tolist()]


# --- weights --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class StagedWeights:
    """A complete weight version that has arrived but is not served yet. It takes memory in addition to the version that
    is served."""

    version: int
    tensors: Mapping[str, Tensor]
    manifest: Manifest
    is_part: bool = False
    """Whether the model keeps its other weights: see `has_only_trained`."""


def stage(rendezvous: Rendezvous, version: int, held: HeldWeights) -> StagedWeights:
    """Receives a version into memory without serving it yet. Raises the receiver's error, such as WeightSyncError.

    Args:
        rendezvous: names the receiver and describes the sync.
        version: expected version.
        held: the weights that the engine received last, because a sync may send only the changes since then.
    """
    receiver = plugins.load_receiver(rendezvous.receiver)(rendezvous)
    tensors: dict[str, Tensor] = {}
    records: dict[str, TensorRecord] = {}
    for bucket in received(receiver, version, rendezvous.delta, held):
        tensors |= unpack_bucket(bucket)
        records |= bucket_records(bucket)
    manifest = Manifest(version=version, tensors=records)
    is_part = has_only_trained(rendezvous.delta)
    return StagedWeights(version=version, tensors=tensors, manifest=manifest, is_part=is_part)


def require_complete(model: PreTrainedModel, staged: StagedWeights) -> None:
    """Checks that the staged tensors are the model's parameters, by name and shape.

    The names are those of a checkpoint, in which each expert has its own tensors, even if the model holds all experts
    as one tensor. A tied weight may arrive under any of its names.

    Raises:
        WeightSyncError: a tensor is missing or unknown, a shape differs, or different tensors arrived for a tied
            weight. The message names some of the tensors.
    """
    expected = _checkpoint_shapes(model)
    aliases = {name: name for name in expected} | _tied_names(model)
    problems = [f"{name} is not a parameter of the model" for name in staged.tensors if name not in aliases]
    arrived = {aliases[name]: name for name in staged.tensors if name in aliases}
    problems += [f"{name} did not arrive" for name in expected if name not in arrived and not staged.is_part]
    for name, record in staged.manifest.tensors.items():
        canonical = aliases.get(name)
        if canonical and record.shape != expected[canonical]:
            problems.append(f"{name} has shape {record.shape}, the model's is {expected[canonical]}")
        if canonical and record != staged.manifest.tensors[arrived[canonical]]:
            problems.append(f"{name} and {arrived[canonical]} are one tied weight, but different tensors arrived")
    if problems:
        raise WeightSyncError(
            f"weight version {staged.version} does not fit the model, so nothing was loaded; {len(problems)} problems: "
            + "; ".join(problems[:3])
        )


@torch.no_grad()
def load_weights(model: PreTrainedModel, staged: StagedWeights) -> None:
    """Copies checked weights into the model, in the model's dtype.

    If the checkpoint's names differ from the model's, all tensors are converted before the first is copied. So an error
    in the conversion leaves the model unchanged.
    """
    aliases = {name: name for name in _checkpoint_shapes(model)} | _tied_names(model)
    tensors = {aliases[name]: tensor for name, tensor in staged.tensors.items()}
    parameters = dict(model.named_parameters())
    if not tensors.keys() <= parameters.keys():
        kept = revert_weight_conversion(model, {**parameters}) if staged.is_part else {}
        tensors = _converted(model, {**kept, **tensors}, staged.version)
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def _converted(model: PreTrainedModel, tensors: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
    """Converts a checkpoint's tensors to the model's parameters, as transformers does on loading. Until the caller has
    copied them, they take the memory of a second model."""
    try:
        with no_progress_bars():
            loaded = type(model).from_pretrained(None, config=model.config, state_dict=dict(tensors), dtype=model.dtype)
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(f"weight version {version} was not loaded: it cannot be converted: {error}") from error
    return dict(loaded.named_parameters())


def _checkpoint_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model's parameters by their names in a checkpoint. A tied weight occurs only under its
    first name."""
    empty = {name: torch.empty_like(parameter, device="meta") for name, parameter in model.named_parameters()}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, empty).items()}


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Returns a map from each further name of a tied weight to its first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}
