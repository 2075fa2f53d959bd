"""The entry point. Imports no torch: it is loaded to check a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.errors import ConfigError
from rl_core.interfaces import InferenceClient

if TYPE_CHECKING:
    from rl_core.config import Config

_SECTION = "generator.inference_engine"


class NaiveEnginePlugin:
    """InferencePlugin of an engine in the trainer's process."""

    contract_version = 1
    name = "naive"
    num_engines_key = None

    def validate(self, config: Config) -> None:
        """Refuses what it cannot do, with the key that changes it."""
        engine = config.generator.inference_engine
        if engine.num_engines != 1:
            raise ConfigError(f"{_SECTION}.num_engines: {engine.num_engines}, but the naive engine is always one")
        if engine.enable_return_routed_experts:
            raise ConfigError(f"{_SECTION}.enable_return_routed_experts: the naive engine returns no routes")
        if engine.max_num_seqs < 1:
            raise ConfigError(f"{_SECTION}.max_num_seqs: {engine.max_num_seqs}, expected at least 1")
        if config.trainer.policy.model.lora.is_sent_alone:
            raise ConfigError("trainer.policy.model.lora.merge_lora: the naive engine takes whole weights only")

    async def create(self, config: Config) -> InferenceClient:
        """Loads `trainer.policy.model.path`; `engine_init_kwargs` are passed to `from_pretrained`."""
        from naive_engine.engine import NaiveEngine

        engine = config.generator.inference_engine
        return NaiveEngine.from_checkpoint(
            config.policy_model_path,
            dtype=config.engine_dtype,
            max_num_seqs=engine.max_num_seqs,
            timeout_s=config.trainer.generation_timeout_s,
            model_kwargs=engine.engine_init_kwargs,
        )


naive = NaiveEnginePlugin()
