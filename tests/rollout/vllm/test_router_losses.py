"""What happens to an agent's request if the agent leaves, a server is lost, the deadline passes, or the request is
not acceptable."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
import attrs
import pytest
import pytest_asyncio
from aiohttp import web

from rl_core.errors import DeadlineError, GenerationError
from rl_core.interfaces import Completion, GenerateRequest, SamplingParams
from rl_rollout.vllm import wire
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import Connection, LostUnderRequest, ServerGone, gone, open_session
from rl_rollout.vllm.pool import MAX_LOST, Member, Pool
from rl_rollout.vllm.router import MAX_SESSION_ID, SESSION_HEADER, Router
from rl_rollout.vllm.wire import MAX_BODY_BYTES
from tests.passing_time import pass_time, until

NUM_SERVERS = 4
TOKEN = "what agents are told"
EVENT = b'data: {"n": 1}\n\n'
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
DEADLINE_S = 3600.0
"""A deadline that is reached only by `pass_time`."""


@attrs.define
class ScriptedServer:
    """Answers each request with the next of its scripts; repeats the last one."""

    scripts: list[Callable[[web.Request], Awaitable[web.StreamResponse]]]
    num_asked: int = 0
    left: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set when the client of a request left before it was answered."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        await request.read()
        try:
            return await self.scripts[min(self.num_asked, len(self.scripts)) - 1](request)
        except asyncio.CancelledError:
            self.left.set()
            raise


@attrs.frozen
class Scene:
    """A router, and one HTTP server that answers for all servers behind the router."""

    server: ScriptedServer
    pool: Pool
    url: str
    suspected: list[int]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Scene]]]:
    """Starts a router and one HTTP server that answers for all servers of the pool."""
    ends: list[Callable[[], Awaitable[None]]] = []

    async def make(*scripts: Callable[[web.Request], Awaitable[web.StreamResponse]], timeout_s: float = 120.0) -> Scene:
        server = ScriptedServer(list(scripts))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = open_session("the control token")
        pool, suspected = Pool(NUM_SERVERS), []
        for member in pool.members:
            connection = Connection(session, f"http://127.0.0.1:{runner.addresses[0][1]}", str(member))
            await pool.joined(member, connection, 0, is_quarantined=False)
        pool.version = 0
        router = Router(
            pool, token=TOKEN, timeout_s=timeout_s, on_failure=lambda member: suspected.append(member.index)
        )
        url = await router.start("127.0.0.1", 0)
        ends.extend([router.close, session.close, runner.cleanup])
        return Scene(server, pool, url, suspected)

    yield make
    for end in ends:
        await end()


async def answers(request: web.Request) -> web.StreamResponse:
    return web.json_response({"answered": True})


async def never_answers(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def restarted(pool: Pool, member: Member) -> None:
    """Gives up a server and lets it join again, as a supervisor does."""
    connection = member.connection
    assert connection is not None
    await pool.left(member, "it was lost")
    await pool.joined(member, connection, 0, is_quarantined=False)


async def breaks_off_half_way(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"half":')
    return await breaks_off(request)


async def lacks_weights(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {}}, status=503)


def streams(num_events: int, then: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(num_events):
            await response.write(EVENT)
        await response.write(b'data: {"ha')
        await asyncio.sleep(0.05)
        return await then(request)

    return stream


async def posted(scene: Scene, body: object = None) -> tuple[int, bytes]:
    async with (
        open_session(TOKEN) as session,
        session.post(f"{scene.url}/chat/completions", json=body or {"user": "me"}, timeout=NO_TIMEOUT) as answer,
    ):
        return answer.status, await answer.read()


@pytest.mark.parametrize("script", [never_answers, streams(2, never_answers)], ids=["whole", "stream"])
async def test_a_request_whose_agent_disconnects_is_cancelled_and_not_retried(start, script):
    scene = await start(script)
    asking = asyncio.ensure_future(posted(scene))
    while not scene.server.num_asked:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait_for(scene.server.left.wait(), 60)
    await until(lambda: all(member.load == 0 for member in scene.pool.members))
    await asyncio.sleep(0.5)
    assert scene.server.num_asked == 1
    assert scene.suspected == []
    assert all(member.load == 0 for member in scene.pool.members)


@pytest.mark.parametrize("loss", [breaks_off, breaks_off_half_way, streams(0, breaks_off), lacks_weights])
async def test_a_request_is_retried_unnoticed_if_its_server_fails_before_the_agent_received_anything(start, loss):
    scene = await start(loss, answers)
    assert await posted(scene) == (200, b'{"answered": true}')
    assert scene.server.num_asked == 2
    assert len(scene.suspected) == 1


async def test_a_broken_stream_ends_with_an_error_and_without_a_partial_event(start):
    scene = await start(streams(2, breaks_off))
    status, body = await posted(scene)
    assert status == 200
    *events, error, end = body.split(b"\n\n")
    assert events == [EVENT.strip()] * 2
    record = json.loads(error.removeprefix(b"data: "))["error"]
    assert (record["code"], "the server was lost" in record["message"]) == (502, True)
    assert end == b""
    assert scene.server.num_asked == 1


async def test_a_request_that_loses_too_many_servers_is_not_retried(start):
    async def loses_its_server(request: web.Request) -> web.StreamResponse:
        await restarted(scene.pool, scene.pool.members[0])
        return await breaks_off(request)

    scene = await start(loses_its_server)
    status, body = await posted(scene)
    assert status == 502
    assert f"{MAX_LOST} servers were lost" in json.loads(body)["error"]["message"]
    assert scene.server.num_asked == MAX_LOST


@pytest.mark.parametrize(
    ("error", "kind"),
    [(aiohttp.ConnectionTimeoutError(), ServerGone), (aiohttp.ServerDisconnectedError(), LostUnderRequest)],
)
def test_only_a_request_that_was_sent_can_be_the_reason_for_a_loss(error: aiohttp.ClientError, kind: type):
    assert type(gone(error, "vLLM server 0")) is kind


async def test_retries_of_the_runs_own_request_are_limited_too(start):
    """The server answers 502, as it does when its engine ends and gives up its requests. Then it is restarted."""

    async def engine_ends(request: web.Request) -> web.StreamResponse:
        await restarted(scene.pool, scene.pool.members[0])
        return web.Response(status=502, body=wire.encode({"message": "the engine gave up its requests"}))

    scene = await start(engine_ends)
    client = RemoteInferenceClient(scene.pool, timeout_s=120.0)
    with pytest.raises(GenerationError, match=f"{MAX_LOST} servers were lost while they processed it"):
        await client.generate(GenerateRequest(sample_id="s", prompt_tokens=(1,), params=SamplingParams(), seed=0))
    assert scene.server.num_asked == MAX_LOST


async def bad_gateway(request: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<h1>502 Bad Gateway</h1>", content_type="text/html")


async def test_repeated_502_answers_of_a_proxy_count_as_one_lost_server_and_lose_no_request(start):
    scene = await start(*[bad_gateway] * (MAX_LOST + 1), answers)
    assert (await posted(scene))[0] == 200

    completion = Completion(tokens=(2,), logprobs=(-1.0,), policy_versions=(0,), stop_reason="stop")

    async def generates(request: web.Request) -> web.StreamResponse:
        return web.Response(body=wire.completions_body([completion]), content_type=wire.MEDIA_TYPE)

    scene = await start(*[bad_gateway] * (MAX_LOST + 1), generates)
    client = RemoteInferenceClient(scene.pool, timeout_s=120.0)
    request = GenerateRequest(sample_id="s", prompt_tokens=(1,), params=SamplingParams(), seed=0)
    assert await client.generate(request) == (completion,)


async def test_an_answer_of_a_proxy_is_quoted_with_its_address_and_status(start):
    scene = await start(bad_gateway)
    connection = scene.pool.members[0].connection
    assert connection is not None
    expected = (
        rf"^vLLM server 0 at {connection.url} answered /rl/health with HTTP status 502: <h1>502 Bad Gateway</h1>$"
    )
    with pytest.raises(LostUnderRequest, match=expected):
        await connection.call("health", timeout_s=60)


async def test_a_server_is_told_to_end_a_request_that_missed_its_deadline(start):
    """A server computes a request to its end even if the client's connection is gone."""
    told: asyncio.Queue[list[str]] = asyncio.Queue()

    async def hangs_until_told(request: web.Request) -> web.StreamResponse:
        if request.path == "/rl/generate":
            return await never_answers(request)
        assert request.path == "/rl/cancel"
        told.put_nowait(wire.decode(await request.read())["sample_ids"])
        return web.Response(body=wire.encode(None), content_type=wire.MEDIA_TYPE)

    scene = await start(hangs_until_told)
    client = RemoteInferenceClient(scene.pool, timeout_s=0.2)
    with pytest.raises(DeadlineError, match="waited"):
        await client.generate(GenerateRequest(sample_id="s", prompt_tokens=(1,), params=SamplingParams(), seed=0))
    assert await asyncio.wait_for(told.get(), 60) == ["s"]


async def test_no_request_outlives_its_deadline(start, monkeypatch):
    scene = await start(never_answers, timeout_s=DEADLINE_S)
    asking = asyncio.ensure_future(posted(scene))
    await until(lambda: scene.server.num_asked == 1)
    pass_time(monkeypatch, DEADLINE_S)
    status, body = await asyncio.wait_for(asking, 60)
    assert (status, "no answer within 3600 s" in body.decode()) == (504, True)
    await asyncio.wait_for(scene.server.left.wait(), 60)


async def test_a_stream_that_outlives_its_deadline_ends_with_an_error(start, monkeypatch):
    scene = await start(streams(1, never_answers), timeout_s=DEADLINE_S)
    async with (
        open_session(TOKEN) as session,
        session.post(f"{scene.url}/chat/completions", json={"user": "me"}, timeout=NO_TIMEOUT) as answer,
    ):
        body = await asyncio.wait_for(answer.content.readexactly(len(EVENT)), 60)
        pass_time(monkeypatch, DEADLINE_S)
        body += await asyncio.wait_for(answer.read(), 60)
    event, error, _ = body.split(b"\n\n")
    record = json.loads(error.removeprefix(b"data: "))["error"]
    assert event == EVENT.strip()
    assert (record["code"], "the request's deadline has passed" in record["message"]) == (504, True)
    await asyncio.wait_for(scene.server.left.wait(), 60)


@pytest.mark.parametrize("script", ["a stream", "one answer"])
async def test_an_agent_that_stops_reading_is_disconnected_at_its_deadline(start, script, monkeypatch, caplog):
    """The operating system buffers part of the answer, then accepts no more."""

    num_bytes = 20_000_000  # more than the operating system buffers for a client that does not read
    num_written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b" " * num_bytes)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        nonlocal num_written
        while True:
            await response.write(b"data: " + b"x" * 100_000 + b"\n\n")
            num_written += 1

    async def no_more_is_accepted() -> None:
        seen = -1
        while num_written > seen:
            seen = num_written
            for _ in range(20):  # local sockets accept all that they can within a turn of the loop
                await asyncio.sleep(0.005)

    scene = await start(answer if script == "one answer" else stream, timeout_s=DEADLINE_S)
    url = urlsplit(scene.url)
    assert url.hostname is not None
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1000)
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: router\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    try:
        taken = await asyncio.wait_for(reader.readline(), 60)
        await no_more_is_accepted()
        pass_time(monkeypatch, DEADLINE_S)
        if script == "one answer":  # the server is done with it, but the router still sends
            await until(lambda: "an agent did not read its answer within 3600 s" in caplog.text)
        await until(lambda: all(member.load == 0 for member in scene.pool.members))
        taken += await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
    assert taken.startswith(b"HTTP/1.1 200 ")
    assert len(taken) < num_bytes


async def test_a_body_that_is_too_large_is_refused_and_reaches_no_server(start):
    scene = await start(answers)
    body = io.BytesIO(b"x" * (MAX_BODY_BYTES + 1))
    async with open_session(TOKEN) as session, session.post(f"{scene.url}/completions", data=body) as answer:
        assert (answer.status, "is larger than" in await answer.text()) == (413, True)
    assert scene.server.num_asked == 0


async def test_a_token_that_is_not_text_is_refused(start, caplog):
    scene = await start(answers)
    url = urlsplit(scene.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: router\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert "Traceback" not in caplog.text


async def test_a_session_id_that_is_too_long_is_refused(start):
    scene = await start(answers)
    assert (await posted(scene, {"user": "x" * MAX_SESSION_ID}))[0] == 200
    assert (await posted(scene, {"user": "x" * (MAX_SESSION_ID + 1)}))[0] == 400
    headers = {SESSION_HEADER: "x" * (MAX_SESSION_ID + 1)}
    async with open_session(TOKEN) as session, session.get(f"{scene.url}/models", headers=headers) as answer:
        assert answer.status == 400
    assert scene.server.num_asked == 1


async def test_a_request_moves_when_its_server_is_given_up(start):
    """The request must not wait for the connection to break: a hung server keeps it open."""
    scene = await start(never_answers, answers)
    asking = asyncio.ensure_future(posted(scene))
    while not scene.server.num_asked:
        await asyncio.sleep(0.01)
    (busy,) = (member for member in scene.pool.members if member.load)
    await scene.pool.left(busy, "hung")
    assert (await asyncio.wait_for(asking, 60))[0] == 200


@pytest.mark.parametrize("name", [["a"], {"a": 1}, 7])
async def test_a_user_that_is_not_a_string_is_refused(start, name):
    scene = await start(answers)
    status, body = await posted(scene, {"user": name})
    assert (status, "user" in body.decode()) == (400, True)
    assert scene.server.num_asked == 0
