"""An actor whose loads fail. It has a module of its own, because its process imports the module. Importing the tests'
module would take 5 s of processor time.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rl_rollout.vllm.server import ServerAddress, ServerSettings, StartFailure


class Dying:
    """Each of its first `deaths` loads fails as `kind` says; its log file counts the loads."""

    def __init__(self, log_path: str, shared: object) -> None:
        self._log_path = Path(log_path)

    def load(self, settings: ServerSettings) -> StartFailure | None:
        """Fails as the engine arguments say, or returns None."""
        with self._log_path.open("a") as log:
            log.write("started\n")
        deaths, kind = settings.engine_args["deaths"], settings.engine_args["kind"]
        if len(self._log_path.read_text().splitlines()) > deaths:
            return None
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs":
            time.sleep(3600)
        return StartFailure(summary=kind, log_lines="a line", is_death=kind == "engine died")

    def start(self) -> ServerAddress:
        """Returns an address where nobody listens."""
        return ServerAddress(url="http://127.0.0.1:8000", pid=os.getpid())
