"""How the two ends of a streaming sync talk: a log of messages that every receiver reads in the same order.

A sync has a store of its own (torch's TCPStore, in the controller). A sender appends what it is about to do, then does
it; receivers follow the log. So nobody has to know in advance which ranks send, how much, or in which layout, and
nothing of one sync is left for the next. Closing the store ends every wait on it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rl_core.errors import DeadlineError, WeightSyncError

_LENGTH, _RECEIVERS = "log/length", "receivers"
_CONNECT_S = 30.0
_stores: dict[int, TCPStore] = {}
"""Of the syncs that are open in this process, by port."""


def open_store(host: str, timeout_s: float) -> int:
    """Starts a sync's store on a free port of `host` alone; returns the port."""
    # torch itself would listen on every address of the machine.
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    _stores[port] = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    return port


def close_store(port: int) -> None:
    """Ends the store and all waits on it; a second call does nothing."""
    _stores.pop(port, None)


class Channel:
    """One participant's access to a sync's store."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """`data`: `Rendezvous.data` with `host`, `port`, `num_ranks`, `num_receivers` and `timeout_s`."""
        self.timeout_s: float = data["timeout_s"]
        self.num_ranks: int = data["num_ranks"]
        self.num_receivers: int = data["num_receivers"]
        try:
            # torch would try again and again to reach a store that is no longer there.
            socket.create_connection((data["host"], data["port"]), timeout=_CONNECT_S).close()
            self.store = TCPStore(
                data["host"],
                data["port"],
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(self.timeout_s, _CONNECT_S)),
            )
            self.store.set_timeout(timedelta(seconds=self.timeout_s))
        except (OSError, dist.DistError) as error:
            raise WeightSyncError(f"the sync at {data['host']}:{data['port']} is closed: {error}") from error

    def require_open(self) -> None:
        """Raises WeightSyncError if the sync was closed."""
        try:
            self.store.check([_LENGTH])
        except dist.DistError as error:
            raise _closed(error) from error

    def append(self, message: Mapping[str, Any]) -> int:
        """Adds to the log; the message's place in it."""
        try:
            place = self.store.add(_LENGTH, 1) - 1
            self.store.set(f"log/{place}", json.dumps(message))
        except dist.DistError as error:
            raise _closed(error) from error
        return place

    def read(self, place: int) -> dict[str, Any]:
        """The message at `place`. Raises DeadlineError if it does not come, WeightSyncError if the sync is closed."""
        return json.loads(self._get(f"log/{place}", f"what comes after {place} messages of the ranks"))

    def register_receiver(self, description: Mapping[str, Any]) -> int:
        """Says that a receiver is there; its number, from 0."""
        try:
            number = self.store.add(_RECEIVERS, 1) - 1
            if number >= self.num_receivers:
                raise WeightSyncError(f"the sync was opened for {self.num_receivers} receivers, and one more came")
            self.store.set(f"receiver/{number}", json.dumps(description))
        except dist.DistError as error:
            raise _closed(error) from error
        return number

    def receivers(self) -> list[dict[str, Any]]:
        """What the receivers said of themselves, by number; waits until all are there."""
        names = [f"receiver/{number}" for number in range(self.num_receivers)]
        return [
            json.loads(self._get(name, f"{self.num_receivers} receivers, of which {i} have joined the sync"))
            for i, name in enumerate(names)
        ]

    def acknowledge(self, place: int, number: int) -> None:
        """Receiver `number` has taken what message `place` speaks of."""
        try:
            self.store.set(f"taken/{place}/{number}", "")
        except dist.DistError as error:
            raise _closed(error) from error

    def wait_until_taken(self, place: int, numbers: Sequence[int]) -> None:
        """Returns when all these receivers have."""
        for number in numbers:
            self._get(f"taken/{place}/{number}", f"receiver {number} to take bucket {place}")

    def _get(self, key: str, what: str) -> bytes:
        started = time.monotonic()
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
            return self.store.get(key)
        except dist.DistError as error:
            # A store that was closed answers at once, a missing key after the deadline.
            if time.monotonic() - started >= self.timeout_s:
                raise DeadlineError(f"waited {self.timeout_s:g} s for {what}") from error
            raise _closed(error) from error


def _closed(error: Exception) -> WeightSyncError:
    return WeightSyncError(f"the sync was closed, or its controller is gone: {error}")
