"""One rank of a backend under test: the host of its worker and, with several ranks, its process.

The test's process (`ranks.py`) sends calls, and each returns a result or a `SuiteFailure`. Between calls, the rank
waits until the next call arrives, the test's process closes the connection, or the rank is killed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch

from rl_core.batch import Batch
from rl_core.errors import RLError
from rl_core.interfaces import Backend, Plan, RankInfo, WorkerSpec
from rl_core.rank_kit.process_group import JOINS_OPEN_STORE
from rl_core.workers.rank import Abilities, RankHost


class SuiteHost(RankHost):
    """A `RankHost` that also reports which Protocols its worker implements, and calls any method of the worker."""

    def start(self) -> Abilities:
        """Returns the worker's abilities. This call comes first, and `serve` builds the worker for it."""
        return self.abilities

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the worker's method `name`, which need not belong to a contract."""
        return getattr(self._worker, name)(*args, **kwargs)

    def ask_on_part(self, batch: Batch, plan: Plan, name: str, *args: Any, **kwargs: Any) -> Any:
        """Like `ask`, for a method that takes this rank's part of a batch."""
        return self.ask(name, batch, plan, *args, **kwargs)


@attrs.frozen(kw_only=True)
class SuiteFailure:
    """A rank's answer to a call that raised. Also represents a rank that will never answer."""

    summary: str
    """Type and message of the exception, or how the process ended."""
    traceback: str = ""
    user_error: RLError | None = None
    """The exception, if it is an RLError that can be pickled."""


@attrs.frozen(kw_only=True)
class Setting:
    """Settings that all processes of a group share."""

    directory: str
    timeout_s: float
    """Longest wait for the answer to one call."""
    hides_gpus: bool
    """Whether GPUs are hidden, so that all ranks run on the CPU, because there are fewer GPUs than ranks."""

    def stack_file(self, rank: int) -> Path:
        """The file to which a hanging rank writes its stack."""
        return Path(self.directory, f"stack-{rank}")


def serve(connection: Connection, backend: Backend, spec: WorkerSpec, rank: RankInfo, setting: Setting) -> None:
    """The main function of a rank's process: builds the worker and answers calls until the connection is closed."""
    os.environ.update(
        {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.local_rank),
            "WORLD_SIZE": str(rank.world_size),
            "MASTER_ADDR": rank.master_address,
            "MASTER_PORT": str(rank.master_port),
            **JOINS_OPEN_STORE,
        }
    )
    if setting.hides_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A garbage collection would write to every object that this process shares with the fork server, so the kernel
    # would copy their memory.
    gc.freeze()
    torch.set_num_threads(1)
    host: SuiteHost | None = None
    with setting.stack_file(rank.rank).open("w") as stack_file:
        while True:
            try:
                method, args, kwargs = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            stack_file.seek(0)
            stack_file.truncate()  # a slow earlier call may have left its stack
            faulthandler.dump_traceback_later(0.9 * setting.timeout_s, file=stack_file)
            try:
                host = host or SuiteHost(backend, spec, rank)
                answer = pickle.dumps(host.bound(method)(*args, **kwargs))
            except Exception as error:
                answer = pickle.dumps(_failure_of(error))
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(answer)


def _failure_of(error: Exception) -> SuiteFailure:
    summary, text = f"{type(error).__name__}: {error}", traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # The error cannot be pickled, e.g. because its class takes more arguments than a message: only text is sent.
        return SuiteFailure(summary=summary, traceback=text)
    return SuiteFailure(summary=summary, traceback=text, user_error=error if isinstance(error, RLError) else None)
