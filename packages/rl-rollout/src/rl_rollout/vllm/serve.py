"""Starts a vLLM server outside a run, and without Ray, for `generator.inference_engine.external_server_urls`.

    RL_CONTROL_TOKEN_FILE=FILE python -m rl_rollout.vllm.serve quickstart trainer.policy.model.path=DIRECTORY

The server is the same as one that a run starts. Model, dtype, weight transport and vLLM's keys come from the
configuration, whichever engine that configuration chooses. FILE has the control token, which a run must send; the
server creates FILE if it is missing. SIGINT or SIGTERM ends the server; a server that is still starting ends once it
has started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from rl_core.config import engine_spec, load
from rl_core.config.file_checks import gather_policy_model
from rl_core.errors import Mistakes, RLError
from rl_rollout.vllm.engine_arguments import engine_arguments, ranks_per_engine
from rl_rollout.vllm.launch import cpu_environment, receivers_of
from rl_rollout.vllm.plugin import vllm
from rl_rollout.vllm.server import HTTPServer, ServerSettings
from rl_rollout.vllm.tokens import given_tokens

_ENGINE = "generator.inference_engine.backend"


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rl_rollout.vllm.serve", description=__doc__)
    parser.add_argument("config", help="a recipe's name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_intermixed_args(arguments)
    if not 0 <= given.port <= 65535:
        parser.error(f"--port: got {given.port}; expected 0 (a free port) to 65535")
    try:
        settings = _settings(given.config, given.overrides, given.host, given.port)
        asyncio.run(_serve(settings))
    except RLError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _settings(source: str, overrides: Sequence[str], host: str, port: int) -> ServerSettings:
    others = [override for override in overrides if override.partition("=")[0].strip() != _ENGINE]
    config = load(source, [*others, f"{_ENGINE}=vllm"]).config
    _, spec = engine_spec(config)
    vllm.validate(attrs.evolve(spec, options=attrs.evolve(spec.options, external_server_urls=None)))
    tokens, mistakes = given_tokens(makes_file=True), Mistakes()
    gather_policy_model(config, mistakes, makes=())
    mistakes.raise_found()
    import torch

    has_gpus = torch.cuda.is_available()
    if not has_gpus:
        os.environ.update(cpu_environment(ranks_per_engine(spec.options)))
    return ServerSettings(
        engine_args=engine_arguments(spec, has_gpus=has_gpus),
        host=host,
        port=port,
        tokens=tokens,
        receivers=receivers_of(spec),
        log_path="",
    )


async def _serve(settings: ServerSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server, began = HTTPServer(settings), time.monotonic()

    def say(state: str) -> None:
        print(f"{state}, {time.monotonic() - began:.0f} s after the start", flush=True)

    try:
        say(f"loading {settings.engine_args['model']}")
        await server.load()
        say("warming up")
        address = await server.start()
        say(f"serving at {address.url}")
        await stopped.wait()
    finally:
        await server.stop()


def _leave_working_directory_out() -> None:
    """Removes the working directory from `sys.path`, where `python -m` puts it first: a server loads only installed
    modules."""
    here = next((path for path in sys.path if path in ("", str(Path.cwd()))), None)
    if here is not None and not sys.flags.safe_path:
        # Not `del sys.path[0]`, because Ray has inserted its own folders at the front. Only the first entry for the
        # working directory is removed, because PYTHONPATH may name it again.
        sys.path.remove(here)


if __name__ == "__main__":
    _leave_working_directory_out()
    sys.exit(main(sys.argv[1:]))
