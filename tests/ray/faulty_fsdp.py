"""The FSDP backend with an injected fault: one rank kills its own process in the middle of a chosen phase."""

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
"""Phase → the worker methods that the group may be calling when the rank dies in that phase."""


@attrs.frozen(kw_only=True)
class FaultyOptions(FsdpOptions):
    """`fsdp_config` with keys that say which rank dies, and where."""

    fault_phase: str = ""
    """One of PHASES; empty: no rank dies."""
    fault_rank: int = 0
    fault_time: int = 0
    """How many times the rank passes the place of the fault before it dies there; 0: it dies the first time."""
    fault_layer: int = 0
    """Index of the decoder layer; the rank dies just before this layer's forward (in scoring) or backward pass."""


@attrs.frozen(kw_only=True)
class FaultyFsdp(FsdpBackend):
    """Installs the fault of `FaultyOptions` in the worker of `fault_rank`."""

    name: str = "faulty_fsdp"
    options_class: type = FaultyOptions

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        worker = super().create_worker(spec, rank)
        if spec.options.fault_phase and spec.options.fault_rank == rank.rank:
            _install(worker, spec.options)
        return worker


def _install(worker: Any, options: FaultyOptions) -> None:
    import torch

    import rl_transformers.rank.state
    from rl_transformers.rank.distributing import decoder_layers

    passed = count()

    def die_if_due() -> None:
        if next(passed) == options.fault_time:
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingWriter(rl_transformers.rank.state.FileSystemWriter):
        """Kills the process once this rank's file is written, while the other ranks wait for its result."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = super().write_data(plan, planner)
            results.wait()
            die_if_due()
            return results

    def write_and_die(method: str) -> None:
        write, writer = getattr(worker, method), rl_transformers.rank.state.FileSystemWriter

        def call(*args: Any) -> None:
            rl_transformers.rank.state.FileSystemWriter = DyingWriter
            write(*args)
            rl_transformers.rank.state.FileSystemWriter = writer

        setattr(worker, method, call)

    layer = decoder_layers(worker.scorer)[options.fault_layer]
    faults: dict[str, Callable[[], Any]] = {
        "forward": lambda: layer.register_forward_pre_hook(
            lambda *_: None if torch.is_grad_enabled() else die_if_due()
        ),
        "backward": lambda: layer.register_full_backward_pre_hook(lambda *_: die_if_due()),
        "optim_step": lambda: worker.optimizer.register_step_pre_hook(lambda *_: die_if_due()),
        "save_state": lambda: write_and_die("save_state"),
        "start_saving": lambda: write_and_die("start_saving"),
    }
    faults[options.fault_phase]()


faulty_fsdp = FaultyFsdp()
