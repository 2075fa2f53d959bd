"""Stage 3 moves weights and moments off the device and back between the phases of a step.

On a CPU-only machine, offloading does nothing. The worker of these tests makes DeepSpeed offload even there, from the
CPU to the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_deepspeed.backend import DeepSpeedBackend
from rl_transformers.testing.backend import PRELOADED, open_case
from tests.deepspeed import test_conformance

ON_CPU = test_conformance.ON_CPU
HOST_STATES = {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_grads}
PRELOADED.update(dict.fromkeys(["rl_deepspeed.worker"]))


@attrs.frozen
class MovingBackend(DeepSpeedBackend):
    """DeepSpeed with a worker that offloads its shards even without an accelerator."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_deepspeed.worker import DeepSpeedWorker

        class MovingWorker(DeepSpeedWorker):
            def offload(self, *, parameters: bool, optimizer: bool) -> None:
                self.shards.move(torch.device("cpu"), parameters=parameters, optimizer=optimizer)
                if spec.options.zero_optimization.offload_optimizer.device == "cpu":
                    moved = self.shards.optimizer.offloaded_states
                    assert not moved & HOST_STATES, "DeepSpeed must not move states that stay on the host"

            def onload(self, *, parameters: bool, optimizer: bool) -> None:
                # If there is an optimizer, `move` brings the shards back for any device type but `cpu`.
                self.shards.move(torch.device("cuda"), parameters=parameters, optimizer=optimizer)

        return MovingWorker(spec, rank)


@pytest.mark.parametrize("others", [{}, ON_CPU], ids=["optimizer on the device", "optimizer on the CPU"])
def test_offloading_between_all_phases_does_not_change_the_steps(others: dict[str, Any], tmp_path: Path):
    suite = test_conformance.TestDeepSpeed()
    variant = attrs.evolve(test_conformance.ONE, options=test_conformance.zero(3, **others))
    with open_case(MovingBackend(), suite.options, variant, tmp_path) as case:
        suite.check_offloading(case, case.start(), num_steps=3)
