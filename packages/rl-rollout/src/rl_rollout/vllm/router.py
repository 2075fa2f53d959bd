"""Forwards the OpenAI requests of outside agents from one address to servers that hold the current policy.

consumes     HTTP requests under /v1; any other path, however it is written, reaches no server
produces     the servers' answers: whole or, if an agent requested a stream, event by event as they arrive
waits for    a server in service, then for its answer, then for the agent to read it; a request's deadline covers the
             time from the end of its headers to the end of the answer
unblocked by the pool: requests go only to servers that hold the current weights; by an agent that disconnects, which
             also ends its request on the server; by the deadline, which also closes the connection of an agent that
             does not read

If a server is lost before an agent has received any part of the answer, the request goes to another server, unnoticed
by the agent. A stream that breaks off later ends with an error event.

This package does not use vllm-router, because none of its documented policies considers both sessions and load.
`consistent_hash` keeps a session on one server whatever its load; `cache_aware` considers load, but matches prompts
rather than sessions (github.com/vllm-project/router, docs/load_balancing). In addition, vllm-router chooses servers by
health, not by the weights they hold, so a restarted server with the model's first weights would get requests. These
statements come from the documentation of vllm-router, not from a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rl_core.errors import DeadlineError
from rl_rollout.vllm.connection import CONNECT_S, LostUnderRequest, ServerGone, gone, open_session
from rl_rollout.vllm.pool import MAX_LOST, Member, Pool, while_up
from rl_rollout.vllm.server import reachable
from rl_rollout.vllm.tokens import is_bearer
from rl_rollout.vllm.wire import MAX_BODY_BYTES

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
_PREFIX = "/v1/"
_EVENT_STREAM = "text/event-stream"
_HOP_BY_HOP = {
    "connection",
    "content-encoding",
    "content-length",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_GONE = {502: LostUnderRequest, 503: ServerGone}
"""Status code that a server's routes send → exception that it stands for."""
_ASK_AGAIN_S = 0.1
_LAST_WORDS_S = 1.0
"""Seconds that an agent has after its request's deadline to read the error."""
MAX_SESSION_ID = 512
"""Maximum number of characters of a session's id; limited because ids are stored."""


SessionID = Annotated[str, msgspec.Meta(max_length=MAX_SESSION_ID)]


class _Names(msgspec.Struct):
    """The fields of a request that identify its session."""

    session_id: SessionID | None = None
    user: SessionID | None = None


class Router:
    """Forwards the HTTP requests of agents to the servers of a pool."""

    def __init__(self, pool: Pool, *, token: str, timeout_s: float, on_failure: Callable[[Member], None]) -> None:
        """
        Args:
            pool: the servers with their states.
            token: the access token that agents must send, and that servers require. It must not be the control token,
                so that no forwarded request can change a server.
            timeout_s: seconds that a request may take in all.
            on_failure: called with a server that did not answer, so that it is checked at once.
        """
        self.url: str | None = None
        """Base URL for an OpenAI client; None until the router listens."""
        self.token = token
        self._pool = pool
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner

    async def start(self, host: str, port: int) -> str:
        """Starts listening; returns `url`. Raises OSError if that is impossible, for example because the port is
        used."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", _PREFIX + "{path:.*}", self._pass_on)
        self._session = open_session(self.token)
        # aiohttp cancels a request whose agent disconnects. `close` waits at most 1 s for requests that still run.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except BaseException:
            await self._runner.cleanup()
            await self._session.close()
            raise
        address = self._runner.addresses[0]
        self.url = f"http://{reachable(address[0])}:{address[1]}/v1"
        return self.url

    async def close(self) -> None:
        """Stops listening."""
        if self.url is not None:
            await self._runner.cleanup()
            await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        # aiohttp decodes bytes that are not UTF-8 to surrogates.
        shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not is_bearer(shown, self.token):
            return _error(401, "this router requires an access token (api_key)")
        path = path_of_api(request.rel_url.raw_path)
        if path is None:
            return _error(400, f"{request.rel_url.raw_path!r} is not a path of the API; write it without . and ..")
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        response = await self._answered(request, path, deadline)
        try:
            async with asyncio.timeout_at(deadline + _LAST_WORDS_S):
                with contextlib.suppress(ConnectionError):  # the agent left
                    await response.prepare(request)
                    await response.write_eof()
                    await request.writer.drain()
        except TimeoutError:
            logger.warning("an agent did not read its answer within %g s", self._timeout_s)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _answered(self, request: web.Request, path: str, deadline: float) -> web.StreamResponse:
        """Returns the answer: a response that is not sent yet, or a stream of which everything but the end is sent."""
        try:
            async with asyncio.timeout_at(deadline):
                body = await request.read()
        except TimeoutError:
            return _error(408, f"the whole request did not arrive within {self._timeout_s:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        except (web.RequestPayloadError, HttpProcessingError) as error:
            return _error(400, f"the body: {error}")
        try:
            session_id = _session_id(request, body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return _error(400, f"the body: {error}")
        return await self._from_server(request, path, body, session_id, deadline)

    async def _from_server(
        self, request: web.Request, path: str, body: bytes, session_id: str | None, deadline: float
    ) -> web.StreamResponse:
        """Tries servers until one answers, and returns that answer or, if none answers, an error response."""
        clock = asyncio.get_running_loop().time
        lost: set[asyncio.Event] = set()
        while len(lost) < MAX_LOST:
            try:
                member = await self._pool.choose(session_id, timeout_s=max(0.0, deadline - clock()))
            except DeadlineError as error:
                # The error says why servers are out of service, perhaps with paths and addresses that agents must not
                # see.
                logger.warning("an agent's request was refused: %s", error)
                return _error(503, f"no server had the policy's current weights within {self._timeout_s:g} s")
            life = member.lost
            try:
                with self._pool.carries(member, 1):
                    return await self._ask(member, request, path, body, deadline)
            except TimeoutError:
                return _error(504, f"no answer within {self._timeout_s:g} s")
            except ServerGone as error:
                logger.warning("%s did not answer an agent: %s", member, error)
                self._on_failure(member)
                if isinstance(error, LostUnderRequest):
                    lost.add(life)
            await asyncio.sleep(_ASK_AGAIN_S)
        return _error(502, f"{MAX_LOST} servers were lost while they answered this request")

    async def _ask(
        self, member: Member, request: web.Request, path: str, body: bytes, deadline: float
    ) -> web.StreamResponse:
        """Forwards a request to the server and returns the answer. If the answer is a stream, everything but its end
        has been sent to the agent.

        Raises:
            ServerGone, TimeoutError: the server did not answer, and the agent has received nothing.
            CancelledError: the agent left.
        """
        response: web.StreamResponse | None = None
        try:
            async with (
                asyncio.timeout_at(deadline),
                while_up(member) as server,
                self._session.request(
                    request.method,
                    _url(server.url, path, request.rel_url.raw_query_string),
                    data=body,
                    headers=_passed(request.headers),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                    allow_redirects=False,
                ) as answer,
            ):
                if answer.status in _GONE:
                    raise _GONE[answer.status](await answer.text(errors="replace"))
                if answer.content_type != _EVENT_STREAM:
                    content = await answer.read()
                    return web.Response(status=answer.status, headers=_passed(answer.headers), body=content)
                async for events in _whole_events(answer.content):
                    if response is None:
                        response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
                        await response.prepare(request)
                    await response.write(events)
        except (aiohttp.ClientError, ServerGone, TimeoutError) as error:
            if request.transport is None or request.transport.is_closing():
                raise asyncio.CancelledError from error  # the agent left
            if response is None and isinstance(error, aiohttp.ClientError):
                raise gone(error, str(member)) from error
            if response is None:
                raise
            if isinstance(error, TimeoutError):
                record = _error_record(504, "the request's deadline has passed; ask again")
            else:
                logger.warning("%s was lost while it answered an agent: %s", member, error)
                self._on_failure(member)
                record = _error_record(502, "the server was lost; ask again")
            event = b"data: " + json.dumps(record).encode() + b"\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline + _LAST_WORDS_S):
                    await response.write(event)
        if response is None:
            raise ServerGone("it answered with an empty stream")
        return response


async def _whole_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the received bytes, cut between server-sent events; an incomplete event is not passed on."""
    rest = b""
    async for chunk in content.iter_any():
        events, end, rest = (rest + chunk).rpartition(b"\n\n")
        if end:
            yield events + end


def path_of_api(raw_path: str) -> str | None:
    """Returns the decoded path of a request, or None if the path, decoded once or repeatedly, lies outside the API.

    Args:
        raw_path: the path as received, percent-encoded.
    """
    try:
        decoded = seen = unquote(raw_path, errors="strict")
        while (again := unquote(seen, errors="strict")) != seen:
            seen = again
    except UnicodeDecodeError:
        return None
    is_plain = seen.isprintable() and "\\" not in seen and posixpath.normpath(seen) == seen.removesuffix("/")
    return decoded if is_plain and seen.startswith(_PREFIX) else None


def _url(server: str, path: str, raw_query: str) -> str:
    base = urlsplit(server)
    return urlunsplit(base._replace(path=base.path + quote(path), query=raw_query))


def _session_id(request: web.Request, body: bytes) -> str | None:
    """Returns the id that keeps an agent's turns on one server: the header `SESSION_HEADER`, else the body's field
    `session_id`, else the field `user` of OpenAI's API; None if there is none.

    Raises:
        MsgspecError, RecursionError, UnicodeDecodeError: the body is not JSON, or an id is too long or not a string.
    """
    if SESSION_HEADER in request.headers:
        return msgspec.convert(request.headers[SESSION_HEADER], SessionID)
    if not body or request.content_type.startswith("multipart/"):
        return None
    names = msgspec.json.decode(body, type=_Names)
    return names.session_id or names.user


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers to pass on. Headers that apply to a single connection are left out."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_record(status, message), status=status)


def _error_record(status: int, message: str) -> dict[str, dict[str, object]]:
    """Returns an error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": "router", "code": status}}
