"""Starts and restarts the servers of a run as Ray actors.

consumes     orders of the client's supervisor: start, kill
produces     addresses
waits for    a server to be ready, up to `start_timeout_s`
unblocked by the server's answer, by its death, or by the deadline
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import ray
from ray.exceptions import RayError

from rl_core.errors import DeadlineError, GenerationError
from rl_rollout.vllm.placement import EnginePlace
from rl_rollout.vllm.server import ServerAddress, ServerSettings, StartFailure, VLLMServerActor, last_lines

logger = logging.getLogger(__name__)

_remote: Any = ray.remote
_ACTOR = _remote(max_restarts=0, max_task_retries=0)(VLLMServerActor)
_STOP_TIMEOUT_S = 15.0


@attrs.define(eq=False)
class Server:
    """One engine's server; `actor` changes when it is restarted."""

    index: int
    place: EnginePlace
    settings: ServerSettings
    environment: dict[str, str]
    start_timeout_s: float
    actor: Any = None

    async def start(self) -> ServerAddress:
        """Starts the actor and its engine.

        Raises:
            GenerationError: it could not start; the message has the engine's last log lines.
            DeadlineError: it was not ready in time; likewise.
        """
        environment = self.environment | self.place.environment()
        options = _ACTOR.options(runtime_env={"env_vars": environment}, **self.place.actor_options())
        self.actor = options.remote(self.settings.log_path)
        try:
            async with asyncio.timeout(self.start_timeout_s):
                answer = await self.actor.start.remote(self.settings)
        except TimeoutError:
            self.kill()
            raise DeadlineError(
                f"{self}: waited {self.start_timeout_s:g} s (generator.inference_engine.start_timeout_s) for it to be "
                f"ready; its last log lines ({self.settings.log_path}):\n{last_lines(Path(self.settings.log_path))}"
            ) from None
        except RayError as error:
            raise GenerationError(
                f"{self} died while it started: {' '.join(str(error).split())}; its last log lines "
                f"({self.settings.log_path}):\n{last_lines(Path(self.settings.log_path))}"
            ) from error
        if isinstance(answer, StartFailure):
            self.kill()
            raise GenerationError(
                f"{self} did not start: {answer.summary}; its last log lines ({self.settings.log_path}):\n"
                f"{answer.log_lines}"
            )
        # Started again, it listens where it did before.
        self.settings = attrs.evolve(self.settings, port=urlsplit(answer.url).port or 0)
        return answer

    def kill(self) -> None:
        """Ends the actor at once; its engine's processes notice and end too."""
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None

    async def stop(self) -> None:
        """Ends the actor in order, or at once if it does not answer."""
        if self.actor is None:
            return
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.actor.stop.remote()
        except (TimeoutError, RayError) as error:
            logger.warning("%s did not stop in order: %s", self, error or type(error).__name__)
        self.kill()

    def __str__(self) -> str:
        return f"vLLM server {self.index}"
