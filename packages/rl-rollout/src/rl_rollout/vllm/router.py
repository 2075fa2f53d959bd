"""One address for outside agents: the OpenAI API of whichever server serves the policy now.

consumes     HTTP requests under /v1; any other path, however it is written, reaches no server
produces     the servers' answers, passed on as they come (also streams)
waits for    a server in service, then for its answer
unblocked by the pool: requests go only to servers that hold the current weights

Why not vllm-router: none of the policies that it documents does both of what is needed here. `consistent_hash` keeps a
session on one server whatever that one has to do; `cache_aware` looks at load, and at matching prompts rather than
sessions (github.com/vllm-project/router, docs/load_balancing). And servers are chosen by their health, not by the
weights that they hold: one that was started again, and has the first weights, would be asked. Read, not tried.
"""

from __future__ import annotations

import asyncio
import json
import logging
import posixpath
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import aiohttp
from aiohttp import web

from rl_core.errors import DeadlineError
from rl_rollout.vllm.connection import open_session
from rl_rollout.vllm.pool import Member, Pool
from rl_rollout.vllm.tokens import is_bearer

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
_PREFIX = "/v1/"
_MAX_BODY_BYTES = 64 * 2**20
_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "content-encoding"}


class Router:
    """A proxy in front of a pool."""

    def __init__(
        self, pool: Pool, *, token: str | None, timeout_s: float, on_failure: Callable[[Member], None]
    ) -> None:
        """
        Args:
            pool: the servers.
            token: agents must show it, as the servers ask for it; None: open. Never the control token: what is passed
                on can then change no server, whatever it asks for.
            timeout_s: how long a request waits for a server in service.
            on_failure: told of a server that did not answer.
        """
        self._pool = pool
        self._token = token
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._session: aiohttp.ClientSession
        self._runner: web.AppRunner

    async def start(self, host: str, port: int) -> str:
        """Listens; returns the base URL for an OpenAI client."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", _PREFIX + "{path:.*}", self._pass_on)
        self._session = open_session(self._token)
        # Requests end when the trainer does: nothing is drained at the end.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        address = self._runner.addresses[0]
        return f"http://{address[0]}:{address[1]}/v1"

    async def close(self) -> None:
        """Stops listening."""
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode()
        if self._token is not None and not is_bearer(shown, self._token):
            return _error(401, "this router asks for an access token (api_key)")
        path = path_of_api(request.rel_url.raw_path)
        if path is None:
            return _error(400, f"{request.rel_url.raw_path!r} is not a path of the API; write it without . and ..")
        body = await request.read()
        session_id = _session_id(request, body)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        while True:
            try:
                member = await self._pool.choose(session_id, timeout_s=max(0.0, deadline - clock()))
            except DeadlineError as error:
                # Why each server is away may have paths and addresses, which are the run's business.
                logger.warning("an agent was sent away: %s", error)
                return _error(503, f"no server had the policy's current weights within {self._timeout_s:g} s")
            with self._pool.carries(member, 1):
                try:
                    return await self._ask(member, request, path, body)
                except aiohttp.ClientConnectionError as error:
                    logger.warning("%s did not answer an agent: %s", member, error)
                    self._on_failure(member)
            await asyncio.sleep(0.1)

    async def _ask(self, member: Member, request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """The server's answer. A connection error is raised only while nothing was passed on yet."""
        connection = member.connection
        if connection is None:
            raise aiohttp.ClientConnectionError(f"{member} is down")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = _url(connection.url, path, request.rel_url.raw_query_string)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with self._session.request(
            request.method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=passed)
            chunks = answer.content.iter_any()
            first = await anext(chunks, b"")
            await response.prepare(request)
            try:
                await response.write(first)
                async for chunk in chunks:
                    await response.write(chunk)
                await response.write_eof()
            except aiohttp.ClientConnectionError as error:
                logger.warning("%s was lost while it answered an agent: %s", member, error)
                self._on_failure(member)
                if request.transport is not None:
                    request.transport.abort()
            return response


def path_of_api(raw_path: str) -> str | None:
    """The decoded path of a request; None where it is, or decoded again could become, the path of something else.

    Args:
        raw_path: as it came, percent-encoded.
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
    """What keeps an agent's turns on one server: a header, or the API's own field for the user."""
    if SESSION_HEADER in request.headers:
        return request.headers[SESSION_HEADER]
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    return fields.get("session_id") or fields.get("user") if isinstance(fields, dict) else None


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "router", "code": status}}, status=status)
