"""Runs a vLLM server, in a Ray actor or (`serve`) in the current process: one engine, with all its parallel ranks,
answers at one HTTP address.

consumes     HTTP requests; `load`, `start` and `stop` from the controller
produces     answers; log lines in its own file
waits for    the next request or call, until `stop` or until its process is killed
unblocked by the arrival of a request or call, on one event loop that the actor and uvicorn share
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from rl_core.errors import ConfigError
from rl_core.held_folders import make_folder, remove_folder
from rl_rollout.vllm import orphans
from rl_rollout.vllm.placement import SharedGpus
from rl_rollout.vllm.tokens import Tokens

T = TypeVar("T")
_KEEP_ALIVE_S = 75
"""Seconds until the server closes an idle connection. The client waits only 60 s, so the server never closes a
connection that the client is about to use."""
_BACKLOG = 4096
_STARTED = "---- this server's process started"
"""Beginning of the log line that each start of the server writes, because a restarted server appends to the same
file."""
_ERROR = re.compile(r"\b(ERROR|CRITICAL|Fatal Python error)\b")
_ERROR_LINES, _LOG_LINES = 10, 40
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
_MAX_SOCKETS_PATH = 70
"""Maximum length of the path of the sockets' folder: a slash and vLLM's socket name add 37 characters, and the kernel
allows 107."""


@attrs.frozen(kw_only=True)
class ServerSettings:
    """The settings with which a server starts, as plain data that Ray can send to its actor."""

    engine_args: Mapping[str, Any]
    """Fields of vLLM's AsyncEngineArgs."""
    host: str
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    tokens: Tokens
    """The control and the access token, with which requests are authorized."""
    receivers: tuple[str, ...] = ()
    """Weight receivers that the server may load besides the receivers of installed transports, as
    `package.module:Class`."""
    log_path: str
    """Log file on the server's machine."""


@attrs.frozen(kw_only=True)
class ServerAddress:
    """URL at which a server listens, and id of its process."""

    url: str
    pid: int


@attrs.frozen(kw_only=True)
class StartFailure:
    """Why a server did not start."""

    summary: str
    log_lines: str
    is_death: bool
    """Whether vLLM reported that a process of the engine had died (EngineDeadError). False if the process died while
    the engine started: vLLM then raises the same RuntimeError whether the process died or raised an error."""


class VLLMServerActor:
    """Ray actor that runs one server. `load` may take minutes."""

    def __init__(self, log_path: str, shared: SharedGpus | None = None) -> None:
        """
        Args:
            log_path: file to which this process and its child processes append their output.
            shared: the GPUs that the engine shares with training; None if it shares none.
        """
        if shared is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = shared.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._log_path = Path(log_path)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # The engine's child processes inherit both descriptors, so the file gets their output, too.
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        print(f"{_STARTED}: pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
        self._server: HTTPServer | None = None

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    async def load(self, settings: ServerSettings) -> StartFailure | None:
        """Loads the model. Returns None if this succeeded, else why it failed."""
        self._server = HTTPServer(settings)
        return await self._attempted(self._server.load())

    async def start(self) -> ServerAddress | StartFailure:
        """Warms up the engine and starts listening; call it after `load`. Returns the address, or why it failed."""
        assert self._server is not None
        return await self._attempted(self._server.start())

    async def _attempted(self, step: Awaitable[T]) -> T | StartFailure:
        try:
            return await step
        except Exception as error:
            await self.stop()
            return StartFailure(
                summary=f"{type(error).__name__}: {error}",
                log_lines=log_excerpt(self._log_path),
                is_death=type(error).__name__ == "EngineDeadError",  # no isinstance: importing vLLM may have failed
            )

    async def stop(self) -> None:
        """Ends the HTTP server and the engine."""
        if self._server is not None:
            await self._server.stop()


class HTTPServer:
    """Runs the engine and its HTTP server in the current event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._listening: Any = None
        self._engine: Any = None
        self._served: Any = None
        self._app: Any = None
        self._http: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._sockets = ""

    async def load(self) -> None:
        """Loads the model; blocks the event loop while the engine starts."""
        _allow_many_connections()
        orphans.mark()
        # vLLM never removes the sockets between its processes, so they get a folder that `stop` removes. If the server
        # is killed, the next `make_folder` on this machine removes the folder.
        self._sockets = make_folder(None, "sockets")
        has_other_machines = self._settings.engine_args.get("distributed_executor_backend") == "ray"
        if len(self._sockets) <= _MAX_SOCKETS_PATH and not has_other_machines:
            os.environ.setdefault(_SOCKETS_VARIABLE, self._sockets)
        # The port is bound before the engine is loaded, so that a port in use is detected at once.
        host, port = self._settings.host, self._settings.port
        try:
            self._listening = socket.create_server((host, port), backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen at {host}:{port}: {error}; choose another host or port"
            ) from error
        self._app = await self._make_app()

    async def start(self) -> ServerAddress:
        """Warms up the engine and starts listening; call it after `load`."""
        import uvicorn

        await self._served.warm_up()
        config = uvicorn.Config(self._app, log_level="warning", access_log=False, timeout_keep_alive=_KEEP_ALIVE_S)
        self._http = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listening]))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended while it was starting")
            await asyncio.sleep(0.02)
        host, port = self._listening.getsockname()[:2]
        return ServerAddress(url=f"http://{reachable(host)}:{port}", pid=os.getpid())

    async def stop(self) -> None:
        """Ends the HTTP server and the engine; a second call does nothing."""
        if self._http is not None and self._serving is not None:
            self._http.should_exit = self._http.force_exit = True
            await self._serving
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        remove_folder(self._sockets)

    async def _make_app(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        from rl_rollout.chat import codec_of
        from rl_rollout.transports.receivers import installed_receivers
        from rl_rollout.turn_ends import template_ends
        from rl_rollout.vllm import fixes
        from rl_rollout.vllm.adapters import EngineWithAdapter, NamedAdapters
        from rl_rollout.vllm.routes import with_routes
        from rl_rollout.vllm.served_engine import ServedEngine

        args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        args.allowed_origins = []  # by default any web page could read the server's answers in a browser
        for name, value in self._settings.engine_args.items():
            setattr(args, name, value)
        fixes.allow_sampling_masks_on_cpu()
        engine_class = EngineWithAdapter if args.enable_lora else AsyncLLM
        self._engine = engine = engine_class.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        if args.enable_lora:
            await engine.collective_rpc("rl_start_adapter")
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        ends = template_ends(codec_of(args.model, chat_template_kwargs={}))
        for handler in app.state._state.values():  # of /v1/chat/completions and /v1/messages
            if isinstance(handler, OpenAIServingChat):
                # vLLM itself stops only at the model's end tokens, and a base model's are not those of the template.
                known = handler.default_sampling_params.get("stop_token_ids", ())
                handler.default_sampling_params["stop_token_ids"] = list({*known, *ends})
        adapters = NamedAdapters(engine, app.state.openai_serving_models) if args.enable_lora else None
        receivers = installed_receivers() | set(self._settings.receivers)
        self._served = ServedEngine(engine, adapters, receivers=receivers)
        return with_routes(app, self._served, tokens=self._settings.tokens)


def log_excerpt(path: Path) -> str:
    """Returns the first errors and the last lines that a server has logged since its last start, or why the log cannot
    be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"({path} cannot be read: {error})"
    started = max((i for i, line in enumerate(lines) if line.startswith(_STARTED)), default=0)
    earlier, last = lines[started:-_LOG_LINES], lines[started:][-_LOG_LINES:]
    errors = [line for line in earlier if _ERROR.search(line)]
    return "\n".join([*errors[:_ERROR_LINES], *(["..."] if errors else []), *last])


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def reachable(host: str) -> str:
    """Returns `host` as it is written in a URL. If `host` means all interfaces, returns the node's own address, to
    which other machines can connect."""
    if host not in ("0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    import ray.util

    return ray.util.get_node_ip_address()
