"""Stage 3 moves weights and moments off the device and back between the phases of a step.

On a CPU-only machine, offloading does nothing. Here the worker makes DeepSpeed move all the same, from the CPU to the
CPU.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_core.testing.backend import PRELOADED, open_case
from rl_deepspeed.backend import DeepSpeedBackend
from tests.deepspeed import test_conformance

PRELOADED.update(dict.fromkeys(["rl_deepspeed.worker"]))


@attrs.frozen
class MovingBackend(DeepSpeedBackend):
    """DeepSpeed with a worker that moves its shards on every device."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_deepspeed.worker import DeepSpeedWorker

        class MovingWorker(DeepSpeedWorker):
            def offload(self, *, parameters: bool, optimizer: bool) -> None:
                self.shards.move(torch.device("cpu"), parameters=parameters, optimizer=optimizer)

            def onload(self, *, parameters: bool, optimizer: bool) -> None:
                # With an optimizer, only the device's type is read: not the CPU's means back.
                self.shards.move(torch.device("cuda"), parameters=parameters, optimizer=optimizer)

        return MovingWorker(spec, rank)


def test_steps_with_offloading_between_all_phases_are_those_without(tmp_path: Path):
    suite = test_conformance.TestDeepSpeed()
    with open_case(MovingBackend(), suite.options, test_conformance.ONE, tmp_path) as case:
        suite.check_offloading(case, case.start(), num_steps=3)
