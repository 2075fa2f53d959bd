"""Whatever is sent to router and servers, they answer, go on serving, and keep nothing of those who left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.launch import client_settings, supervised_client
from rl_rollout.vllm.supervisor import ExternalServer
from tests.rollout.vllm.hostile import hostile_request, sent
from tests.rollout.vllm.servers import TOKENS, RunningServer, make_spec, request

pytestmark = pytest.mark.slow
NUM_TARGETS = 2


@pytest_asyncio.fixture
async def client(dense_server: RunningServer) -> AsyncIterator[RemoteInferenceClient]:
    """With a router at a free port."""
    spec = make_spec(dense_server.spec.run_dir, dense_server.spec.run_dir, router_port=0)
    servers = [ExternalServer(dense_server.url, TOKENS.control, 60.0)]
    client = await supervised_client(servers, client_settings(spec, TOKENS))
    yield client
    await client.close()


async def require_serving(client: RemoteInferenceClient, name: str) -> None:
    """And nothing is under way that nobody waits for."""
    (completion,) = await client.generate(request(name, max_tokens=3, ignore_eos=True))
    assert len(completion.tokens) == 3
    deadline = time.monotonic() + 60.0
    while (health := await client.health()).num_running + health.num_waiting:
        assert time.monotonic() < deadline, f"{health} long after all who asked had left"
        await asyncio.sleep(0.1)


async def send_all(client: RemoteInferenceClient, server: RunningServer, seeds: range) -> None:
    assert client.router_url is not None
    for seed in seeds:
        to_router = seed % NUM_TARGETS == 0
        hostile = hostile_request(seed, to_router=to_router)
        url = urlsplit(client.router_url if to_router else server.url)
        assert url.hostname is not None
        assert url.port is not None
        try:
            status = await sent(hostile, url.hostname, url.port)
        except (TimeoutError, ConnectionError) as error:
            raise AssertionError(f"seed {seed}, {hostile}: {type(error).__name__}: {error}") from error
        assert status is None or status < 500 or status == 501, f"seed {seed}, {hostile}: status {status}"
        if seed % 10 == 9:
            await require_serving(client, f"after-{seed}")


async def test_thirty_hostile_requests_leave_router_and_server_serving(
    client: RemoteInferenceClient, dense_server: RunningServer
):
    await send_all(client, dense_server, range(30))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(30, 230, 50))
async def test_hostile_requests_leave_router_and_server_serving(
    client: RemoteInferenceClient, dense_server: RunningServer, first: int
):
    await send_all(client, dense_server, range(first, first + 50))
