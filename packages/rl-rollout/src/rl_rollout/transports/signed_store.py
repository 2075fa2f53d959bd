"""Provides a torch store that returns only values written by participants that know the sync's secret.

torch's TCPStore has no password: anyone who reaches its port can read, write and list all keys. So each value carries a
signature of its key and content, and participants reject other values. Only counts (see `SignedStore`) and NCCL's
values are unsigned; NCCL uses the plain store. The secret comes with the rendezvous, which servers accept only with the
control token.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from rl_core.errors import WeightSyncError

_NUM_BYTES = 32


class SignedStore(Store):
    """Implements those methods of a store that a sync and gloo use. Counts (`add`), by which a sync numbers its
    messages and receivers, are not signed. A program that changes a count can make the sync fail, but cannot forge a
    value."""

    def __init__(self, plain: Store, secret: str) -> None:
        """
        Args:
            plain: the store that holds the signed values.
            secret: the sync's secret, as hexadecimal digits.
        """
        super().__init__()
        self.plain = plain
        self._secret = bytes.fromhex(secret)

    def set(self, key: str, value: str | bytes) -> None:
        """Writes the value with its signature."""
        content = value.encode() if isinstance(value, str) else value
        self.plain.set(key, self._signature(key, content) + content)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        """Returns the value; waits for it as long as the plain store does. Raises WeightSyncError if it was not signed
        with the secret."""
        stored = self.plain.get(key)
        signature, content = stored[:_NUM_BYTES], stored[_NUM_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, content)):
            raise WeightSyncError(
                f"the value of {key!r} in the sync's store is not signed with the sync's secret: another program wrote "
                "to the store"
            )
        return content

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys have a value."""
        return self.plain.check(list(keys))

    def add(self, key: str, value: int) -> int:
        """Adds to a count; returns the result."""
        return self.plain.add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all of these keys have a value, or raises torch's DistStoreError at the timeout. None: the plain
        store's timeout."""
        self.plain.wait(list(keys)) if timeout is None else self.plain.wait(list(keys), timeout)

    def _signature(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, "sha256")
