"""The routes under /rl, beside vLLM's OpenAI-compatible ones. Bodies are MessagePack, see `wire`."""

from __future__ import annotations

import hmac
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
from rl_rollout.vllm.served_engine import ServedEngine, Unavailable

STATUS_REFUSED = 400
STATUS_BAD_WEIGHTS = 409
STATUS_UNAVAILABLE = 503


def with_routes(app: FastAPI, engine: ServedEngine, *, token: str | None) -> ASGIApp:
    """The application with the routes of one engine, which all ask for `token` if there is one.

    Wrapped from outside: vLLM's `build_app` has closed the list of middleware.
    """
    calls = Calls()
    router = APIRouter(prefix="/rl")
    boot_id = uuid.uuid4().hex

    def route(path: str, handle: Callable[[Any], Awaitable[Any]]) -> None:
        async def answer(request: Request) -> Response:
            body = await request.body()
            return await _answered(lambda: handle(wire.decode(body) if body else {}))

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
            return _failed(error)

    async def score(asked: Any) -> list[bytes]:
        return wire.float_lists_record(await engine.score(wire.sequences_of(asked["sequences"]), asked["adapter"]))

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
    served = _OnlyGoodWeights(app, engine)
    return served if token is None else _RequireToken(served, token)


async def _answered(compute: Callable[[], Awaitable[Any]]) -> Response:
    try:
        return Response(wire.encode(await compute()), media_type=wire.MEDIA_TYPE)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Response:
    """What the client's `connection` turns into an exception again."""
    if isinstance(error, WeightSyncError):
        status = STATUS_BAD_WEIGHTS
    elif isinstance(error, Unavailable | EngineDeadError | EngineGenerateError):
        status = STATUS_UNAVAILABLE
    elif isinstance(error, RLError | ValueError):
        # vLLM refuses a request with a ValueError that says why.
        status = STATUS_REFUSED
    else:
        raise error
    text = str(error) if isinstance(error, GenerationError | WeightSyncError) else f"{type(error).__name__}: {error}"
    return Response(wire.encode({"message": text}), status_code=status, media_type=wire.MEDIA_TYPE)


class _OnlyGoodWeights:
    """Refuses the OpenAI routes too while the engine is quarantined."""

    def __init__(self, app: ASGIApp, engine: ServedEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._engine.quarantine
        if reason is not None and scope["type"] == "http" and not scope["path"].startswith("/rl/"):
            await Response(reason, status_code=STATUS_UNAVAILABLE)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _RequireToken:
    """Refuses every path without the token: vLLM's own check leaves all but /v1 open."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await Response("this server asks for an access token", status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
