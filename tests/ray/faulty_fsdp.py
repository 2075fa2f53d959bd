"""The FSDP backend with one rank that kills itself at a chosen point in the middle of a call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Any

import attrs

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_fsdp.backend import FsdpBackend, FsdpOptions

PHASES = ("forward", "backward", "optim_step", "save_state", "start_saving")
METHODS = {
    "forward": ("forward",),
    "backward": ("forward_backward",),
    "optim_step": ("optim_step",),
    "save_state": ("save_state",),
    "start_saving": ("start_saving", "has_saved"),
}
"""Phase of the fault → the calls of the group that may be running when it occurs."""


@attrs.frozen(kw_only=True)
class FaultyOptions(FsdpOptions):
    """The options of `fsdp_config`, and the fault."""

    fault_phase: str = ""
    """One of PHASES; empty for no fault."""
    fault_rank: int = 0
    fault_time: int = 0
    """How often the rank passes the point of the fault before it dies there."""
    fault_layer: int = 0
    """The decoder layer before which the rank dies in a forward or backward pass."""


@attrs.frozen(kw_only=True)
class FaultyFsdp(FsdpBackend):
    """`FsdpBackend` whose rank `fault_rank` kills itself."""

    name: str = "faulty_fsdp"
    options_class: type = FaultyOptions

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        worker = super().create_worker(spec, rank)
        if spec.options.fault_phase and spec.options.fault_rank == rank.rank:
            _install(worker, spec.options)
        return worker


def _install(worker: Any, options: FaultyOptions) -> None:
    import torch

    import rl_core.rank_kit.scoring.state
    from rl_core.rank_kit.scoring.distributing import decoder_layers

    passed = count()

    def come_by() -> None:
        if next(passed) == options.fault_time:
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingWriter(rl_core.rank_kit.scoring.state.FileSystemWriter):
        """Dies when this rank's file is written and the other ranks wait for its result."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner)
            results.wait()
            come_by()
            return results

    def write_and_die(method: str) -> None:
        write, writer = getattr(worker, method), rl_core.rank_kit.scoring.state.FileSystemWriter

        def call(*args: Any) -> None:
            rl_core.rank_kit.scoring.state.FileSystemWriter = DyingWriter
            write(*args)
            rl_core.rank_kit.scoring.state.FileSystemWriter = writer

        setattr(worker, method, call)

    layer = decoder_layers(worker.scorer)[options.fault_layer]
    faults: dict[str, Callable[[], Any]] = {
        "forward": lambda: layer.register_forward_pre_hook(lambda *_: None if torch.is_grad_enabled() else come_by()),
        "backward": lambda: layer.register_full_backward_pre_hook(lambda *_: come_by()),
        "optim_step": lambda: worker.optimizer.register_step_pre_hook(lambda *_: come_by()),
        "save_state": lambda: write_and_die("save_state"),
        "start_saving": lambda: write_and_die("start_saving"),
    }
    faults[options.fault_phase]()


faulty_fsdp = FaultyFsdp()
