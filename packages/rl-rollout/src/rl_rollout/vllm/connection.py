"""Calls one server over HTTP, with a deadline for each call. The exceptions distinguish a server that is gone from a
server that refused the request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from rl_core.errors import DeadlineError, GenerationError, WeightSyncError
from rl_rollout.vllm import wire
from rl_rollout.vllm.tokens import CONTROL_FILE_VARIABLE, CONTROL_VARIABLE

_KEEP_ALIVE_S = 60.0
"""Seconds until the client closes an idle connection. The server waits 75 s, so it never closes a connection that the
client is about to use."""
CONNECT_S = 10.0
"""Timeout for a server to accept a connection."""
_REFUSED, _BAD_WEIGHTS, _LOST, _UNAVAILABLE = 400, 409, 502, 503
_NO_TOKEN, _NO_ROUTE = 401, 404
_JSON = "application/json"
_DECODERS = {wire.MEDIA_TYPE: wire.decode, _JSON: json.loads}


class ServerGone(Exception):
    """The server did not answer, or answered that it cannot serve now; another server may be able to."""


class LostUnderRequest(ServerGone):
    """The server or its engine ended while it had the request."""


def open_session(token: str | None) -> aiohttp.ClientSession:
    """Opens an HTTP session for all servers, without a limit on the number of connections. All requests carry
    `token`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        headers={"Authorization": f"Bearer {token}"} if token else {},
        # Proxy settings of the environment are ignored: the servers belong to the run, and a proxy may not reach them.
        trust_env=False,
    )


class Connection:
    """Makes calls to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session = session
        self.url = url
        self.name = name

    async def call(self, method: str, arguments: Any = None, *, timeout_s: float) -> Any:
        """Calls a route under /rl with a MessagePack body.

        Raises:
            ServerGone: the connection failed, or the server cannot serve now.
            DeadlineError: no answer in time.
            GenerationError, WeightSyncError: the server refused, or something else answered.
        """
        return await self.send(method, wire.encode(arguments or {}), timeout_s=timeout_s)

    async def send(self, method: str, body: bytes, *, timeout_s: float) -> Any:
        """Like `call`, but takes the encoded request body."""
        headers = {"Content-Type": wire.MEDIA_TYPE}
        status, answer = await self._post(f"/rl/{method}", timeout_s, wire.MEDIA_TYPE, data=body, headers=headers)
        if status == 200:
            return answer
        message = self._refusal(method, status, answer)
        if status == _UNAVAILABLE:
            raise ServerGone(message)
        if status == _LOST:
            raise LostUnderRequest(message)
        if status == _BAD_WEIGHTS:
            raise WeightSyncError(message)
        if status == _REFUSED:
            raise GenerationError(message)
        if status == _NO_TOKEN:
            raise GenerationError(
                f"{self.name} at {self.url} requires its control token: set {CONTROL_FILE_VARIABLE} to a file with the "
                f"token that the server was started with, or {CONTROL_VARIABLE} to the token itself"
            )
        if status == _NO_ROUTE:
            raise GenerationError(
                f"{self.name} at {self.url} has no /rl/{method}: start it with python -m rl_rollout.vllm.serve, from "
                "the version of rl-rollout that this run uses"
            )
        raise GenerationError(f"{message}; its log says more")

    def _refusal(self, method: str, status: int, answer: bytes) -> str:
        """Describes an answer whose status is not 200."""
        try:
            return f"{self.name}, {method}: {wire.decode(answer)['message']}"
        except Exception:  # the answer is from the HTTP layer or a proxy
            text = answer.decode(errors="replace")
            return f"{self.name} at {self.url} answered /rl/{method} with HTTP status {status}: {text:.500}"

    async def call_json(self, path: str, arguments: Any, *, timeout_s: float) -> Any:
        """Calls one of vLLM's own routes with a JSON body. Raises the same errors as `call`, except WeightSyncError."""
        status, answer = await self._post(path, timeout_s, _JSON, json=arguments)
        if status == 200:
            return answer
        text = answer.decode(errors="replace")
        if status >= 500:
            kind = LostUnderRequest if status == _LOST else ServerGone
            raise kind(f"{self.name}, {path}: HTTP status {status}: {text:.500}")
        raise GenerationError(f"{self.name}, {path}: HTTP status {status}: {text:.500}")

    async def _post(self, path: str, timeout_s: float, media_type: str, **body: Any) -> tuple[int, Any]:
        """Returns the answer's status and body, which is decoded if the status is 200. Raises GenerationError if the
        status is 200, but the body is not of `media_type`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_S, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.post(self.url + path, timeout=timeout, **body) as response:
                    answer = await response.read()
        except TimeoutError as error:
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise ServerGone(f"{self.name} at {self.url} does not accept a connection") from error
            raise DeadlineError(f"waited {timeout_s:g} s for {self.name} at {self.url} to answer {path}") from None
        except aiohttp.ClientError as error:
            raise gone(error, f"{self.name} at {self.url}") from error
        if response.status != 200:
            return response.status, answer
        reason = ""
        if response.content_type == media_type:
            try:
                return response.status, _DECODERS[media_type](answer)
            except (msgspec.DecodeError, ValueError) as error:
                reason = f" that cannot be decoded ({error})"
        raise GenerationError(
            f"{self.name} at {self.url} answered {path} with {response.content_type}{reason}; expected {media_type}. A "
            f"proxy or another program may answer there. It sent: {answer.decode(errors='replace'):.200}"
        )


def gone(error: aiohttp.ClientError, name: str) -> ServerGone:
    """Returns the exception for a connection error: ServerGone if no connection was made, else LostUnderRequest."""
    was_sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    kind = LostUnderRequest if was_sent else ServerGone
    return kind(f"{name}: {type(error).__name__}: {error}")
