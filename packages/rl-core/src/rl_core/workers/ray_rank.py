"""One rank as a Ray actor: runs the controller's calls in its own process and returns results or failures.

The controller (`ray_ranks.py`) sends calls, which run one after another; each returns a result or a `Failure`. A call
may wait for the other ranks in a collective of the worker, until they join it or the controller kills this process.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import ray
import torch

from rl_core.batch import Batch
from rl_core.errors import RLError
from rl_core.interfaces import Backend, RankInfo, WorkerSpec
from rl_core.rank_kit.process_group import open_store
from rl_core.tasks import code_of
from rl_core.workers.heartbeat import Pulse, pulse_of
from rl_core.workers.memory import keep_freed_memory
from rl_core.workers.rank import Abilities, RankHost

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class RankAddress:
    """Where a rank runs."""

    node: str
    """The node's network address."""
    node_id: str
    """Ray's id of the node."""
    pid: int
    store_port: int
    """Port of the TCPStore that this rank has opened. The ranks of a group meet at the store of rank 0."""
    gpus: str | None
    """CUDA_VISIBLE_DEVICES as set by Ray: the GPUs of this rank."""

    def __str__(self) -> str:
        return f"node {self.node}, pid {self.pid}"


@attrs.frozen(kw_only=True)
class Failure:
    """A rank's answer to a call that raised. Also represents a rank that will never answer."""

    summary: str
    """Type and message of the exception, or how the rank died."""
    traceback: str = ""
    user_error: bytes | None = None
    """The pickled exception, if it was an RLError that survives pickling."""
    died: bool = False


@attrs.frozen(kw_only=True)
class RankCall:
    """A method call that the controller sends to a rank."""

    method: Callable[..., Any]
    """A method of `Worker`, of one of its optional protocols, or of `RankHost`."""
    args: Sequence[Any]
    """Arguments without the batch. The batch is sent separately, as one copy for all ranks that read it."""
    kwargs: Mapping[str, Any]
    returns_result: bool = True
    """False: the rank sends no result, because the controller does not read it."""


class RayRank:
    """Runs calls one at a time in one thread. `doing` and `pulse` run in a second thread, so that they answer during a
    call."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._name = "a rank"
        self._host: RankHost | None = None
        self._call = ("computes nothing", 0.0, 0)
        self._store: Any = None

    def address(self) -> RankAddress:
        """Opens this rank's store, and returns where the rank runs."""
        self._store = open_store()
        node_id = ray.get_runtime_context().get_node_id()
        return RankAddress(
            node=_address_of(node_id),
            node_id=node_id,
            pid=os.getpid(),
            store_port=self._store.port,
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def start(
        self, backend: Backend, spec: WorkerSpec, rank: RankInfo, environment: Mapping[str, str]
    ) -> Abilities | Failure:
        """Builds the worker and returns its abilities."""
        self._name = f"{spec.role} rank {rank.rank}"
        if rank.rank:
            self._store = None  # the group meets at the store of rank 0

        def build() -> Abilities:
            os.environ.update(environment)
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
            # A batch is in read-only shared memory, and no worker writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            self._host = RankHost(backend, spec, rank)
            # Modules and the model live as long as the process. Scanning them in garbage collections would take a
            # tenth of a small step.
            gc.collect()
            gc.freeze()
            return self._host.abilities

        return self._answer("start", build)

    def call(self, call: RankCall) -> Any:
        """Calls the method and returns its result. Tensors in a result that is a dict become numpy arrays."""
        return self._answer(call.method.__name__, lambda: self._result_of(call))

    def call_on_batch(self, call: RankCall, *columns: Mapping[str, np.ndarray]) -> Any:
        """Like `call`, for a method whose first argument is a batch, which is assembled from `columns`."""
        arrays = {name: values for some in columns for name, values in some.items()}
        return self._answer(call.method.__name__, lambda: self._result_of(call, Batch.from_arrays(arrays)))

    @ray.method(concurrency_group="status")
    def doing(self) -> str:
        """What the computing thread is doing: the method, for how long, and the innermost frames."""
        method, started, thread = self._call
        frame = sys._current_frames().get(thread)
        frames = reversed(traceback.extract_stack(frame)[-4:]) if frame else ()
        stack = " ← ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames)
        return f"{method} for {time.monotonic() - started:.0f} s, in {stack}" if stack else method

    @ray.method(concurrency_group="status")
    def pulse(self) -> Pulse:
        """The resources that this process has used so far."""
        return pulse_of(os.getpid())

    def _result_of(self, call: RankCall, *batch: Batch) -> Any:
        assert self._host is not None
        result = self._host.bound(call.method)(*batch, *call.args, **call.kwargs)
        return _with_arrays(result) if call.returns_result else None

    def _answer(self, method: str, function: Any) -> Any:
        self._call = (method, time.monotonic(), threading.get_ident())
        try:
            with code_of(f"{self._name} in {method}"):
                return function()
        except Exception as error:
            text = traceback.format_exc()
            return Failure(summary=f"{type(error).__name__}: {error}", traceback=text, user_error=_pickled(error))
        finally:
            self._call = ("computes nothing", 0.0, 0)


def _address_of(node_id: str) -> str:
    """The address at which Ray reaches the node. The machine may have other addresses."""
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)


def _with_arrays(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in result.items()}
    return result


def _pickled(error: Exception) -> bytes | None:
    """The pickled exception, if it is an RLError that survives pickling."""
    if not isinstance(error, RLError):
        return None
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception as fault:
        logger.warning("%s does not pickle (%s): it is reported as a WorkerError", type(error).__name__, fault)
        return None


_remote: Any = ray.remote
rank_actor = _remote(concurrency_groups={"status": 1}, max_restarts=0, max_task_retries=0)(RayRank)
