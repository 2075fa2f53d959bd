"""Starts and restarts the servers of a run as Ray actors.

consumes     the supervisor's calls of `start`, `kill` and `stop`
produces     addresses
waits for    a server to be ready, up to `start_timeout_s`
unblocked by the server's answer, by its death, or by the deadline
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import ray
from ray.exceptions import RayError

from rl_core.errors import DeadlineError, GenerationError
from rl_rollout.vllm.placement import EnginePlace
from rl_rollout.vllm.server import ServerAddress, ServerSettings, StartFailure, VLLMServerActor, log_excerpt

logger = logging.getLogger(__name__)

_remote: Any = ray.remote
_ACTOR = _remote(max_restarts=0, max_task_retries=0)(VLLMServerActor)
_STOP_TIMEOUT_S = 15.0
_ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
"""Makes a crashing process write its stack to the log."""


class _ProcessDied(GenerationError):
    """The server or its engine was killed or crashed while starting."""


@attrs.define(eq=False)
class Server:
    """The server of one engine. Each start creates a new `actor`; the port and the reserved GPUs stay the same."""

    index: int
    place: EnginePlace
    settings: ServerSettings
    environment: dict[str, str]
    start_timeout_s: float
    actor: Any = None

    async def start(self) -> ServerAddress:
        """Starts the actor and its engine; retries once if one of their processes dies meanwhile.

        Raises:
            GenerationError: the server could not start; the message has lines of the engine's log.
            DeadlineError: the server was not ready in time; the message has log lines too.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.start_timeout_s):
                try:
                    address = await self._attempt(began)
                except _ProcessDied as error:
                    logger.warning("%s failed to start and is started once more: %s", self, error)
                    self.kill()
                    address = await self._attempt(began)
        except TimeoutError:
            self.kill()
            raise DeadlineError(
                f"{self}: waited {self.start_timeout_s:g} s (generator.inference_engine.start_timeout_s) for it to be "
                f"ready; {self._log()}"
            ) from None
        except BaseException:  # not only Exception: the run may be cancelled meanwhile
            self.kill()
            raise
        logger.info("%s: ready after %.0f s", self, time.monotonic() - began)
        # After a restart, the server listens on the same port.
        self.settings = attrs.evolve(self.settings, port=urlsplit(address.url).port or 0)
        return address

    async def _attempt(self, began: float) -> ServerAddress:
        environment = _ENVIRONMENT | self.environment | self.place.environment()
        options = _ACTOR.options(runtime_env={"env_vars": environment}, **self.place.actor_options())
        self.actor = options.remote(self.settings.log_path, self.place.shared)
        model = self.settings.engine_args["model"]
        logger.info("%s: loading %s, %.0f s after its start", self, model, time.monotonic() - began)
        try:
            answer = await self.actor.load.remote(self.settings)
            if answer is None:
                logger.info("%s: warming up, %.0f s after its start", self, time.monotonic() - began)
                answer = await self.actor.start.remote()
        except RayError as error:
            raise _ProcessDied(
                f"{self} died while it started: {' '.join(str(error).split())}; {self._log()}"
            ) from error
        if isinstance(answer, StartFailure):
            kind = _ProcessDied if answer.is_death else GenerationError
            raise kind(f"{self} did not start: {answer.summary}; {self._log(answer.log_lines)}")
        return answer

    def _log(self, lines: str | None = None) -> str:
        """Formats log lines for a message. `lines` are log lines that the server itself has read, perhaps on another
        node; None: reads the log file on this node."""
        lines = log_excerpt(Path(self.settings.log_path)) if lines is None else lines
        return f"from its log ({self.settings.log_path}):\n{lines}"

    def kill(self) -> None:
        """Ends the actor at once; its engine's processes notice and end too."""
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None

    async def stop(self) -> None:
        """Shuts down the actor, or kills it if it does not answer."""
        if self.actor is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.actor.stop.remote()
        except (TimeoutError, RayError) as error:
            logger.warning("%s did not stop cleanly: %s", self, error or type(error).__name__)
        self.kill()

    def __str__(self) -> str:
        return f"vLLM server {self.index}"
