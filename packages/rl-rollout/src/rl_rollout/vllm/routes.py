"""The routes under /rl, beside vLLM's OpenAI-compatible ones. Bodies are MessagePack, see `wire`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rl_core.errors import GenerationError, RLError, WeightSyncError
from rl_rollout.vllm import bodies, wire
from rl_rollout.vllm.calls import Calls
from rl_rollout.vllm.error_texts import without_other_paths
from rl_rollout.vllm.served_engine import ServedEngine, Unavailable
from rl_rollout.vllm.tokens import Tokens, is_for_agents

_EMPTY = wire.encode({})
STATUS_REFUSED = 400
STATUS_BAD_WEIGHTS = 409
STATUS_FAULT = 500
STATUS_UNAVAILABLE = 503

logger = logging.getLogger(__name__)


def with_routes(app: FastAPI, engine: ServedEngine, *, tokens: Tokens) -> ASGIApp:
    """The application with the routes of one engine, open to those who show a token.

    Wrapped from outside: vLLM's `build_app` has closed the list of middleware.
    """
    handlers = Handlers(engine)
    router = APIRouter(prefix="/rl")
    for name, (body_type, handle) in ROUTES.items():
        router.add_api_route(f"/{name}", _answering(handlers, handle, body_type), methods=["POST"])
    app.include_router(router)
    return _RequireToken(_OnlyGoodWeights(app, engine), tokens)


class Handlers:
    """What each route does. A result is plain data, or bytes where it was encoded once for all who ask for it."""

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

    async def update_weights(self, asked: bodies.UpdateBody) -> Any:
        return await self._engine.update_weights(
            asked.receiver, asked.data, asked.version, adapter=asked.adapter, timeout_s=asked.timeout_s
        )

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
    "update_weights": (bodies.UpdateBody, Handlers.update_weights),
    "sleep": (bodies.SleepBody, Handlers.sleep),
    "wake": (bodies.WakeBody, Handlers.wake),
    "health": (bodies.Body, Handlers.health),
}
"""By path under /rl: what a request brings, and who answers it."""


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
    """What the client's `connection` turns into an exception again; `body` is that of the request."""
    if isinstance(error, WeightSyncError):
        status = STATUS_BAD_WEIGHTS
    elif isinstance(error, Unavailable | EngineDeadError | EngineGenerateError):
        status = STATUS_UNAVAILABLE
    elif isinstance(error, RLError | ValueError):
        # vLLM refuses a request with a ValueError that says why.
        status = STATUS_REFUSED
    else:
        logger.error("a request failed", exc_info=error)
        status = STATUS_FAULT
    text = str(error) if isinstance(error, GenerationError | WeightSyncError) else f"{type(error).__name__}: {error}"
    told = without_other_paths(text, body)
    if told != text:
        logger.warning("a request failed; its caller was not told the paths in: %s", text)
    return Response(wire.encode({"message": told}), status_code=status, media_type=wire.MEDIA_TYPE)


class _OnlyGoodWeights:
    """Refuses the OpenAI routes too while the engine is quarantined."""

    def __init__(self, app: ASGIApp, engine: ServedEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._engine.quarantine is not None and scope["type"] == "http" and not scope["path"].startswith("/rl/"):
            # The reason is the run's business, and in its log.
            text = "this server lacks complete weights, and serves nothing until it has received them"
            await Response(text, status_code=STATUS_UNAVAILABLE)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _RequireToken:
    """Refuses what shows no token for its path, before anything else reads it: vLLM's own check leaves all but /v1
    open."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            # The path is decoded, as the routes see it.
            path, given = scope["path"], dict(scope["headers"]).get(b"authorization", b"")
            if not self._tokens.opens(path, given):
                kind = "an access token" if is_for_agents(path) else "the control token of its run"
                await Response(f"this server asks for {kind}", status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
