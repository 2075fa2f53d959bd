"""Connects ranks and receivers of a streaming sync by a log of messages, which every receiver reads in the same order.

Each sync has its own store (torch's TCPStore, in the controller), which holds the log. Before a rank sends something,
it appends a message that describes it, and receivers act on each message. So no participant has to know in advance
which ranks send, how much, or in which layout, and nothing is left over from one sync to the next. All messages are
signed (`signed_store`). All waits of a `Channel` end when the store is closed, or a participant breaks off the sync.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rl_core.errors import DeadlineError, WeightSyncError
from rl_rollout.transports.signed_store import SignedStore

_OPENED, _LENGTH, _RECEIVERS, _BROKEN = "opened", "log/length", "receivers", "broken"
_CONNECT_S, _ATTEMPT_S = 30.0, 3.0
"""Longest time for connecting to a store, and for one attempt to connect."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02
"""First and longest polling interval of a wait. Torch's own wait is not used, because it writes two lines to stderr
whenever it times out."""
_LOOKS_PER_BREAK = 20
_stores: dict[int, TCPStore] = {}
"""Stores of the syncs that are open in this process, by port."""


def open_store(
    host: str, *, num_ranks: int, num_receivers: int, timeout_s: float, join_timeout_s: float
) -> dict[str, Any]:
    """Starts a sync's store on a free port, listening only on `host`; returns `Rendezvous.data` of the sync."""
    # The socket is opened here, because torch itself would listen on every address of the machine.
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    secret = secrets.token_hex()
    SignedStore(store, secret).set(_OPENED, "")
    _stores[port] = store
    return {
        "host": host,
        "port": port,
        "secret": secret,
        "num_ranks": num_ranks,
        "num_receivers": num_receivers,
        "timeout_s": timeout_s,
        "join_timeout_s": join_timeout_s,
    }


def close_store(port: int) -> None:
    """Ends the store and all waits on it; a second call does nothing."""
    _stores.pop(port, None)


def break_off(data: Mapping[str, Any], reason: str) -> None:
    """Ends all participants' waits with an error that gives the reason; does nothing if the sync is already closed.

    Opens its own connection to the store, because the connection of a `Channel` may be busy in another thread.
    """
    with contextlib.suppress(WeightSyncError):
        Channel(data).break_off(reason)


class Channel:
    """Connects one participant to a sync's store."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Connects to the store that `data`, the result of `open_store`, describes. Raises WeightSyncError if the sync
        is closed or has another secret."""
        self.timeout_s: float = data["timeout_s"]
        self.join_timeout_s: float = min(data["join_timeout_s"], self.timeout_s)
        self.num_ranks: int = data["num_ranks"]
        self.num_receivers: int = data["num_receivers"]
        try:
            store = _connected(data["host"], data["port"], within_s=min(self.timeout_s, _CONNECT_S))
            store.set_timeout(timedelta(seconds=self.timeout_s))
            self.store = SignedStore(store, data["secret"])
            self.store.get(_OPENED)
        except (OSError, dist.DistError) as error:
            raise WeightSyncError(f"the sync at {data['host']}:{data['port']} is closed: {error}") from error

    def require_open(self) -> None:
        """Raises WeightSyncError if the sync was closed or a participant broke it off."""
        try:
            reason = self.store.get(_BROKEN).decode() if self.store.check([_BROKEN]) else None
        except dist.DistError as error:
            raise _closed(error) from error
        if reason is not None:
            raise WeightSyncError(f"the sync was broken off: {reason}")

    def break_off(self, reason: str) -> None:
        """Tells all participants that the sync has failed; only the first reason is kept."""
        try:
            if not self.store.check([_BROKEN]):
                self.store.set(_BROKEN, reason)
        except dist.DistError as error:
            raise _closed(error) from error

    def append(self, message: Mapping[str, Any]) -> int:
        """Appends to the log; returns the message's place in it."""
        try:
            place = self.store.add(_LENGTH, 1) - 1
            self.store.set(f"log/{place}", json.dumps(message))
        except dist.DistError as error:
            raise _closed(error) from error
        return place

    def read(self, place: int) -> dict[str, Any]:
        """Waits for the message at `place` and returns it. Raises DeadlineError if it does not arrive in time, and
        WeightSyncError if the sync is closed or broken off."""
        what = f"a rank to append message {place} to the sync's log"
        return json.loads(self._get(f"log/{place}", what, timeout_s=self.timeout_s))

    def register_receiver(self, description: Mapping[str, Any]) -> int:
        """Registers a receiver; returns its number, from 0."""
        try:
            number = self.store.add(_RECEIVERS, 1) - 1
            if number >= self.num_receivers:
                raise WeightSyncError(f"the sync was opened for {self.num_receivers} receivers, but one more joined")
            self.store.set(f"receiver/{number}", json.dumps({**description, "process": this_process()}))
        except dist.DistError as error:
            raise _closed(error) from error
        return number

    def receivers(self) -> list[dict[str, Any]]:
        """Waits until all receivers have registered, and returns their descriptions, ordered by number. Raises
        DeadlineError if a receiver has not registered in time."""
        deadline, joined = time.monotonic() + self.join_timeout_s, []
        while len(joined) < self.num_receivers:
            names = ", ".join(receiver["process"] for receiver in joined) or "none"
            what = f"{self.num_receivers} receivers to join the sync; {len(joined)} have joined ({names})"
            key, left_s = f"receiver/{len(joined)}", deadline - time.monotonic()
            joined.append(json.loads(self._get(key, what, timeout_s=left_s, reported_s=self.join_timeout_s)))
        return joined

    def acknowledge(self, place: int, number: int) -> None:
        """Records that receiver `number` has taken the bucket of message `place`."""
        try:
            self.store.set(f"taken/{place}/{number}", "")
        except dist.DistError as error:
            raise _closed(error) from error

    def wait_until_taken(self, place: int, numbers: Sequence[int]) -> None:
        """Returns when all these receivers have taken the bucket of message `place`. Raises DeadlineError if a receiver
        does not take it in time."""
        for number in numbers:
            self._get(f"taken/{place}/{number}", f"receiver {number} to take bucket {place}", timeout_s=self.timeout_s)

    def _get(self, key: str, what: str, *, timeout_s: float, reported_s: float | None = None) -> bytes:
        """Waits for a key and returns its value. `reported_s` is the timeout that an error reports, if the wait began
        before this call; None: `timeout_s`."""
        deadline, look_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        try:
            for looks in itertools.count(1):
                if self.store.check([key]):
                    return self.store.get(key)
                if looks % _LOOKS_PER_BREAK == 0:
                    self.require_open()
                if time.monotonic() >= deadline:
                    break
                time.sleep(look_s)
                look_s = min(1.5 * look_s, _LAST_LOOK_S)
        except dist.DistError as error:
            raise _closed(error) from error
        raise DeadlineError(f"waited {reported_s or timeout_s:g} s for {what}")


def _connected(host: str, port: int, *, within_s: float) -> TCPStore:
    """Connects to a store. Raises OSError or DistError if it is closed or does not answer in time."""
    deadline, timeout = time.monotonic() + within_s, timedelta(seconds=min(within_s, _ATTEMPT_S))
    while True:
        # This connection fails at once if the store no longer exists, while torch would keep trying to reach the store.
        # The store may also be closed between this line and torch's attempt, so an attempt is short.
        socket.create_connection((host, port), timeout=within_s).close()
        try:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except dist.DistError:
            if time.monotonic() >= deadline:
                raise


def this_process() -> str:
    """Names this process for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _closed(error: Exception) -> WeightSyncError:
    return WeightSyncError(f"the sync was closed, or its controller has ended: {error}")
