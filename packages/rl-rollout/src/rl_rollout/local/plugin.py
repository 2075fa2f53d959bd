"""The entry point of the `local` engine. Imports no torch until an engine is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import ENGINE_CONTRACT_VERSION, EngineSpec, InferenceClient

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SECTION = "generator.inference_engine"


@attrs.frozen
class LocalEnginePlugin:
    """InferencePlugin of the engine that runs in the trainer's process: no server, no Ray, one device."""

    contract_version: int = ENGINE_CONTRACT_VERSION
    name: str = "local"

    def validate(self, spec: EngineSpec) -> None:
        """Raises ConfigError for what this engine cannot do."""
        if spec.num_engines != 1:
            others = {plugin.name for plugin in plugins.installed("rl_core.inference")}
            remedy = f", or choose {_SECTION}.backend=vllm" if "vllm" in others else ""
            raise ConfigError(
                f"{_SECTION}.num_engines: {spec.num_engines}, but the local engine is always one; set it to 1{remedy}"
            )
        if spec.lora.is_sent_alone:
            raise ConfigError(
                "trainer.policy.model.lora.merge_lora: false is given, and the local engine takes whole weights only; "
                f"set it to true, or choose {_SECTION}.backend=vllm"
            )
        if spec.max_num_seqs < 1:
            raise ConfigError(f"{_SECTION}.max_num_seqs: {spec.max_num_seqs}, expected at least 1")

    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Loads the model on the engine's own thread; on the first GPU where there is one.

        `init_kwargs` are passed to `from_pretrained`, e.g. `attn_implementation`.
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
        )


local = LocalEnginePlugin()
