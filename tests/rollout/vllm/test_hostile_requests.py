"""Router and servers answer whatever is sent to them, keep serving, and drop the requests of clients that left."""

from __future__ import annotations

import asyncio
import socket
import time
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import open_session
from rl_rollout.vllm.routes import STATUS_NOT_COMPUTED, CheckBody
from tests.rollout.vllm.hostile import HostileRequest, hostile_request, sent
from tests.rollout.vllm.servers import TOKENS, RunningServer, request

pytestmark = pytest.mark.slow
NUM_TARGETS = 2
AT_ONCE = 5


async def require_serving(client: RemoteInferenceClient, name: str) -> None:
    """The server answers a request, and drops within two minutes all requests that nobody waits for."""
    (completion,) = await client.generate(request(name, max_tokens=3, ignore_eos=True))
    assert len(completion.tokens) == 3
    deadline = time.monotonic() + 120.0
    while (health := await client.health()).num_running + health.num_waiting:
        assert time.monotonic() < deadline, f"{health} two minutes after all clients had left"
        await asyncio.sleep(0.1)


async def send_all(client: RemoteInferenceClient, server: RunningServer, seeds: range) -> None:
    """Sends the requests of these seeds, AT_ONCE at a time: even seeds to the router, odd ones to the server."""

    async def send(seed: int) -> None:
        to_router = seed % NUM_TARGETS == 0
        hostile = hostile_request(seed, to_router=to_router)
        url = urlsplit(client.router_url if to_router else server.url)
        assert url.hostname is not None
        assert url.port is not None
        try:
            answer = await sent(hostile, url.hostname, url.port)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise AssertionError(f"seed {seed}, {hostile}: {type(error).__name__}: {error}") from error
        assert answer is None or answer[0] < 500 or answer[0] == 501, f"seed {seed}, {hostile}: {answer}"

    for first in seeds[::AT_ONCE]:
        await asyncio.gather(*map(send, range(first, min(first + AT_ONCE, seeds.stop))))
        await require_serving(client, f"after-{first}")


async def test_thirty_hostile_requests_leave_router_and_server_serving(
    client: RemoteInferenceClient, dense_server: RunningServer
):
    await send_all(client, dense_server, range(30))


MESSAGES = [{"role": "user", "content": "1+1="}]
JSON_OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "1", "response_format": JSON_OBJECT}),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": JSON_OBJECT}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES], "response_format": JSON_OBJECT}),
        ("/v1/responses", {"input": "1", "store": False, "text": {"format": JSON_OBJECT}}),
    ],
)
async def test_json_output_of_a_model_without_brace_tokens_is_refused(
    dense_server: RunningServer, path: str, fields: object
):
    assert isinstance(fields, dict)
    asked = {"model": "policy", **fields}
    async with open_session(TOKENS.access) as session, session.post(dense_server.url + path, json=asked) as answer:
        assert (answer.status, "could not compute" in await answer.text()) == (STATUS_NOT_COMPUTED, True)


@pytest.mark.parametrize("kind", ["Application/JSON", "application/json\r\nContent-Type: text/plain"])
async def test_a_body_is_checked_if_any_of_its_content_types_is_json(
    client: RemoteInferenceClient, dense_server: RunningServer, kind: str
):
    """vLLM itself would never finish a request with such a large seed."""
    body = b'{"model": "policy", "prompt": "1", "seed": ' + b"9" * 400 + b"}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {TOKENS.access}\r\nConnection: close\r\n\r\n"
    url = urlsplit(dense_server.url)
    assert url.hostname is not None
    assert url.port is not None
    answer = await sent(HostileRequest(kind="number", head=head.encode(), body=body), url.hostname, url.port)
    assert answer is not None
    assert (answer[0], b"does not fit into 64 bits" in answer[1]) == (400, True)
    await require_serving(client, "after-a-number")


async def test_a_websocket_is_refused(dense_server: RunningServer):
    async with open_session(TOKENS.control) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await session.ws_connect(f"{dense_server.url}/v1/realtime")
        assert refusal.value.status == 403


async def test_a_body_that_arrives_too_late_is_refused():
    """The server also closes the connection; otherwise `reader.read` would run into its deadline."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the routes saw half a request")

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(CheckBody(app, timeout_s=0.3), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    try:
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 0.3 s" in answer
    finally:
        writer.close()
        server.should_exit = True
        await serving


@pytest.mark.soak
@pytest.mark.parametrize("first", range(30, 230, 50))
async def test_hostile_requests_leave_router_and_server_serving(
    client: RemoteInferenceClient, dense_server: RunningServer, first: int
):
    await send_all(client, dense_server, range(first, first + 50))
