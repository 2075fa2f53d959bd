"""The pool of servers: which server gets a request, and which servers wait, sleep or are started again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rl_core.errors import ConfigError, DeadlineError, GenerationError
from rl_core.tasks import IdleTime
from rl_rollout.vllm import supervisor as supervisor_module
from rl_rollout.vllm import wire
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import Connection, ServerGone, open_session
from rl_rollout.vllm.launch import ClientSettings, supervised_client
from rl_rollout.vllm.pool import Member, Pool, Wanted, while_up
from rl_rollout.vllm.server import ServerAddress
from rl_rollout.vllm.supervisor import ExternalServer, Heartbeat, Startable, Supervisor
from rl_rollout.vllm.tokens import Tokens


async def _pool(*versions: int) -> tuple[Pool, list[Member]]:
    pool = Pool(len(versions))
    for member, version in zip(pool.members, versions, strict=True):
        await pool.joined(member, object(), version, is_quarantined=False)  # pyright: ignore
    pool.version = 0
    return pool, pool.members


async def test_a_session_stays_on_its_server_and_others_go_to_the_least_loaded():
    pool, (first, second) = await _pool(0, 0)
    with pool.carries(first, 3):
        assert await pool.choose("episode", timeout_s=60) is second
    with pool.carries(second, 3):
        assert await pool.choose("episode", timeout_s=60) is second
        assert await pool.choose("other", timeout_s=60) is first
        assert await pool.choose(None, timeout_s=60) is first
    await pool.left(second, "killed")
    assert await pool.choose("episode", timeout_s=60) is first


async def test_the_idle_time_of_each_server_is_the_time_without_samples():
    """Worked by hand. The first server has samples under way from second 2 to second 7, for part of that time from two
    calls. The second server has a call too, but without samples.
    """
    now, pool = 0.0, Pool(2)
    for member in pool.members:
        member.idle = IdleTime(lambda: now)
    client = RemoteInferenceClient(pool, timeout_s=60)
    first, second = pool.members
    now = 2.0
    with pool.carries(first, 4), pool.carries(second, 0):
        now = 3.0
        assert client.idle_lap() == {"0": 2.0, "1": 3.0}
        with pool.carries(first, 1):
            now = 5.0
        now = 7.0
    now = 11.0
    assert client.idle_lap() == {"0": 4.0, "1": 8.0}
    assert client.idle_lap() == {"0": 0.0, "1": 0.0}


async def test_a_server_with_old_weights_serves_nothing_until_updated():
    pool, (old, _) = await _pool(-1, 0)
    assert [member.index for member in pool.serving] == [1]
    assert pool.lacks_weights
    async with pool.updating():
        assert not pool.lacks_weights
        await pool.changed_version(1, [old])
    assert pool.serving == [old]
    assert pool.lacks_weights


async def test_waiting_for_a_server_names_the_state_of_each():
    pool, (first, second) = await _pool(0, -1)
    await pool.left(first, "killed by a test")
    second.is_quarantined = True
    with pytest.raises(DeadlineError, match=r"server 0 is down \(killed by a test\); vLLM server 1 is quarantined"):
        await pool.choose(None, timeout_s=0.01)
    waiting = asyncio.ensure_future(pool.choose(None, timeout_s=60))
    await asyncio.sleep(0)
    await pool.changed_version(4, [second])
    assert await waiting is second


async def test_a_hung_server_is_restarted_even_if_it_answers():
    pool, server = Pool(1), StartedAgain()
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=60.0), control_token="token")
    await supervisor.start()
    (member,) = pool.members
    first, member.hung = member.connection, "it is hung, says a test"
    supervisor.suspect(member)
    async with asyncio.timeout(60):
        await member.lost.wait()
        assert member.why_down == "it is hung, says a test"
    await pool.wait_for(lambda: bool(pool.up), "the server", timeout_s=60)
    assert member.connection is not first
    assert member.hung is None
    await supervisor.close()


async def _restarted(supervisor: Supervisor, pool: Pool) -> None:
    """Gives up the pool's only server, and waits until it is up again."""
    (member,) = pool.members
    lost, member.hung = member.lost, "it is hung, says a test"
    supervisor.suspect(member)
    async with asyncio.timeout(60):
        await lost.wait()
    await pool.wait_for(lambda: bool(pool.up), "the server", timeout_s=60)


async def test_a_server_comes_back_if_it_restarted_while_an_update_began_and_ended():
    """A report is ignored if an update begins or ends meanwhile, so the server must be asked again."""
    pool, server = Pool(1), StartedAgain()
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=60.0), control_token="token")
    await supervisor.start()

    def begins_or_ends() -> None:
        pool.num_updates += 1

    server.during_heartbeats = [begins_or_ends, begins_or_ends]
    await _restarted(supervisor, pool)
    assert server.during_heartbeats == [], "the server must be asked again after the beginning and after the end"
    await supervisor.close()


async def test_a_server_comes_back_after_an_unexpected_error_in_its_heartbeats_and_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(supervisor_module, "_RESTART_PAUSE_S", 0.01)
    pool, server = Pool(1), StartedAgain()
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=60.0), control_token="token")
    await supervisor.start()
    health, server.health = server.health, {}
    supervisor.suspect(pool.members[0])
    async with asyncio.timeout(60):
        while "vLLM server 0 could not be restarted: KeyError: 'vocab_size'" not in caplog.messages:
            await asyncio.sleep(0.01)
    assert caplog.messages[0] == "vLLM server 0 has failed; it is restarted: KeyError: 'vocab_size'"
    server.health = health
    await pool.wait_for(lambda: bool(pool.up), "the server", timeout_s=60)
    await supervisor.close()


class StartedAgain:
    """A server that answers every route and records its requests except heartbeats."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.health = {"boot_id": "first", "quarantine": None, "version": -1, "vocab_size": 8, "num_workers": 1}
        self.during_heartbeats: list[Callable[[], None]] = []
        """Functions that are called during the next heartbeats, one for each."""
        self._runners: list[web.AppRunner] = []

    async def start(self) -> ServerAddress:
        self.requests.clear()
        app = web.Application()
        app.router.add_post("/rl/{name}", self._answer)
        runner = web.AppRunner(app)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return ServerAddress(url=f"http://127.0.0.1:{runner.addresses[0][1]}", pid=0)

    async def _answer(self, request: web.Request) -> web.Response:
        name, arguments = request.match_info["name"], wire.decode(await request.read())
        if name != "health":
            self.requests.append((name, arguments))
        elif self.during_heartbeats:
            self.during_heartbeats.pop(0)()
        answer = wire.encode(self.health if name == "health" else {})
        return web.Response(body=answer, content_type=wire.MEDIA_TYPE)

    def kill(self) -> None: ...

    @property
    def is_stopped(self) -> bool:
        return not self._runners

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()


async def test_a_server_that_restarts_between_two_heartbeats_gets_its_adapters_again(caplog: pytest.LogCaptureFixture):
    pool, server = Pool(1), StartedAgain()
    pool.wanted = Wanted(adapters={"judge": "/adapters/judge"})
    server.health["pid"] = 1
    external = ExternalServer((await server.start()).url, "token", timeout_s=20.0)
    supervisor = Supervisor(pool, [external], Heartbeat(interval_s=100.0, hung_after_s=10.0), control_token="token")
    await supervisor.start()
    (member,) = pool.members
    server.requests.clear()
    server.health["boot_id"] = "second"
    supervisor.suspect(member)
    async with asyncio.timeout(20):
        await member.lost.wait()
    await pool.wait_for(lambda: bool(pool.up), "the server", timeout_s=20)
    assert ("load_adapter", {"name": "judge", "path": "/adapters/judge"}) in server.requests
    assert "it was restarted since the last heartbeat" in caplog.text
    await supervisor.close()
    await server.stop()


class LoginPage(StartedAgain):
    """A proxy that answers every request with its own page."""

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(text="<h1>Please log in</h1>", content_type="text/html")


async def test_an_answer_of_another_program_names_the_server_and_quotes_the_answer():
    proxy = LoginPage()
    url = (await proxy.start()).url
    async with open_session("token") as session:
        expected = rf"vLLM server 0 at {url} answered /rl/health with text/html; .* It sent: <h1>Please log in"
        with pytest.raises(GenerationError, match=expected):
            await Connection(session, url, "vLLM server 0").call("health", timeout_s=60)
    await proxy.stop()


class Broken(StartedAgain):
    """A server whose answers have the expected media type, but another content."""

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=b"[oops", content_type=request.content_type)


async def test_an_answer_that_cannot_be_decoded_names_the_server_and_quotes_the_answer():
    server = Broken()
    url = (await server.start()).url
    async with open_session("token") as session:
        connection = Connection(session, url, "vLLM server 0")
        calls = {
            wire.MEDIA_TYPE: connection.call("health", timeout_s=60),
            "application/json": connection.call_json("/rl/health", {}, timeout_s=60),
        }
        for media_type, call in calls.items():
            expected = (
                rf"vLLM server 0 at {url} answered /rl/health with {media_type} that cannot be decoded .* \[oops$"
            )
            with pytest.raises(GenerationError, match=expected):
                await call
    await server.stop()


async def test_a_server_goes_to_sleep_if_the_others_sleep_when_it_starts():
    """A server takes its memory when it starts, but training needs that memory while the other servers sleep."""
    pool, server = Pool(1), StartedAgain()
    pool.wanted = Wanted(adapters={"judge": "/at"}, sleep_level=2)
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=60.0), control_token="token")
    await supervisor.start()
    adapter = ("load_adapter", {"name": "judge", "path": "/at"})
    assert server.requests == [adapter, ("sleep", {"level": 2}), ("wake", {"tags": []})]
    await supervisor.close()

    pool.wanted = pool.wanted.awake(["weights"])
    await supervisor.start()
    assert server.requests == [adapter, ("sleep", {"level": 2}), ("wake", {"tags": ["weights"]})]
    await supervisor.close()

    pool.wanted = pool.wanted.awake(["kv_cache"])
    await supervisor.start()
    assert server.requests == [adapter]
    await supervisor.close()


async def test_the_error_of_a_routers_used_port_names_the_key_and_the_servers_are_stopped(tmp_path: Path):
    server = StartedAgain()
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        settings = ClientSettings(
            tokens=Tokens(control="token"),
            timeout_s=60.0,
            start_timeout_s=60.0,
            heartbeat=Heartbeat(interval_s=100.0, hung_after_s=60.0),
            served_model_name="policy",
            run_dir=tmp_path,
            router_address=("127.0.0.1", port),
        )
        with pytest.raises(ConfigError, match=rf"^generator\.inference_engine\.router_port: got {port}, but .* in use"):
            await supervised_client([server], settings)
    assert server.is_stopped


class DoesNotStart:
    """A server that the run starts itself, and that fails to start."""

    async def start(self) -> ServerAddress:
        raise GenerationError("no memory")

    def kill(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("server", "first", "retried"),
    [
        (DoesNotStart(), "vLLM server 0 has failed; it is restarted: hung", "vLLM server 0 could not be restarted: "),
        (
            ExternalServer("http://127.0.0.1:1", "token", timeout_s=0.0),
            "vLLM server 0 has failed; the run waits until it answers (start it again if it has ended): hung",
            "vLLM server 0 has not been started again: ",
        ),
    ],
    ids=["its own", "external"],
)
async def test_the_warning_about_a_lost_server_says_who_restarts_it(
    server: Startable, first: str, retried: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    pool, (member,) = await _pool(0)
    member.hung = "hung"
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=0.01, hung_after_s=1.0), control_token="token")
    supervisor._session = open_session("token")
    watching = asyncio.create_task(supervisor._watch(member, server))
    async with asyncio.timeout(60):
        while len(caplog.records) < 2:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor._session.close()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == first
    assert said[1].startswith(retried)


@pytest.mark.parametrize(
    ("connect_s", "reason"), [(10.0, "it did not answer"), (0.0, "it accepts connections but does not answer")]
)
async def test_an_address_that_never_answers_is_named_with_the_key_that_limits_the_wait(
    monkeypatch: pytest.MonkeyPatch, connect_s: float, reason: str
):
    """Only an attempt that lasts longer than the timeout for connecting shows that the server accepts connections."""
    monkeypatch.setattr(supervisor_module, "CONNECT_S", connect_s)
    held: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        message = (
            rf"waited 0\.2 s \(generator\.inference_engine\.start_timeout_s\) for the server at {url}: {reason}\. "
        )
        with pytest.raises(DeadlineError, match=message):
            await ExternalServer(url, "token", timeout_s=0.2).start()
        for writer in held:
            writer.close()


async def test_an_external_server_that_does_not_return_kept_tokens_is_refused_if_the_run_needs_them():
    server = StartedAgain()
    server.health |= {"pid": 1, "returns_kept_tokens": False}
    url = (await server.start()).url
    await ExternalServer(url, "token", timeout_s=20.0).start()
    with pytest.raises(ConfigError, match=r"external_server_urls: the server at .* start it with the run's"):
        await ExternalServer(url, "token", timeout_s=20.0, needs_kept_tokens=True).start()
    server.health["returns_kept_tokens"] = True
    await ExternalServer(url, "token", timeout_s=20.0, needs_kept_tokens=True).start()
    await server.stop()


async def test_a_long_wait_for_an_external_server_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(supervisor_module, "_NOTICE_S", 0.2)
    monkeypatch.setattr(supervisor_module, "_RESTART_PAUSE_S", 0.05)
    with pytest.raises(DeadlineError, match=r"for the server at http://127\.0\.0\.1:1: ClientConnectorError: Cannot"):
        await ExternalServer("http://127.0.0.1:1", "token", timeout_s=1.5).start()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("waiting for the server at http://127.0.0.1:1, up to 1.5 s in all: ClientConnectorError: ")

    caplog.clear()
    server = StartedAgain()
    server.health["pid"] = 1
    await ExternalServer((await server.start()).url, "token", timeout_s=20.0).start()
    await asyncio.sleep(0.4)
    assert not caplog.records, "a server that answers is not waited for"
    await server.stop()


async def test_refused_connections_are_reported_even_if_the_last_attempt_times_out(
    monkeypatch: pytest.MonkeyPatch,
):
    num_calls = itertools.count()

    class Refusing:
        def __init__(self, *_: Any) -> None: ...

        async def call(self, method: str, *, timeout_s: float) -> Any:
            if next(num_calls) == 0:
                raise ServerGone("connection refused")
            raise DeadlineError(f"waited {timeout_s:g} s")

    monkeypatch.setattr(supervisor_module, "Connection", Refusing)
    monkeypatch.setattr(supervisor_module, "_RESTART_PAUSE_S", 0.1)
    with pytest.raises(DeadlineError, match=r"the server at http://127\.0\.0\.1:1: connection refused\. Is it started"):
        await ExternalServer("http://127.0.0.1:1", "token", timeout_s=0.05).start()


class Paused(StartedAgain):
    """A server that knows whether it is paused, and that can be unreachable."""

    is_paused = False
    is_reachable = True

    async def _answer(self, request: web.Request) -> web.Response:
        if not self.is_reachable:
            return web.Response(status=503, text="no route to the server")
        name = request.match_info["name"]
        if name in ("pause", "resume"):
            self.is_paused = name == "pause"
        response = await super()._answer(request)
        if name == "health":
            health = {"pid": 1, "boot_id": "first", "quarantine": None, "version": 0, "vocab_size": 8, "num_workers": 1}
            return web.Response(body=wire.encode(health), content_type=wire.MEDIA_TYPE)
        return response


async def test_an_external_server_is_resumed_even_if_it_was_unreachable_when_the_others_resumed(
    monkeypatch: pytest.MonkeyPatch,
):
    """The server keeps its weights, so it returns to service at once. If it stayed paused, requests would time out."""
    monkeypatch.setattr(supervisor_module, "_RESTART_PAUSE_S", 0.05)
    pool, server = Pool(1), Paused()
    external = ExternalServer((await server.start()).url, "token", timeout_s=60.0)
    supervisor = Supervisor(pool, [external], Heartbeat(interval_s=100.0, hung_after_s=60.0), control_token="token")
    await supervisor.start()
    pool.adopt_version()
    client = RemoteInferenceClient(pool, timeout_s=60.0, on_failure=supervisor.suspect)
    try:
        await client.pause("keep")
        (member,) = pool.members
        server.is_reachable = False
        supervisor.suspect(member)
        async with asyncio.timeout(60):
            await member.lost.wait()
        await client.resume()
        assert server.is_paused
        server.is_reachable = True
        await pool.choose(None, timeout_s=60)
        assert not server.is_paused
    finally:
        await supervisor.close()
        await server.stop()


async def test_giving_up_a_server_while_it_answers_causes_no_error():
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    _, (member,) = await _pool(0)
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask() -> str:
        async with while_up(member):
            return await answer

    asking = asyncio.create_task(ask())
    for _ in range(3):  # until both the request and `lost` are awaited
        await asyncio.sleep(0)
    member.lost.set()
    answer.set_result("the answer")
    assert await asking == "the answer"
    await asyncio.sleep(0)
    assert errors == []
