"""Calls two ranks again and again, and kills or stops one of Ray's own servers meanwhile. Prints the RLError that
a call raises, and exits with code 0. Any other error ends the process with code 1.

python -m tests.ray.lost_server raylet|gcs_server SIGNAL
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading

import psutil

from rl_core.cli.app import _end_without_finalising
from rl_core.errors import RLError
from rl_core.workers import MicroBatchLimits, WorkerGroup
from tests.ray.conftest import START_S
from tests.ray.gloo_backend import GlooBackend, spec_of
from tests.ray.test_dispatch import batch_of


def strike(server: str, number: signal.Signals) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == server:
                process.send_signal(number)


async def main(server: str, number: signal.Signals) -> None:
    group = await WorkerGroup.launch(GlooBackend(), spec_of(), ranks_per_node=2, timeout_s=START_S, silence_s=10)
    threading.Timer(0.5, strike, (server, number)).start()
    try:
        while True:
            await group.forward(batch_of([3, 4, 5]), MicroBatchLimits(max_sequences=1), temperature=1.0)
            await asyncio.sleep(0.05)
    except RLError as error:
        print(f"{type(error).__name__}: {error}")
    await group.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], signal.Signals[sys.argv[2]]))
    _end_without_finalising(0)
