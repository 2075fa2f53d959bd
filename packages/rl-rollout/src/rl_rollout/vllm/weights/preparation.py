"""Receives a new version of the weights in a worker while its model samples with the previous version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from rl_core.errors import RLError
from rl_core.interfaces import Rendezvous, WeightBucket


class Preparation:
    """Receives a version of the weights on its own thread. The model does not change until the worker takes the buckets
    and loads them."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        version: int,
        receive: Callable[[], list[WeightBucket]],
        before: Preparation | None,
    ) -> None:
        """
        Args:
            rendezvous: identifies the sync, together with `version`.
            version: the version to receive.
            receive: receives, checks and returns all buckets.
            before: the preparation of an earlier sync, if any. The new preparation first waits for the earlier one to
                end, because both use the worker's copy of the last weights.
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
        """Whether this preparation is for the same sync and version."""
        return self._sync == (rendezvous, version)

    def wait(self) -> None:
        """Waits until the preparation has succeeded or failed. The transport's deadlines limit the wait."""
        wait([self._received])

    def state(self) -> dict[str, bool | str | None]:
        """Returns plain data: whether the preparation has ended (`has_ended`), and the `error` if it failed."""
        has_ended = self._received.done()
        error = self._received.exception() if has_ended else None
        return {"has_ended": has_ended, "error": None if error is None else described(error)}

    def buckets(self) -> list[WeightBucket]:
        """Waits for the buckets and returns them; raises the preparation's error if it failed."""
        return self._received.result()


def described(error: BaseException) -> str:
    """Describes the error for the server's response."""
    return str(error) if isinstance(error, RLError) else f"{type(error).__name__}: {error}"
