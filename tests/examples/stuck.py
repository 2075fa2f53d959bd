"""A backend whose rank runs in the run's own process and is in a long call when Ctrl-C is pressed twice."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import torch

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend


class Noticed(logging.Handler):
    """Waits for the run's message that it has noticed the first signal."""

    def __init__(self) -> None:
        super().__init__()
        self._is_noticed = threading.Event()
        logging.getLogger("rl_core.trainer.loop.interrupts").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._is_noticed.set()

    def wait(self) -> None:
        assert self._is_noticed.wait(200), "the run did not notice Ctrl-C within 200 s"


class StuckFsdp(FsdpBackend):
    """The rank's second forward pass sends SIGINT twice and then lasts ten minutes, in many short operations."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_fsdp.worker import FsdpWorker

        class StuckWorker(FsdpWorker):
            num_calls = 0

            def forward(self, *args, **kwargs):
                self.num_calls += 1
                if self.num_calls == 2:
                    noticed = Noticed()
                    os.kill(os.getpid(), signal.SIGINT)
                    noticed.wait()
                    time.sleep(1.05)  # a second signal within 1 s counts as the same key press
                    os.kill(os.getpid(), signal.SIGINT)
                    end = time.monotonic() + 600
                    while time.monotonic() < end:
                        torch.randn(100).sum()
                return super().forward(*args, **kwargs)

        return StuckWorker(spec, rank)


backend = StuckFsdp()
