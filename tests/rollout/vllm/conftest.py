"""Servers that tests share for the whole test run, because a server takes about a minute to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import pytest
import pytest_asyncio
import ray

from rl_core.interfaces import EngineSpec
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.launch import client_settings, supervised_client
from rl_rollout.vllm.supervisor import ExternalServer
from tests.local_ray import start_ray
from tests.rollout.vllm.servers import (
    CHAT_TEMPLATE,
    TOKENS,
    RunningServer,
    make_spec,
    start_servers,
    stop_servers,
    write_model,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the tests here more time, because the first test with shared servers waits until all servers have started,
    which takes minutes on a busy machine. Servers have a deadline of their own for their start."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def ray_for_servers() -> Iterator[None]:
    """Starts Ray, unless the tests of tests/ray have started it already."""
    if ray.is_initialized():
        yield
        return
    start_ray()
    yield
    ray.shutdown()


def _dense(directory: Path) -> EngineSpec:
    transport = "tests.rollout.vllm.other_transport:other"
    spec = make_spec(write_model(directory / "model"), directory, weight_sync_backend=transport)
    return attrs.evolve(spec, return_kept_tokens=True)


def _moe(directory: Path) -> EngineSpec:
    template = CHAT_TEMPLATE.replace("eos_token", "pad_token")
    model = write_model(directory / "model", num_experts=8, chat_template=template)
    return make_spec(model, directory, enable_return_routed_experts=True)


def _adapter(directory: Path) -> EngineSpec:
    lora = {"rank": 4, "merge_lora": False, "max_loras": 2}
    return make_spec(write_model(directory / "model"), directory, lora=lora)


_SPECS = {"dense_server": _dense, "moe_server": _moe, "adapter_server": _adapter}
"""Fixture name → the function that makes its engine's spec."""


@pytest.fixture(scope="session")
def shared_servers(
    request: pytest.FixtureRequest, ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningServer]]:
    """Starts all shared servers that the selected tests need, at the same time, because one alone would leave a core
    idle.
    """
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    names = [name for name in _SPECS if name in asked]
    running = start_servers(*(_SPECS[name](tmp_path_factory.mktemp(name)) for name in names))
    yield dict(zip(names, running, strict=True))
    stop_servers(running)


@pytest.fixture(scope="session")
def dense_server(shared_servers: dict[str, RunningServer]) -> RunningServer:
    """Serves a tiny Qwen3 in float32. It was started with a weight transport that has no entry point. Tests publish
    other weights, so a test that needs certain weights publishes them first.
    """
    return shared_servers["dense_server"]


@pytest.fixture(scope="session")
def moe_server(shared_servers: dict[str, RunningServer]) -> RunningServer:
    """Serves a tiny Qwen3-MoE (8 experts, 2 per token) in float32 and returns routed experts. Its chat template ends
    turns with another token than the model's, as for a base model."""
    return shared_servers["moe_server"]


@pytest.fixture(scope="session")
def adapter_server(shared_servers: dict[str, RunningServer]) -> RunningServer:
    """Serves adapters, at most two in one batch, over the frozen weights of a tiny Qwen3 in float32."""
    return shared_servers["adapter_server"]


@pytest_asyncio.fixture
async def client(dense_server: RunningServer) -> AsyncIterator[RemoteInferenceClient]:
    """A client of `dense_server`, with a router on a free port."""
    spec = make_spec(dense_server.spec.run_dir, dense_server.spec.run_dir, router_port=0)
    servers = [ExternalServer(dense_server.url, TOKENS.control, 60.0)]
    client = await supervised_client(servers, client_settings(spec, TOKENS))
    yield client
    await client.close()
