"""Adds the routes under /rl to vLLM's OpenAI-compatible server. Their bodies are MessagePack; see `wire`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GenerationError as VLLMGenerationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rl_core.errors import GenerationError, RLError, WeightSyncError
from rl_rollout.vllm import bodies, wire
from rl_rollout.vllm.agent_bodies import require_sound
from rl_rollout.vllm.calls import Calls
from rl_rollout.vllm.error_texts import without_other_paths
from rl_rollout.vllm.served_engine import Lost, ServedEngine, Unavailable
from rl_rollout.vllm.tokens import Tokens, is_for_agents

_EMPTY = wire.encode({})
STATUS_REFUSED = 400
STATUS_TOO_SLOW = 408
STATUS_BAD_WEIGHTS = 409
STATUS_NOT_COMPUTED = 422
STATUS_FAULT = 500
STATUS_LOST = 502
STATUS_UNAVAILABLE = 503
_BODY_S = 120.0
"""Timeout for receiving a request's body."""

logger = logging.getLogger(__name__)


def with_routes(app: FastAPI, engine: ServedEngine, *, tokens: Tokens) -> ASGIApp:
    """Returns vLLM's application with the routes of `engine` added. It checks each request's token and body.

    The checks wrap the application, because no middleware can be added to it after vLLM's `build_app`.
    """
    handlers = Handlers(engine)
    router = APIRouter(prefix="/rl")
    for name, (body_type, handle) in ROUTES.items():
        router.add_api_route(f"/{name}", _answering(handlers, handle, body_type), methods=["POST"])
    app.include_router(router)
    # vLLM's own handler would end the HTTP server with its engine; here the supervisor restarts both.
    for kind in (EngineDeadError, EngineGenerateError, VLLMGenerationError):
        app.add_exception_handler(kind, _generation_failed)
    return _RequireToken(CheckBody(_OnlyWhileServing(app, engine)), tokens)


class Handlers:
    """Handles requests to the routes. A handler returns plain data, or bytes if its answer is already encoded."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._calls = Calls()
        self._boot_id = uuid.uuid4().hex

    async def generate(self, asked: bodies.GenerateBody) -> bytes:
        request = asked.request()

        async def compute() -> bytes:
            return wire.completions_body(await self._engine.generate(request))

        return await self._calls.answer(request.sample_id, wire.request_body(request), compute)

    async def score(self, asked: bodies.ScoreBody) -> list[list[bytes]]:
        by_engine = await self._engine.score(wire.sequences_of(asked.sequences), asked.adapter)
        return [wire.float_lists_record(logprobs) for logprobs in by_engine]

    async def load_adapter(self, asked: bodies.AdapterBody) -> None:
        await self._engine.load_adapter(asked.name, asked.path)

    async def cancel(self, asked: bodies.SamplesBody) -> None:
        self._calls.cancel(asked.sample_ids)

    async def abort(self, asked: bodies.AbortBody) -> list[str]:
        return await self._engine.abort(asked.sample_ids)

    async def pause(self, asked: bodies.PauseBody) -> None:
        await self._engine.pause(asked.mode)

    async def resume(self, asked: bodies.Body) -> None:
        await self._engine.resume()

    async def prepare_weights(self, asked: bodies.UpdateBody) -> None:
        await self._engine.prepare_weights(asked.rendezvous(), asked.version, timeout_s=asked.timeout_s)

    async def update_weights(self, asked: bodies.UpdateBody) -> Any:
        return await self._engine.update_weights(asked.rendezvous(), asked.version, timeout_s=asked.timeout_s)

    async def sleep(self, asked: bodies.SleepBody) -> None:
        await self._engine.sleep(asked.level)

    async def wake(self, asked: bodies.WakeBody) -> None:
        await self._engine.wake(asked.tags)

    async def health(self, asked: bodies.Body) -> dict[str, Any]:
        await self._engine.check()
        return {
            "boot_id": self._boot_id,
            "pid": os.getpid(),
            "version": self._engine.version,
            "quarantine": self._engine.quarantine,
            "vocab_size": self._engine.vocab_size,
            "num_workers": self._engine.num_workers,
            "returns_kept_tokens": self._engine.returns_kept_tokens,
            "num_running": self._engine.num_running,
            "num_waiting": self._engine.num_waiting,
        }


ROUTES: Mapping[str, tuple[type[bodies.Body], Callable[..., Awaitable[Any]]]] = {
    "generate": (bodies.GenerateBody, Handlers.generate),
    "score": (bodies.ScoreBody, Handlers.score),
    "load_adapter": (bodies.AdapterBody, Handlers.load_adapter),
    "cancel": (bodies.SamplesBody, Handlers.cancel),
    "abort": (bodies.AbortBody, Handlers.abort),
    "pause": (bodies.PauseBody, Handlers.pause),
    "resume": (bodies.Body, Handlers.resume),
    "prepare_weights": (bodies.UpdateBody, Handlers.prepare_weights),
    "update_weights": (bodies.UpdateBody, Handlers.update_weights),
    "sleep": (bodies.SleepBody, Handlers.sleep),
    "wake": (bodies.WakeBody, Handlers.wake),
    "health": (bodies.Body, Handlers.health),
}
"""Path under /rl → type of the request's body, and handler."""


def _answering(
    handlers: Handlers, handle: Callable[..., Awaitable[Any]], body_type: type[bodies.Body]
) -> Callable[[Request], Awaitable[Response]]:
    decode = msgspec.msgpack.Decoder(body_type).decode

    async def answer(request: Request) -> Response:
        body = await request.body()
        try:
            result = await handle(handlers, decode(body or _EMPTY))
            content = result if isinstance(result, bytes) else wire.encode(result)
            return Response(content, media_type=wire.MEDIA_TYPE)
        except Exception as error:
            return _failed(error, body)

    return answer


def _failed(error: Exception, body: bytes) -> Response:
    """Returns the response for an error; the client's `connection` turns it back into an exception. Paths that are not
    in the request's `body` are removed from the text."""
    if isinstance(error, WeightSyncError):
        status = STATUS_BAD_WEIGHTS
    elif isinstance(error, EngineDeadError | EngineGenerateError | Lost):
        status = STATUS_LOST
    elif isinstance(error, Unavailable):
        status = STATUS_UNAVAILABLE
    elif isinstance(error, RLError | ValueError | RecursionError):
        # vLLM refuses a request with a ValueError that gives the reason; msgspec raises RecursionError for too deep
        # nesting.
        status = STATUS_REFUSED
    else:
        logger.error("a request failed", exc_info=error)
        status = STATUS_FAULT
    text = str(error) if isinstance(error, GenerationError | WeightSyncError) else f"{type(error).__name__}: {error}"
    without_paths = without_other_paths(text, body)
    if without_paths != text:
        logger.warning("a request failed; its caller got this error without paths: %s", text)
    return Response(wire.encode({"message": without_paths}), status_code=status, media_type=wire.MEDIA_TYPE)


class _OnlyWhileServing:
    """Lets routes outside /rl answer only while the engine is alive and has complete weights. Otherwise refuses the
    request, so that the router tries another server. A stream that has begun ends with an error event.

    A status 500 of vLLM while the engine is alive becomes 422, because no other server could compute the request
    either. With vllm 0.30, an example is `response_format={"type": "json_object"}` for a model without tokens for
    braces.
    """

    def __init__(self, app: ASGIApp, engine: ServedEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/rl/"):
            await self._app(scope, receive, send)
            return
        if (fault := self._engine.fault) is not None:
            await _refusal(fault, STATUS_UNAVAILABLE)(scope, receive, send)
            return
        state: Literal["waiting", "passing on", "streaming", "over"] = "waiting"

        async def guarded(message: Message) -> None:
            nonlocal state
            if state == "over":
                return
            if (fault := self._engine.fault) is not None and state != "passing on":
                if state == "waiting":
                    await _refusal(fault, STATUS_LOST)(scope, receive, send)
                else:
                    event = f"data: {json.dumps(_error_record(fault, STATUS_LOST))}\n\n".encode()
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                state = "over"
                return
            if message["type"] == "http.response.start" and message["status"] == 500:
                logger.error("vLLM could not answer a request of %s", scope["path"])
                await _refusal("the engine could not compute this request", STATUS_NOT_COMPUTED)(scope, receive, send)
                state = "over"
                return
            if message["type"] == "http.response.start":
                is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
                state = "streaming" if is_stream else "passing on"
            await send(message)

        await self._app(scope, receive, guarded)


async def _generation_failed(request: Request, error: Exception) -> Response:
    """Returns status 422 for a request to an OpenAI route that failed in a living engine; `_OnlyWhileServing` replaces
    the answers of a dead engine."""
    logger.error("a request of %s failed", request.url.path, exc_info=error)
    return _refusal(f"the engine could not finish this request ({type(error).__name__})", STATUS_NOT_COMPUTED)


def _refusal(fault: str, status: int) -> Response:
    return Response(json.dumps(_error_record(fault, status)), status, media_type="application/json")


def _error_record(message: str, status: int) -> dict[str, Any]:
    """Returns an error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": "server", "code": status}}


class CheckBody:
    """Reads a request's body, up to a size limit, and checks it before the routes do. Refuses websockets, because their
    messages would not be checked. vLLM's only websocket is for audio, which no policy here accepts."""

    def __init__(self, app: ASGIApp, timeout_s: float = _BODY_S) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await _whole_body(scope, receive)
        except TimeoutError:
            await _closing(f"the whole body did not arrive within {self._timeout_s:g} s", STATUS_TOO_SLOW)(
                scope, receive, send
            )
            return
        except _TooLarge:
            await _closing(f"the body is larger than {wire.MAX_BODY_BYTES} bytes", 413)(scope, receive, send)
            return
        except _Disconnected:
            return
        # Libraries differ in which of several content types they use, so the body is checked if any of them is JSON.
        is_json = any(name == b"content-type" and b"json" in value.lower() for name, value in scope["headers"])
        if body and not scope["path"].startswith("/rl/") and is_json:
            try:
                require_sound(body)
            except ValueError as error:
                await _refusal(f"the body: {error}", STATUS_REFUSED)(scope, receive, send)
                return
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)


class _TooLarge(Exception):
    """A body has more bytes than the limit."""


class _Disconnected(Exception):
    """The client has disconnected."""


async def _whole_body(scope: Scope, receive: Receive) -> bytes:
    """Reads and returns the whole body. Raises _Disconnected if the client leaves, and _TooLarge as soon as the body is
    known to exceed `MAX_BODY_BYTES`."""
    lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
    if any(length > wire.MAX_BODY_BYTES for length in lengths):
        raise _TooLarge
    parts, num_bytes, has_more = [], 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        has_more = message.get("more_body", False)
        if num_bytes > wire.MAX_BODY_BYTES:
            raise _TooLarge
    return b"".join(parts)


def _closing(text: str, status: int) -> Response:
    """Returns a response that closes the connection, because the rest of the body may still be on the way."""
    return Response(text, status, headers={"connection": "close"})


class _RequireToken:
    """Refuses requests without a token for their path, before anything else reads them: vLLM's own check leaves paths
    such as /metrics, /tokenize and /rl open."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            # ASGI's `path` is already percent-decoded, and the routes match the same value.
            path, given = scope["path"], dict(scope["headers"]).get(b"authorization", b"")
            if not self._tokens.opens(path, given):
                kind = "an access token" if is_for_agents(path) else "the control token of its run"
                await Response(f"this server requires {kind}", status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
