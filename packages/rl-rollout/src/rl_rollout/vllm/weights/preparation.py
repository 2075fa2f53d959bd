"""Receives a version in a worker while its model samples with the previous one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from rl_core.errors import RLError
from rl_core.interfaces import Rendezvous, WeightBucket


class Preparation:
    """Receives a version on its own thread. Nothing of it is served until the worker takes the buckets and loads
    them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        version: int,
        receive: Callable[[], list[WeightBucket]],
        before: Preparation | None,
    ) -> None:
        """
        Args:
            rendezvous: the rendezvous of the sync.
            version: expected version.
            receive: returns all buckets, checked.
            before: preparation of an earlier sync, which must end first, because both use the weights that the worker
                holds.
        """
        self._sync = (rendezvous, version)
        self._received: Future[list[WeightBucket]] = Future()
        threading.Thread(target=self._run, args=(receive, before), name="rl-rollout-preparation", daemon=True).start()

    def _run(self, receive: Callable[[], list[WeightBucket]], before: Preparation | None) -> None:
        try:
            if before is not None:
                before.wait()
            self._received.set_result(receive())
        except BaseException as error:
            self._received.set_exception(error)

    def is_of(self, rendezvous: Rendezvous, version: int) -> bool:
        """Whether it receives this version in this sync."""
        return self._sync == (rendezvous, version)

    def wait(self) -> None:
        """Returns when it has ended, with success or an error, at the latest after the transport's deadlines."""
        wait([self._received])

    def state(self) -> dict[str, bool | str | None]:
        """Plain data: whether it has ended (`has_ended`), and the `error` if it failed."""
        has_ended = self._received.done()
        error = self._received.exception() if has_ended else None
        return {"has_ended": has_ended, "error": None if error is None else described(error)}

    def buckets(self) -> list[WeightBucket]:
        """The received buckets. Raises the error if it failed."""
        return self._received.result()


def described(error: BaseException) -> str:
    """The error as text for the server's response."""
    return str(error) if isinstance(error, RLError) else f"{type(error).__name__}: {error}"
