"""The router forwards only paths of the OpenAI API, even if a request disguises its path, and tells agents nothing
about the machine of a lost server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import pytest
import pytest_asyncio
from aiohttp import web
from ray.util import get_node_ip_address

from rl_rollout.vllm.connection import Connection, open_session
from rl_rollout.vllm.pool import Member, Pool
from rl_rollout.vllm.router import Router

TOKEN = "what agents are told"
PASSED_ON = {
    "/v1/models": "/v1/models",
    "/v1/chat/completions?a=1&b=%2e%2e%26": "/v1/chat/completions?a=1&b=..%26",
    "/v1/models/my%20adapter": "/v1/models/my%20adapter",
    "/v1/models/..adapter..": "/v1/models/..adapter..",
    "/v1/models/100%25": "/v1/models/100%25",
    "/v1/m%6fdels": "/v1/models",
}
REFUSED = [
    "/v1/../rl/pause",
    "/v1/x/../../rl/pause",
    "/v1/..",
    "/v1/./models",
    "/v1/%2e%2e/rl/pause",
    "/v1/%2E./rl/pause",
    "/v1/..%2frl%2fpause",
    "/v1/%2e%2e%2frl%2fpause",
    "/v1/%252e%252e/rl/pause",
    "/v1/%25252e%25252e%25252frl/pause",
    "/v1/..\\rl\\pause",
    "/v1/%2e%2e%5crl%5cpause",
    "/v1/%255c..%255crl",
    "/v1//rl/pause",
    "/v1/%2frl/pause",
    "/v1/models%00",
    "/v1/;/../rl/pause",
]
ELSEWHERE = [
    "/rl/pause",
    "/%72l/pause",
    "/",
    "/v1",
    "/v2/models",
    "//v1/models",
    "/../v1/models",
    "/x/../v1/models",
    "/v1/models%0d%0aX:1",
]


@attrs.define
class RecordingServer:
    """Answers every request, and records its path as received and its token."""

    url: str
    asked: list[str] = attrs.field(factory=list)
    tokens: list[str | None] = attrs.field(factory=list)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request.raw_path)
        self.tokens.append(request.headers.get("Authorization"))
        return web.Response(text="answered")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RecordingServer]:
    recording = RecordingServer(url="")
    runner = web.ServerRunner(web.Server(recording.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recording.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield recording
    await runner.cleanup()


@pytest_asyncio.fixture
async def pool(server: RecordingServer) -> AsyncIterator[Pool]:
    """A pool of one server that serves version 0 and is called with the control token."""
    pool = Pool(1)
    async with open_session("the control token") as session:
        await pool.joined(pool.members[0], Connection(session, server.url, "server"), 0, is_quarantined=False)
        pool.version = 0
        yield pool


@pytest_asyncio.fixture
async def router(pool: Pool) -> AsyncIterator[tuple[str, int]]:
    """The router's host and port."""
    async with listening(pool, timeout_s=60.0) as address:
        yield address


@asynccontextmanager
async def listening(pool: Pool, *, timeout_s: float) -> AsyncIterator[tuple[str, int]]:
    """The host and port of a router whose requests have this deadline."""
    router = Router(pool, token=TOKEN, timeout_s=timeout_s, on_failure=lambda member: None)
    host, _, port = (await router.start("127.0.0.1", 0)).removeprefix("http://").removesuffix("/v1").partition(":")
    yield host, int(port)
    await router.close()


async def ask(address: tuple[str, int], target: str, headers: str = "", *, token: str = TOKEN) -> tuple[int, str]:
    """Requests exactly this target, which an HTTP client library would normalize."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        head = f"GET {target} HTTP/1.1\r\nHost: router\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n"
        writer.write(f"{head}{headers}\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("target", PASSED_ON)
async def test_paths_of_the_api_are_forwarded(server: RecordingServer, router: tuple[str, int], target: str):
    status, body = await ask(router, target)
    assert status == 200
    assert "answered" in body
    assert server.asked == [PASSED_ON[target]]
    assert server.tokens == [f"Bearer {TOKEN}"], "an agent's request must not carry the run's own token"


@pytest.mark.parametrize("target", REFUSED)
async def test_non_canonical_paths_are_refused(server: RecordingServer, router: tuple[str, int], target: str):
    status, _ = await ask(router, target)
    assert status == 400
    assert server.asked == []


@pytest.mark.parametrize("target", ELSEWHERE)
async def test_paths_outside_the_api_are_not_found(server: RecordingServer, router: tuple[str, int], target: str):
    status, _ = await ask(router, target)
    assert status == 404
    assert server.asked == []


async def test_the_url_of_a_router_on_all_interfaces_is_the_address_of_its_machine(pool: Pool):
    router = Router(pool, token=TOKEN, timeout_s=60.0, on_failure=lambda member: None)
    url = await router.start("0.0.0.0", 0)
    await router.close()
    assert urlsplit(url).hostname == get_node_ip_address()


async def test_an_agent_without_the_token_is_refused(server: RecordingServer, router: tuple[str, int]):
    assert (await ask(router, "/v1/models", token="another"))[0] == 401
    assert server.asked == []


async def test_an_absolute_target_reaches_no_other_host(server: RecordingServer, router: tuple[str, int]):
    status, _ = await ask(router, "http://127.0.0.1:1/v1/models")
    assert status == 200
    assert server.asked == ["/v1/models"]


async def test_errors_about_a_lost_server_reveal_no_path_or_address(pool: Pool, server: RecordingServer):
    member: Member = pool.members[0]
    await pool.left(member, f"did not start; its last log lines (/data/runs/log):\nread /etc/secret at {server.url}")
    async with listening(pool, timeout_s=0.2) as router:
        status, body = await ask(router, "/v1/models")
    assert status == 503
    message = json.loads(body)["error"]["message"]
    assert "no server" in message
    assert not any(part in message for part in ("/data", "/etc", server.url))
