"""Servers that tests share, and their clients. A client belongs to one event loop; a server outlives it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import psutil
from torch import Tensor

from rl_core.config import Config, engine_spec, from_mapping
from rl_core.interfaces import EngineSpec, GenerateRequest, Manifest, SamplingParams, WeightTransport
from rl_core.rank_kit.weight_buckets import pack_buckets
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.engine_arguments import ranks_per_engine
from rl_rollout.vllm.launch import client_settings, servers_of, supervised_client
from rl_rollout.vllm.placement import reserve_places
from rl_rollout.vllm.server_group import Server
from rl_rollout.vllm.supervisor import ExternalServer
from rl_rollout.vllm.tokens import Tokens
from rl_transformers.rank.weights import checkpoint_tensors
from rl_transformers.testing.models import make_checkpoint

T = TypeVar("T")
TOKENS = Tokens(control="the control token of these tests")
"""The access tokens of all shared servers."""
IN_CORE = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""Lets an engine of one rank compute in its core process, as on GPUs. On CPUs vLLM starts a worker process unless the
executor is given as a class. Importing vLLM in that process takes a third of a start's processor time."""
MAX_POSITIONS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@attrs.frozen(kw_only=True)
class RunningServer:
    """A server that tests share."""

    url: str
    pid: int
    model_path: str
    spec: EngineSpec
    server: Server


def write_model(directory: Path, *, num_experts: int = 0, chat_template: str = CHAT_TEMPLATE, **config: Any) -> Path:
    """A random model with one token per character and a chat template. vLLM's CPU build supports its `head_dim`."""
    from transformers import AutoTokenizer

    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    family: Any = "qwen3_moe" if num_experts else "qwen3"
    fields = {"head_dim": 32, "max_position_embeddings": MAX_POSITIONS, **(experts if num_experts else {}), **config}
    make_checkpoint(directory, family=family, **fields)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def engine_config(
    model_path: Path, run_dir: Path, *, lora: Mapping[str, Any] | None = None, timeout_s: float = 300.0, **engine: Any
) -> Config:
    """A resolved configuration for small float32 engines. `lora` sets keys of trainer.policy.model.lora, `engine` keys
    of generator.inference_engine.
    """
    values = {
        "backend": "vllm",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "served_model_name": "policy",
        "heartbeat_interval_s": 1.0,
        # On a busy machine a healthy server may not respond for a long time.
        "hung_after_s": 120.0,
        "start_timeout_s": 900.0,
        **engine,
        "engine_init_kwargs": {"kv_cache_memory_bytes": 64 * 2**20, **engine.get("engine_init_kwargs", {})},
    }
    return from_mapping(
        {
            "trainer.policy.model.path": str(model_path),
            "trainer.run_dir": str(run_dir),
            "trainer.bf16": False,
            "trainer.generation_timeout_s": timeout_s,
            **{f"trainer.policy.model.lora.{key}": value for key, value in (lora or {}).items()},
            **{f"generator.inference_engine.{key}": value for key, value in values.items()},
        }
    )


def make_spec(model_path: Path, run_dir: Path, **settings: Any) -> EngineSpec:
    """The engine's spec for the configuration that `engine_config` makes."""
    return engine_spec(engine_config(model_path, run_dir, **settings))[1]


def start_servers(*specs: EngineSpec) -> list[RunningServer]:
    """Starts the servers of all specs at the same time. Ray must be running."""

    async def start(spec: EngineSpec) -> list[RunningServer]:
        num_ranks = ranks_per_engine(spec.options)
        places = await reserve_places(spec.num_engines, num_ranks, shares_devices=False, timeout_s=300)
        if num_ranks == 1:
            spec = attrs.evolve(spec, init_kwargs={**spec.init_kwargs, **IN_CORE})
        servers = servers_of(spec, places, host="127.0.0.1", tokens=TOKENS)
        addresses = await asyncio.gather(*(server.start() for server in servers))
        return [
            RunningServer(url=a.url, pid=a.pid, model_path=spec.model_path, spec=spec, server=server)
            for a, server in zip(addresses, servers, strict=True)
        ]

    async def start_all() -> list[RunningServer]:
        return [server for servers in await asyncio.gather(*map(start, specs)) for server in servers]

    return asyncio.run(start_all())


def stop_servers(running: Sequence[RunningServer]) -> None:
    """Stops the servers and frees the places that they reserved."""

    async def stop() -> None:
        await asyncio.gather(*(one.server.stop() for one in running))

    asyncio.run(stop())
    for one in running:
        one.server.place.free()


async def connect(*running: RunningServer) -> RemoteInferenceClient:
    """A client of these servers in the running event loop. Closing it does not stop the servers."""
    settings = client_settings(running[0].spec, TOKENS)
    servers = [ExternalServer(one.url, TOKENS.control, 60.0) for one in running]
    return await supervised_client(servers, settings)


def weights_of(model: Any) -> dict[str, Tensor]:
    """The weights of a transformers model with the names that a trainer sends. A server refuses a version whose names
    differ from the previous version's, so all tests that share a server send the same names.
    """
    parameters = model.named_parameters()
    return {k: v for name, weight in parameters for k, v in checkpoint_tensors(model, name, weight.detach())}


async def publish(client: RemoteInferenceClient, transport: WeightTransport, tensors: Any, version: int) -> Manifest:
    """Publishes the tensors as a trainer with one rank does, and returns the engine's manifest."""
    rendezvous = transport.open(num_ranks=1, num_engines=client.num_weight_receivers())
    sender = transport.sender(rendezvous, 0, 1)
    try:
        await client.pause("keep")
        _, arrived = await asyncio.gather(
            asyncio.to_thread(sender.send, pack_buckets(tensors.items(), 1 << 16), version),
            client.update_weights(rendezvous, version),
        )
        await client.resume()
    finally:
        transport.close(rendezvous)
    return arrived


async def paused_under_way(
    client: RemoteInferenceClient, ask: Callable[[int], Awaitable[T]], *, num_running: int = 1
) -> asyncio.Future[T]:
    """Pauses the servers while they answer what `ask` sends, at a time at which at least `num_running` samples have
    tokens and need more. Returns the future of `ask`'s result; the caller resumes the servers.

    On a busy machine, a server may finish before it is paused. Then `ask` is called again, with the number of the try.
    """
    for number in itertools.count():
        asked = asyncio.ensure_future(ask(number))
        while not asked.done() and (await client.health()).num_running < num_running:
            await asyncio.sleep(0.01)
        await client.pause("keep")
        if (await client.health()).num_running >= num_running:
            return asked
        await client.resume()
        await asked
    raise AssertionError


def command_line(process: psutil.Process) -> str:
    """The process's command line; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def request(sample_id: str, prompt: Sequence[int] = (1, 2, 3), *, seed: int = 0, **params: Any) -> GenerateRequest:
    """A request with an id that no other test process uses. `params` are fields of SamplingParams."""
    return GenerateRequest(
        sample_id=f"{sample_id}-{os.getpid()}", prompt_tokens=tuple(prompt), params=SamplingParams(**params), seed=seed
    )
