"""Entry point of the `local` engine. This module does not import torch until an engine is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core import plugins
from rl_core.errors import ConfigError, nearest
from rl_core.interfaces import EnginePlan, EnginePlugin, EngineSpec, InferenceClient
from rl_rollout.memory import BYTES_OF, sampling_bytes, shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SECTION = "generator.inference_engine"
_LOADING = (
    "attn_implementation",
    "cache_dir",
    "experts_implementation",
    "local_files_only",
    "low_cpu_mem_usage",
    "quantization_config",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
    "use_safetensors",
    "variant",
)
"""Parameters of `from_pretrained` that `engine_init_kwargs` may set. The engine itself sets device and dtype."""
_COMMON_FIELDS = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache")


class LocalEnginePlugin(EnginePlugin):
    """Starts the `local` engine, which runs in the trainer's process on one device, without a
    server and without Ray."""

    name = "local"
    receives_deltas = True
    returns_kept_tokens = True

    def validate(self, spec: EngineSpec) -> None:
        """Raises ConfigError for options that this engine does not support."""
        if spec.num_engines != 1:
            others = {plugin.name for plugin in plugins.installed("rl_core.inference")}
            remedy = f", or choose {_SECTION}.backend=vllm" if "vllm" in others else ""
            raise ConfigError(
                f"got {spec.num_engines}, but there is only one local engine; set it to 1{remedy}",
                key=f"{_SECTION}.num_engines",
            )
        _require_known(spec)
        if spec.max_num_seqs < 1:
            raise ConfigError(f"got {spec.max_num_seqs}, expected at least 1", key=f"{_SECTION}.max_num_seqs")

    def is_on_this_host(self, options: object) -> bool:
        """Always True: the engine runs in the trainer's process."""
        return True

    def plan(self, spec: EngineSpec) -> EnginePlan:
        """See `EnginePlugin.plan`. For latent attention, transformers caches the expanded keys and values of every
        head."""
        shape, size = shape_of(spec), BYTES_OF[spec.dtype]
        latent = shape.latent
        heads = 0 if latent is None else latent.qk_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
        cached = shape.key_value_elements() if latent is None else shape.num_heads * heads
        return EnginePlan(
            num_devices=1,
            weight_bytes=shape.num_parameters() * size,
            kv_bytes_per_token=shape.num_layers * cached * size,
            computing_bytes=sampling_bytes(spec, shape),
            asleep_bytes=0,
            asleep_host_bytes=0,
            memory_share=1.0,
            can_sleep=False,
        )

    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Starts the engine's thread, which loads the model on the first GPU, or on the CPU if there is none.

        `spec.init_kwargs` are passed to the model's `from_pretrained`, e.g. `attn_implementation`.
        """
        from rl_rollout.local.engine import LocalEngine

        self.validate(spec)
        path = spec.model_path

        def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
            import torch

            from rl_rollout.chat import has_tokenizer, load_tokenizer
            from rl_rollout.local.model import load_model

            device = "cuda" if torch.cuda.is_available() else "cpu"
            tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
            return load_model(path, dtype=spec.dtype, device=device, model_kwargs=spec.init_kwargs), tokenizer

        return await LocalEngine.start(
            load,
            max_num_seqs=spec.max_num_seqs,
            timeout_s=spec.request_timeout_s,
            num_threads=spec.num_threads,
            return_routed_experts=spec.return_routed_experts,
            return_kept_tokens=spec.return_kept_tokens,
        )


def _require_known(spec: EngineSpec) -> None:
    """Raises ConfigError for names in `init_kwargs` that are neither in `_LOADING` nor fields of the model's
    configuration. Checks nothing if the model is not a local directory; unknown names then fail on loading."""
    try:
        fields = json.loads(Path(spec.model_path, "config.json").read_text())
    except (OSError, ValueError):
        return
    known = {*_LOADING, *fields, *_COMMON_FIELDS}
    for name in spec.init_kwargs:
        if name not in known:
            raise ConfigError(
                "expected a parameter of transformers' from_pretrained that the local engine passes on, or a field of "
                f"{spec.model_path}/config.json.{nearest(name, known)}",
                key=f"{_SECTION}.engine_init_kwargs.{name}",
            )


local = LocalEnginePlugin()
