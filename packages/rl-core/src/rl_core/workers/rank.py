"""What a group asks of its ranks, and what runs at each of them: it builds the worker and makes the calls on it.

A call names the method of the contract that is meant, e.g. `Worker.optim_step`: its arguments are checked by the type
checker, and it travels to other processes by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import attrs
import numpy as np

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.errors import RLError
from rl_core.interfaces import (
    Backend,
    BackgroundSaver,
    Manifest,
    Offloadable,
    Perturbable,
    Plan,
    RankInfo,
    Rendezvous,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.weight_deltas import DeltaSender, HeldWeights

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """What one data-parallel rank computes."""

    sequences: np.ndarray
    """int64, indices into the whole batch; empty for a rank that only takes part in the collectives."""
    sent: np.ndarray
    """int64, the sequences that travel: `sequences`, or any one where there are none (no batch is empty)."""
    plan: Plan
    """Micro-batches as indices into `sent`."""


@attrs.frozen(kw_only=True)
class Abilities:
    """What a worker can do besides what every worker must."""

    offload: bool = False
    """It is `Offloadable`."""
    save_in_background: bool = False
    """It is a `BackgroundSaver`."""


@attrs.frozen(kw_only=True)
class SaveOutcome:
    """What has become of a save in the background on one rank."""

    is_over: bool
    """It is complete, or has failed."""
    error: RLError | None = None


class Ranks(Protocol):
    """All ranks of a group, wherever they run: what `WorkerGroup` calls."""

    abilities: Abilities
    """Abilities, which are the same for every worker."""

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls `method`, of the worker or of `RankHost`, on every rank with the same arguments; results by rank.

        Raises:
            RLError: a user's mistake that a rank found, as it was raised there.
            WorkerError: a rank raised something else, died, or was closed.
            DeadlineError: a rank did not answer in time.
        """
        ...

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """As `call`, each rank with its own part of `batch`; None from ranks that hold no result."""
        ...

    async def close(self) -> None:
        """Ends all ranks; a second call does nothing."""
        ...


class RankHost:
    """One rank. All calls come from one thread, in order."""

    def __init__(self, backend: Backend, spec: WorkerSpec, rank: RankInfo):
        self._rank = rank
        self._held = HeldWeights()
        self._worker: Worker = backend.create_worker(spec, rank)

    @property
    def abilities(self) -> Abilities:
        """Abilities of the worker."""
        return Abilities(
            offload=isinstance(self._worker, Offloadable),
            save_in_background=isinstance(self._worker, BackgroundSaver),
        )

    def bound(self, method: Callable[..., R]) -> Callable[..., R]:
        """The worker's method of that name, or the host's own where `method` is one of it."""
        is_own = method.__qualname__.partition(".")[0] in (own.__name__ for own in type(self).__mro__)
        return getattr(self if is_own else self._worker, method.__name__)

    def is_perturbable(self) -> bool:
        """The worker is `Perturbable`."""
        return isinstance(self._worker, Perturbable)

    def save_outcome(self) -> SaveOutcome:
        """Of a `BackgroundSaver`. Does not raise what went wrong: ranks find that out at different moments, and until
        the last one has, they cannot go on together."""
        assert isinstance(self._worker, BackgroundSaver)
        try:
            return SaveOutcome(is_over=self._worker.has_saved())
        except RLError as error:
            return SaveOutcome(is_over=True, error=error)

    def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        """The worker sends through this rank's end of the transport: whole weights, or what changed."""
        transport = plugins.load("rl_core.weight_transports", rendezvous.transport)
        sender = transport.sender(rendezvous, self._rank.rank, self._rank.world_size)
        if rendezvous.delta is not None:
            sender = DeltaSender(sender, rendezvous.delta, self._held)
        return self._worker.publish(sender, version, max_bucket_bytes)
