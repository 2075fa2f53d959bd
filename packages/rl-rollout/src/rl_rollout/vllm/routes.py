"""The routes under /rl, beside vLLM's OpenAI-compatible ones. Bodies are MessagePack, see `wire`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rl_core.errors import GenerationError, RLError, WeightSyncError
from rl_rollout.vllm import wire
from rl_rollout.vllm.calls import Calls
from rl_rollout.vllm.error_texts import without_other_paths
from rl_rollout.vllm.served_engine import ServedEngine, Unavailable
from rl_rollout.vllm.tokens import Tokens, is_for_agents

STATUS_REFUSED = 400
STATUS_BAD_WEIGHTS = 409
STATUS_FAULT = 500
STATUS_UNAVAILABLE = 503

logger = logging.getLogger(__name__)


def with_routes(app: FastAPI, engine: ServedEngine, *, tokens: Tokens) -> ASGIApp:
    """The application with the routes of one engine, open to those who show a token.

    Wrapped from outside: vLLM's `build_app` has closed the list of middleware.
    """
    calls = Calls()
    router = APIRouter(prefix="/rl")
    boot_id = uuid.uuid4().hex

    def route(path: str, handle: Callable[[Any], Awaitable[Any]]) -> None:
        async def answer(request: Request) -> Response:
            body = await request.body()
            try:
                return Response(
                    wire.encode(await handle(wire.decode(body) if body else {})), media_type=wire.MEDIA_TYPE
                )
            except Exception as error:
                return _failed(error, body)

        router.add_api_route(path, answer, methods=["POST"])

    @router.post("/generate")
    async def generate(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        body = await request.body()

        async def compute() -> bytes:
            return wire.completions_body(await engine.generate(generate_request))

        try:
            generate_request = wire.request_of(body)
            return Response(await calls.answer(generate_request.sample_id, body, compute), media_type=wire.MEDIA_TYPE)
        except Exception as error:
            return _failed(error, body)

    async def score(asked: Any) -> list[list[bytes]]:
        by_engine = await engine.score(wire.sequences_of(asked["sequences"]), asked["adapter"])
        return [wire.float_lists_record(logprobs) for logprobs in by_engine]

    async def load_adapter(asked: Any) -> None:
        await engine.load_adapter(asked["name"], asked["path"])

    async def cancel(asked: Any) -> None:
        calls.cancel(asked["sample_ids"])

    async def abort(asked: Any) -> list[str]:
        return await engine.abort(asked["sample_ids"])

    async def pause(asked: Any) -> None:
        await engine.pause(asked["mode"])

    async def resume(asked: Any) -> None:
        await engine.resume()

    async def update_weights(asked: Any) -> Any:
        return await engine.update_weights(
            asked["receiver"],
            asked["data"],
            asked["version"],
            adapter=asked["adapter"],
            timeout_s=asked["timeout_s"],
        )

    async def sleep(asked: Any) -> None:
        await engine.sleep(asked["level"])

    async def wake(asked: Any) -> None:
        await engine.wake(asked["tags"])

    async def health(asked: Any) -> dict[str, Any]:
        await engine.check()
        return {
            "boot_id": boot_id,
            "pid": os.getpid(),
            "version": engine.version,
            "quarantine": engine.quarantine,
            "vocab_size": engine.vocab_size,
            "num_workers": engine.num_workers,
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
        }

    for handle in (score, load_adapter, cancel, abort, pause, resume, update_weights, sleep, wake, health):
        route(f"/{handle.__name__}", handle)
    app.include_router(router)
    return _RequireToken(_OnlyGoodWeights(app, engine), tokens)


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
