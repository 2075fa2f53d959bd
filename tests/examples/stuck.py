"""A backend whose rank runs in the run's own process and is in a long call when Ctrl-C is pressed twice."""

from __future__ import annotations

import os
import signal
import time

import torch

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend


class StuckFsdp(FsdpBackend):
    """The rank's second forward pass sends SIGINT twice and then lasts ten minutes, in many short operations."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_fsdp.worker import FsdpWorker

        class StuckWorker(FsdpWorker):
            num_calls = 0

            def forward(self, *args, **kwargs):
                self.num_calls += 1
                if self.num_calls == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(5)  # on a busy machine the main thread may take long to handle the first signal
                    os.kill(os.getpid(), signal.SIGINT)
                    end = time.monotonic() + 600
                    while time.monotonic() < end:
                        torch.randn(100).sum()
                return super().forward(*args, **kwargs)

        return StuckWorker(spec, rank)


backend = StuckFsdp()
