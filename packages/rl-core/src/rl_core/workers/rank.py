"""The interface between a group and its ranks (`Ranks`), and the host that builds and calls the worker in each rank.

A call is specified by a method of the contract, e.g. `Worker.optim_step`, so type checkers can check its arguments, and
the method is pickled by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import attrs
import numpy as np
import torch

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.errors import PluginError, RLError
from rl_core.interfaces import (
    Backend,
    Manifest,
    Plan,
    RankInfo,
    Rendezvous,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.weight_deltas import DeltaSender, HeldWeights, has_only_trained

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """The part of a batch that one data-parallel rank computes."""

    sequences: np.ndarray
    """int64, indices into the whole batch; empty for a rank that only joins the collectives."""
    sent: np.ndarray
    """int64, the sequences that are sent: `sequences` or, if that is empty, the batch's shortest one (a batch must not
    be empty)."""
    plan: Plan
    """Micro-batches as indices into `sent`."""

    def of(self, batch: Batch) -> tuple[Batch, Plan]:
        """The sequences of the whole batch that are sent, and their plan."""
        return batch.select(torch.from_numpy(self.sent)), self.plan


@attrs.frozen(kw_only=True)
class Abilities:
    """Optional abilities of a worker."""

    offload: bool = False
    """See `Worker.can_offload`."""
    save_in_background: bool = False
    """See `Worker.can_save_in_background`."""
    perturb: bool = False
    """See `Worker.can_perturb`."""


@attrs.frozen(kw_only=True)
class SaveOutcome:
    """The state of a background save on one rank."""

    is_over: bool
    """Whether the save is complete or has failed."""
    error: RLError | None = None


class Ranks(Protocol):
    """The interface through which `WorkerGroup` calls all ranks of a group, in this process or in others."""

    abilities: Abilities
    """The abilities that all workers of the group have."""

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls `method` of the worker or of `RankHost` on every rank, with the same arguments. Returns results in rank
        order.

        Raises:
            RLError: the error that a rank raised for a user's mistake.
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
        """Like `call`, but each rank gets only its part of `batch`. For a rank that returns no result, the list has
        None."""
        ...

    async def close(self) -> None:
        """Ends all ranks; a second call does nothing."""
        ...


class RankHost:
    """Builds and calls the worker of one rank. All calls must come from one thread, one after another."""

    def __init__(self, backend: Backend, spec: WorkerSpec, rank: RankInfo):
        self._rank = rank
        self._held = HeldWeights()
        self._worker = backend.create_worker(spec, rank)
        if Worker not in type(self._worker).__mro__:
            raise PluginError(
                f"create_worker of the backend {backend.name!r} returned {self._worker!r:.60}; expected a worker, "
                "whose class inherits rl_core.interfaces.Worker"
            )

    @property
    def abilities(self) -> Abilities:
        """Abilities of the worker."""
        return Abilities(
            offload=self._worker.can_offload,
            save_in_background=self._worker.can_save_in_background,
            perturb=self._worker.can_perturb,
        )

    def bound(self, method: Callable[..., R]) -> Callable[..., R]:
        """Returns the bound method: the host's if `RankHost` defines `method`, else the worker's method of this
        name."""
        is_own = any(vars(own).get(method.__name__) is method for own in type(self).__mro__)
        return getattr(self if is_own else self._worker, method.__name__)

    def save_outcome(self) -> SaveOutcome:
        """The state of the worker's background save. Does not raise the save's error: ranks detect it at different
        times, and can continue together only when all have detected it."""
        try:
            return SaveOutcome(is_over=self._worker.has_saved())
        except RLError as error:
            return SaveOutcome(is_over=True, error=error)

    def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        """Makes the worker send its weights through this rank's end of the transport. If `rendezvous.delta` is set,
        only changes are sent."""
        transport = plugins.load("rl_core.weight_transports", rendezvous.transport)
        sender = transport.sender(rendezvous, self._rank.rank, self._rank.world_size)
        delta = rendezvous.delta
        if delta is not None and not delta.get("only_trained"):
            sender = DeltaSender(sender, delta, self._held)
        return self._worker.publish(sender, version, max_bucket_bytes, only_trained=has_only_trained(delta))
