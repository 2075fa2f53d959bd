"""Checks `extra_args` of the sampling parameters: further fields of vLLM's `SamplingParams`. This module imports
neither vllm nor torch, because importing them takes seconds."""

from __future__ import annotations

import ast
import builtins
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import attrs

from rl_core.errors import ConfigError, GenerationError, nearest
from rl_core.interfaces import EngineSpec, GenerateRequest, Sampler, SamplingParams
from rl_rollout.vllm.engine_arguments import source_fields

_OWN_KEYS = {
    **{name: f"generator.{{section}}.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
    "max_tokens": "generator.{section}.max_generate_length",
    "n": "generator.n_samples_per_prompt or eval_n_samples_per_prompt",
    "seed": "trainer.seed",
}
"""Parameter → configuration key that sets it."""
_FIXED = {
    **dict.fromkeys(("stop_token_ids", "ignore_eos"), "the chat template decides which tokens end a turn"),
    "structured_outputs": "an environment constrains responses with its `structural_tag`",
    "trace_decode_token_ids": "responses would not be sampled",
    "watermarking": "engines add no watermark",
    **dict.fromkeys(
        (
            "detokenize",
            "flat_logprobs",
            "include_stop_str_in_output",
            "logprob_token_ids",
            "logprobs",
            "output_kind",
            "output_text_buffer_length",
            "prompt_logprobs",
            "routed_experts_prompt_start",
            "skip_clone",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stream_interval",
        ),
        "it changes what vLLM returns, not what it samples",
    ),
}
"""Parameter that cannot be set → reason."""
CHANGING = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "thinking_token_budget",
)
"""Parameters that change the distribution in a way that the trainer cannot repeat when it scores responses."""
_PROBE = (0, 1, 2, 3)
"""Token ids that every vocabulary has."""


def require_sampling_arguments(spec: EngineSpec) -> None:
    """Raises ConfigError for an argument that vLLM does not know, whose value has the wrong type, that a configuration
    key sets, that is fixed, or that would make the log-probs of training inexact. Unknown names and wrong types are
    found here only if vLLM is installed; otherwise the servers refuse them (`try_sampling_arguments`)."""
    for section, sampling in _sections(spec):
        for name, value in sampling.extra_args.items():
            key = f"generator.{section}.extra_args.{name}"
            if name in _OWN_KEYS:
                raise ConfigError(f"set it with {_OWN_KEYS[name].format(section=section)}", key=key)
            if name in _FIXED:
                raise ConfigError(f"cannot be set, because {_FIXED[name]}; remove it", key=key)
            if name in CHANGING and section == "sampling_params":
                raise ConfigError(
                    "it changes the distribution from which vLLM samples, and the trainer cannot repeat the change "
                    "when it computes the log-probs of responses; remove it, or set it only in "
                    "generator.eval_sampling_params.extra_args",
                    key=key,
                )
            if find_spec("vllm") is not None:
                _require_field(key, name, value)


def _sections(spec: EngineSpec) -> list[tuple[str, SamplingParams]]:
    return [("sampling_params", spec.sampling), ("eval_sampling_params", spec.eval_sampling)]


def _require_field(key: str, name: str, value: Any) -> None:
    import msgspec

    fields = {name: text for name, text in sampling_fields().items() if not name.startswith("_")}
    if name not in fields:
        raise ConfigError(
            f"vLLM's SamplingParams has no such field.{nearest(name, fields)} What vLLM itself calls extra_args is set "
            "with extra_args.extra_args",
            key=key,
        )
    try:
        msgspec.convert(value, _type_of(fields[name]), str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"got {value!r}; vLLM expects {fields[name]}: {error}", key=key) from error


def sampling_fields() -> Mapping[str, str]:
    """Returns the name of each field of vLLM's `SamplingParams`, with its annotation."""
    return source_fields("sampling_params.py", "SamplingParams")


def _type_of(annotation: str) -> Any:
    """The type that an annotation in vLLM's source names. A class of vLLM is given as a mapping of its fields."""
    names = {node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)}
    classes = {name: dict[str, Any] for name in names - {"Any"} if not hasattr(builtins, name)}
    return eval(annotation, {"Any": Any, **classes})


async def try_sampling_arguments(client: Sampler, spec: EngineSpec) -> None:
    """Samples a token with the `extra_args` of training and of evaluation. Raises ConfigError if the servers refuse
    them, for example because a value is out of vLLM's range."""
    for section, sampling in _sections(spec):
        if not sampling.extra_args:
            continue
        least = sampling.extra_args.get("min_tokens", 0)
        num_tokens = min(sampling.max_tokens, 1 + least) if isinstance(least, int) else 1
        params = attrs.evolve(sampling, max_tokens=num_tokens, stop=())
        try:
            name = f"try-{uuid.uuid4().hex}"
            await client.generate(GenerateRequest(sample_id=name, prompt_tokens=_PROBE, params=params, seed=spec.seed))
        except GenerationError as error:
            raise ConfigError(str(error), key=f"generator.{section}.extra_args") from error
