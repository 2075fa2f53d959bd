"""A small backend with real processes: its ranks communicate over gloo and can be made to fail.

The model is one weight. `forward` returns `tokens · weight + temperature` as log-probs and the rank's number as
entropies. The gradient is the sum of `loss_weights · tokens` over all tokens, and a step subtracts it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import CheckpointError
from rl_core.interfaces import (
    Backend,
    LossSpec,
    Manifest,
    Metrics,
    ModelConfig,
    OptimizerConfig,
    OptimizerStep,
    Plan,
    RankInfo,
    Rendezvous,
    TensorRecord,
    WeightBucket,
    WeightSender,
    WeightTransport,
    Worker,
    WorkerSpec,
)
from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class GlooOptions:
    """The mesh, and which rank fails where and how."""

    tensor: int = 1
    pipeline: int = 1
    phase: str = ""
    """Where the fault occurs: start, forward, backward, optim_step or save_state."""
    rank: int = 0
    """The rank that fails; -1 for all ranks."""
    fault: str = ""
    """kill (SIGKILL), stop (SIGSTOP), raise, user (raises CheckpointError), hang, exit, system_exit, cancelled, or
    compute (10 s in which no Python thread can answer)."""
    children: str = ""
    """Each rank starts a child process `sleep` with this argument, by which tests find it. Empty: none."""
    delay_s: float = 0.0
    """Shortest duration of a `forward` call."""


@attrs.frozen(kw_only=True)
class GlooBackend(Backend):
    """The backend of `GlooWorker`."""

    name: str = "gloo"
    config_section: str = "gloo_config"
    options_class: type = GlooOptions

    def mesh(self, options: GlooOptions, world_size: int) -> Mesh:
        return Mesh(world_size=world_size, tensor=options.tensor, pipeline=options.pipeline)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def needs_own_process(self) -> bool:
        return True

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        return GlooWorker(spec.options, rank)


def spec_of(role: Any = "policy", **options: Any) -> WorkerSpec:
    """The spec of a model with these options; a policy by default."""
    return WorkerSpec(
        role=role,
        model=ModelConfig(),
        optimizer=OptimizerConfig(),
        options=GlooOptions(**options),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=1,
        total_optimizer_steps=None,
        seed=0,
        num_threads=1,
    )


class GlooWorker(Worker):
    """One rank, with methods that only tests call."""

    can_offload = True

    def __init__(self, options: GlooOptions, rank: RankInfo):
        self.options = options
        self.rank = rank
        self.mesh = Mesh(world_size=rank.world_size, tensor=options.tensor, pipeline=options.pipeline)
        self.thread = threading.get_ident()
        self.weight = torch.ones(1)
        self.gradient = torch.zeros(1)
        self.is_on_device = True
        self.received: dict[str, Any] = {}
        if options.children:
            subprocess.Popen(["sleep", options.children])
        self._fail_in("start")
        address = f"tcp://{rank.master_address}:{rank.master_port}"
        dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)

    def forward(self, batch: Batch, plan: Plan, *, temperature: float, returns: Any = None) -> dict[str, Tensor]:
        self._fail_in("forward")
        time.sleep(self.options.delay_s)
        self._require_same_number_of(plan)
        logprobs_T = batch["tokens"] * self.weight + temperature
        return {"logprobs": logprobs_T, "entropies": torch.full_like(logprobs_T, float(self.rank.rank))}

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Any = ()
    ) -> Metrics:
        self._require_same_number_of(plan)
        computed = [batch.select(list(micro_batch)) for micro_batch in plan if micro_batch]
        gradient = sum(float((part["loss_weights"] * part["tokens"]).sum()) for part in computed)
        self._fail_in("backward")
        replicas = self.mesh.world_size // self.mesh.data
        self.gradient += self._total(gradient) / replicas
        return {"loss": (gradient, 1.0), "tokens": (float(sum(part.num_tokens for part in computed)), 1.0)}

    def optim_step(self, update: Any = None) -> OptimizerStep:
        self._total(0.0)  # waits until all ranks are in this call; only then may one fail
        self._fail_in("optim_step")
        self._total(0.0)
        step = OptimizerStep(grad_norm=abs(float(self.gradient)), learning_rate=1.0, skipped=False)
        self.weight = self.weight - self.gradient
        self.gradient = torch.zeros(1)
        return step

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        yield from ()

    def publish(
        self, sender: WeightSender, version: int, max_bucket_bytes: int, *, only_trained: bool = False
    ) -> Manifest:
        self._total(0.0)
        name = f"weight.{self.rank.rank}"
        record = TensorRecord(shape=(1,), dtype="float32", checksum=max_bucket_bytes)
        return Manifest(version=version, tensors={name: record})

    def save_state(self, directory: Path) -> None:
        self._total(0.0)
        torch.save(self.weight, directory / f"{self.rank.rank}.pt")
        self._fail_in("save_state")
        self._total(0.0)

    def load_state(self, directory: Path) -> None:
        path = directory / f"{self.rank.rank}.pt"
        if not path.exists():
            raise CheckpointError(f"{path}: missing")
        self.weight = torch.load(path)

    def save_model(self, directory: Path) -> None:
        (directory / f"model.{self.rank.rank}").write_text(str(float(self.weight)))

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        self.is_on_device = False

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        self.is_on_device = True

    def route_layers(self) -> tuple[int, ...]:
        """Each pipeline stage has one layer, with the stage's number."""
        return (self.mesh.coordinates(self.rank.rank).pipeline,)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- only tests call these ---

    def describe(self) -> dict[str, Any]:
        """Properties of the rank's process: selected environment variables, process id, threads, device and node."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        return {
            **{name: os.environ.get(name) for name in names},
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "same_thread": threading.get_ident() == self.thread,
            "is_on_device": self.is_on_device,
            "node": ray.get_runtime_context().get_node_id(),
        }

    def columns_of(self, batch: Batch, plan: Plan) -> dict[str, Any]:
        """The columns and the plan that this rank received, and the mapped file in which the tokens lie."""
        self.received = {
            "columns": {name: values.tolist() for name, values in batch.columns.items()},
            "plan": plan,
            "mapped": mapped_file(batch["tokens"]),
        }
        return self.received

    def received_before(self) -> dict[str, Any]:
        """What `columns_of` last received on this rank. Tests call `received_before` on all ranks, because a call of
        `columns_of` returns the results of only the last pipeline stage."""
        return self.received

    def _require_same_number_of(self, plan: Plan) -> None:
        total = self._total(float(len(plan)))
        assert total == len(plan) * self.rank.world_size, "ranks have different numbers of micro-batches"

    def _total(self, value: float) -> float:
        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total)

    def _fail_in(self, phase: str) -> None:
        options = self.options
        if options.phase != phase or options.rank not in (-1, self.rank.rank):
            return
        if options.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif options.fault == "stop":
            # Another thread may receive a SIGSTOP sent to the process; this thread would then run on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif options.fault == "raise":
            raise ValueError(f"told to fail in {phase}")
        elif options.fault == "user":
            raise CheckpointError(f"told to fail in {phase}")
        elif options.fault == "hang":
            time.sleep(600)
        elif options.fault == "compute":
            sys.setswitchinterval(60.0)  # otherwise, another thread would get the interpreter lock after 5 ms
            end = time.monotonic() + 10
            while time.monotonic() < end:
                sum(range(1_000_000))
            sys.setswitchinterval(0.005)
        elif options.fault == "exit":
            os._exit(3)
        elif options.fault == "system_exit":
            sys.exit(0)
        elif options.fault == "cancelled":
            raise asyncio.CancelledError


def mapped_file(tensor: Tensor) -> str:
    """The path of the memory-mapped file that contains the tensor; empty if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.split(maxsplit=5)[-1]
    return ""


class NothingTransport(WeightTransport):
    """A weight transport that sends nothing; ranks return only their manifests."""

    name = f"{__name__}:transport"
    is_staged = True

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        return Rendezvous(transport=self.name, receiver="", data={})

    def close(self, rendezvous: Rendezvous) -> None:
        pass

    def sender(self, rendezvous: Any, rank: int, world_size: int) -> None:
        return None


transport = NothingTransport()
