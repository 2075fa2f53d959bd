"""The ranks of a backend under test, and a handle (`RankGroup`) that calls them as the controller does.

If the backend does not need a separate process, a single rank runs in the test's process, where a debugger works. In
all other cases, ranks run in processes forked from a server that has imported torch, transformers and the backend, but
computed nothing. Two ranks then start in 0.15 s; new interpreters would take 7 s. No test gets ranks that another test
has changed. Ray is not needed (the extra `testing` does not contain it); other tests check that ranks work as Ray
actors, which does not depend on the backend.

As in a training run, `WorkerGroup` divides each batch among the ranks and into micro-batches, and adds up the metrics.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Concatenate, Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import DeadlineError, RLError, WorkerError
from rl_core.interfaces import (
    Backend,
    LossSpec,
    Manifest,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    RankInfo,
    Worker,
    WorkerSpec,
)
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import open_store
from rl_core.rank_kit.route_layers import with_routes_of
from rl_core.rank_kit.weight_buckets import merge_manifests, require_same, tensor_record
from rl_core.testing.recording_transport import Published, RecordingTransport
from rl_core.workers.devices import SharedDevices, Tenant
from rl_core.workers.group import MicroBatchLimits, WorkerGroup
from rl_core.workers.rank import Abilities, P, Part, R, RankHost
from rl_transformers.testing.rank_process import Setting, SuiteFailure, SuiteHost, serve

PRELOADED = dict.fromkeys(
    ["torch.distributed", "transformers.models.qwen3.modeling_qwen3", "pytest", "rl_transformers.testing.backend"]
)
"""Modules that the fork server imports once. A suite adds the modules of its backend before the first ranks start."""
ONE_MICRO_BATCH = MicroBatchLimits()
_START_S = 240.0
"""Shortest deadline of a start, in which a rank imports modules and loads its model."""
_SETTLE_S, _LONGEST_SETTLE_S = 3.0, 30.0
"""After a rank has failed, others may still fail as a consequence or report the same mistake. So a call waits until
none of them has worked for `_SETTLE_S` seconds, but at most `_LONGEST_SETTLE_S`. Ranks without an answer then count as
silent."""
_LOOK_S, _WORK_SHARE = 0.1, 0.1
"""Seconds between two checks of whether a rank works. A rank works if one of its threads is busy for more than
`_WORK_SHARE` of this time. A rank that only waits has dozens of gloo's threads, each of which is busy for about a
hundredth of the time, because it polls a connection."""
_END_S = 60.0
"""Longest wait for the exit code of a process that has closed its connection."""
_STACK_S = 30.0
"""Longest wait for the stack of a hanging rank, which the rank writes shortly before its deadline."""


class SuiteRanks(Protocol):
    """`rl_core.workers.rank.Ranks`, with the results of the latest call."""

    abilities: Abilities
    last_results: Sequence[Any]
    """Results of the latest call, by rank."""

    @property
    def has_ended(self) -> bool:
        """Whether no further call is possible."""
        ...

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]: ...

    async def close(self) -> None: ...


class LocalRank:
    """The only rank of a group, in this process and thread."""

    def __init__(self, backend: Backend, spec: WorkerSpec):
        self._host: SuiteHost | None = SuiteHost(backend, spec, RankInfo())
        self.abilities = self._host.abilities
        self.last_results: Sequence[Any] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the rank was closed."""
        return self._host is None

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `Ranks.call`. Raises the worker's exceptions unchanged."""
        if self._host is None:
            raise WorkerError(f"rank 0 cannot run {method.__name__}: it is closed")
        result = self._host.bound(method)(*args, **kwargs)
        self.last_results = [result]
        return [result]

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """See `Ranks.call_on_parts`."""
        return [*await self.call(method, *parts[0].of(batch), *args, **kwargs)]

    async def close(self) -> None:
        """Closes the worker twice, to check that a second call is harmless."""
        if self._host is not None:
            await self.call(Worker.close)
            await self.call(Worker.close)
            self._host = None


class ProcessRanks:
    """Ranks in separate processes."""

    def __init__(self, backend: Backend, spec: WorkerSpec, mesh: Mesh, timeout_s: float):
        context = fork_server()
        self._mesh = mesh
        self._folder = tempfile.TemporaryDirectory(prefix="rl-ranks-")
        num_gpus = torch.cuda.device_count()
        self._setting = Setting(
            directory=self._folder.name, timeout_s=timeout_s, hides_gpus=0 < num_gpus < mesh.world_size
        )
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._ended: str | None = None
        self.last_results: Sequence[Any] = ()
        self._store = open_store()
        for rank in range(mesh.world_size):
            info = RankInfo(rank=rank, world_size=mesh.world_size, local_rank=rank, master_port=self._store.port)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, backend, spec, info, self._setting), daemon=True, name=f"rank {rank}"
            )
            process.start()
            theirs.close()  # while this end is open, the death of the process does not close the connection
            self._processes.append(process)
            self._connections.append(ours)
        try:
            start_s, nothing = max(timeout_s, _START_S), [((), {})] * mesh.world_size
            self.abilities: Abilities = self._exchange(SuiteHost.start, nothing, start_s)[0]
            self._route_layers = self._exchange(Worker.route_layers, nothing, start_s)
        except BaseException:
            self._end("their start failed")
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the ranks were closed, or killed after a failed call (see `_error_of`)."""
        return self._ended is not None

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `Ranks.call`. Blocks the event loop, because a suite has nothing else to do."""
        return self._exchange(method, [(args, kwargs)] * self._mesh.world_size)

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """See `Ranks.call_on_parts`; here every rank returns its result."""
        arguments = []
        for rank, layers in enumerate(self._route_layers):
            part = parts[self._mesh.data_rank(rank)]
            sent = with_routes_of(batch.select(torch.from_numpy(part.sent)), layers)
            arguments.append(((sent, part.plan, *args), kwargs))
        return self._exchange(method, arguments)

    async def close(self) -> None:
        """Closes the workers twice, to check that a second call is harmless, and ends the processes."""
        try:
            if self._ended is None:
                await self.call(Worker.close)
                await self.call(Worker.close)
        finally:
            self._end("they were closed")

    def _exchange(
        self, method: Callable[..., Any], arguments: Sequence[tuple[Any, Any]], timeout_s: float | None = None
    ) -> list[Any]:
        """Calls a method on every rank. `timeout_s` replaces the deadline of the setting."""
        timeout_s = self._setting.timeout_s if timeout_s is None else timeout_s
        if self._ended is not None:
            raise WorkerError(f"cannot run {method.__name__}, because the ranks have ended: {self._ended}")
        answers: dict[int, Any] = {}
        for rank, (args, kwargs) in enumerate(arguments):
            try:
                self._connections[rank].send_bytes(pickle.dumps((method, args, kwargs)))
            except BrokenPipeError:
                answers[rank] = self._death_of(rank)
        self._receive(answers, timeout_s)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, SuiteFailure)}
        if failures or len(answers) < len(arguments):
            silent = sorted(set(range(len(arguments))) - set(answers))
            raise self._error_of(method.__name__, failures, silent, timeout_s)
        self.last_results = [answers[rank] for rank in range(len(arguments))]
        return list(self.last_results)

    def _receive(self, answers: dict[int, Any], timeout_s: float) -> None:
        """Adds answers until all have arrived, until the deadline, or until the other ranks are silent after a
        failure."""
        deadline, has_failed, num_idle_looks = time.monotonic() + timeout_s, False, 0
        activities = [_Activity(Path(f"/proc/{process.pid}/task")) for process in self._processes]
        while len(answers) < len(self._connections):
            if not has_failed and any(isinstance(answer, SuiteFailure) for answer in answers.values()):
                has_failed, deadline = True, min(deadline, time.monotonic() + _LONGEST_SETTLE_S)
            waiting = {self._connections[r]: r for r in range(len(self._connections)) if r not in answers}
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(waiting), timeout=min(left_s, _LOOK_S) if has_failed else left_s)
            if not ready:
                if not has_failed or left_s == 0.0:
                    return
                # Counts checks instead of seconds, because a busy machine may pause all processes.
                works = [activities[rank].has_worked() for rank in waiting.values()]
                num_idle_looks = 0 if any(works) else num_idle_looks + 1
                if num_idle_looks * _LOOK_S >= _SETTLE_S:
                    return
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = self._death_of(rank)

    def _death_of(self, rank: int) -> SuiteFailure:
        self._processes[rank].join(timeout=_END_S)
        return SuiteFailure(summary=f"its process ended with exit code {self._processes[rank].exitcode}")

    def _error_of(
        self, method: str, failures: dict[int, SuiteFailure], silent: Sequence[int], timeout_s: float
    ) -> RLError:
        """Returns one error for all failures. The ranks stay alive only if all raised an RLError of the same type."""
        agreed = {type(failure.user_error) for failure in failures.values()}
        size = len(self._connections)
        if not silent and len(failures) == size and len(agreed) == 1 and failures[0].user_error is not None:
            return failures[0].user_error
        lines = [f"rank {rank} of {size}: {f.summary}\n{f.traceback}".rstrip() for rank, f in failures.items()]
        stacks = {rank: self._stack_of(rank, is_due=not failures) for rank in silent}
        lines += [f"rank {rank} of {size}: no answer to {method}{stack}" for rank, stack in stacks.items()]
        self._end(f"{method} failed")
        text = f"{method} failed\n" + "\n".join(lines)
        first = next((f.user_error for f in failures.values() if f.user_error is not None), None)
        if first is not None:
            first.add_note(text)
            return first
        if failures:
            return WorkerError(text)
        return DeadlineError(f"no answer within {timeout_s:g} s: {text}")

    def _stack_of(self, rank: int, *, is_due: bool) -> str:
        """The stack that a rank has written, for a message. If `is_due`, waits until the stack is there and
        complete."""
        file, until = self._setting.stack_file(rank), time.monotonic() + _STACK_S
        before, stack = None, file.read_text()
        while is_due and (not stack or stack != before) and time.monotonic() < until:
            time.sleep(_LOOK_S)
            before, stack = stack, file.read_text()
        return f"; its stack:\n{stack}" if stack else ""

    def _end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._folder.cleanup()


class _Activity:
    """Tells whether a process works, from one call to the next."""

    def __init__(self, tasks: Path) -> None:
        """`tasks`: the folder in `/proc` with the process's threads."""
        self._tasks = tasks
        self._last_s = math.inf  # with it, the first call returns True
        self._last_active_ns: dict[str, int] = {}

    def has_worked(self) -> bool:
        """Whether the process has worked since the last call. True if a thread waits for a disk now, or has
        computed or waited for a processor for more than `_WORK_SHARE` of the time. A new thread's activity is measured
        from its start. Always False if the system does not measure this time, as outside Linux."""
        now_s, active_ns, states = time.monotonic(), {}, set()
        try:
            for task in self._tasks.iterdir():
                active_ns[task.name] = sum(map(int, (task / "schedstat").read_text().split()[:2]))
                states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:  # the process, or one of its threads, has just ended
            return False
        most_ns = max((ns - self._last_active_ns.get(name, 0) for name, ns in active_ns.items()), default=0)
        limit_ns = _WORK_SHARE * 1e9 * (now_s - self._last_s)
        self._last_s, self._last_active_ns = now_s, active_ns
        return "D" in states or most_ns > limit_ns


def fork_server() -> ForkServerContext:
    """Returns the multiprocessing context of the fork server. The first call in this process starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    path = os.environ.get("PYTHONPATH")
    # Python 3.11's server uses the module path of a new interpreter, which lacks the folders that pytest has added.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


class _ShuffledGroup(WorkerGroup):
    """Gives each rank its sequences in an order that differs from the batch's, and a plan that is not `0, 1, 2, …`."""

    def _parts(self, batch: Batch, limits: MicroBatchLimits) -> list[Part]:
        return [_shuffled(part) for part in super()._parts(batch, limits)]


def _shuffled(part: Part) -> Part:
    if not len(part.sequences):
        return part
    order = np.random.default_rng(0).permutation(len(part.sent))
    place = np.argsort(order).tolist()
    plan = tuple(tuple(place[i] for i in reversed(micro_batch)) for micro_batch in part.plan)
    return Part(sequences=part.sequences[order], sent=part.sent[order], plan=plan)


class RankGroup:
    """All ranks of one model under test, with blocking calls that take whole batches."""

    def __init__(self, backend: Backend, spec: WorkerSpec, world_size: int, *, directory: Path, timeout_s: float):
        backend.validate(spec, world_size)
        self.spec = spec
        self.mesh = backend.mesh(spec.options, world_size)
        self.directory = directory
        self._num_published = 0
        in_process = world_size == 1 and not backend.needs_own_process()
        self.ranks: SuiteRanks = (
            LocalRank(backend, spec) if in_process else ProcessRanks(backend, spec, self.mesh, timeout_s)
        )
        self._group = _ShuffledGroup(
            self.ranks,
            self.mesh,
            (1, world_size),
            SharedDevices(),
            Tenant(self.ranks),
            backend=backend,
            share_prefixes=spec.share_prefixes,
        )

    def forward(
        self,
        batch: Batch,
        limits: MicroBatchLimits,
        *,
        temperature: float,
        returns: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """See `WorkerGroup.forward`."""
        return asyncio.run(self._group.forward(batch, limits, temperature=temperature, returns=returns))

    def forward_backward(
        self,
        batch: Batch,
        limits: MicroBatchLimits,
        loss: LossSpec,
        *,
        temperature: float,
        returns: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See `WorkerGroup.forward_backward`."""
        return asyncio.run(self._group.forward_backward(batch, limits, loss, temperature=temperature, returns=returns))

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Takes one optimizer step. Raises AssertionError unless all ranks report the same result."""
        first, *others = self.call(Worker.optim_step, *(() if update is None else (update,)))
        for rank, other in enumerate(others, start=1):
            same_norm = abs(other.grad_norm - first.grad_norm) <= 1e-6 * first.grad_norm or first.skipped
            alike = (other.learning_rate, other.skipped) == (first.learning_rate, first.skipped)
            if not (same_norm and alike):
                raise AssertionError(f"rank 0 reports {first}, rank {rank} reports {other}")
        return first

    def publish(self, version: int, max_bucket_bytes: int, *, only_trained: bool = False) -> Published:
        """Makes all ranks send their weights, or only the trained ones. Merges the manifests and compares them with the
        recorded tensors."""
        self._num_published += 1
        directory = self.directory / f"published-{id(self)}-{self._num_published}"
        rendezvous = RecordingTransport(directory).open(num_ranks=self.mesh.world_size, num_engines=0)
        if only_trained:
            rendezvous = attrs.evolve(rendezvous, delta={"id": "part", "base": "whole", "only_trained": True})
        manifest = merge_manifests(self.call(RankHost.publish, rendezvous, version, max_bucket_bytes))
        sent = [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(self.mesh.world_size)]
        tensors = {name: tensor for part in sent for name, tensor in part["tensors"].items()}
        arrived = Manifest(version=version, tensors={name: tensor_record(t) for name, t in tensors.items()})
        require_same(manifest, arrived)
        return Published(manifest=manifest, tensors=tensors, bucket_bytes=[part["bucket_bytes"] for part in sent])

    def weights(self) -> dict[str, Tensor]:
        """All weights by Hugging Face name."""
        return self.publish(0, 1 << 20).tensors

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of all ranks, by name. Raises AssertionError if ranks that hold the same gradient disagree."""
        merged: dict[str, Tensor] = {}
        for rank, gradients in enumerate(self.call(Worker.gradients)):
            for name, gradient in gradients.items():
                # A copy, because a worker in this process may return tensors that later passes change.
                known = merged.setdefault(name, gradient.clone())
                error = (gradient - known).norm()
                assert not error > 1e-6 * known.norm(), (
                    f"rank {rank} has a different gradient of {name} ({error:.1e}); gradients() must return the "
                    "sum over all ranks"
                )
        return merged

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls every rank's worker, and returns the results by rank."""
        return asyncio.run(self.ranks.call(method, *args, **kwargs))

    def close(self) -> None:
        """Ends the ranks; a second call does nothing."""
        asyncio.run(self.ranks.close())
