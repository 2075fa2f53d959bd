"""Watches the two processes of Ray without which Ray ends the controller: the node manager (`raylet`) of this machine
and the control server (`gcs_server`).

When one of the two dies, Ray's native code ends the controller with `_exit`. This happens at the next access to the
object store after the node manager died, or 60 s after the control server died. A run can say what happened and how
to resume only if it notices the death before the controller ends. A server that is suspended or unreachable does not
refuse connections, so it counts as alive.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
_PATIENCE_S = 20.0
"""Seconds for which the control server may refuse connections: a fault-tolerant cluster starts it again. Ray itself
waits for 60 s."""
_CONNECT_S = 2.0


class RayWatch:
    """Keeps a connection to the node manager, which closes when the node manager dies. A thread connects to the control
    server again and again."""

    def __init__(self, raylet_socket: str, gcs_address: str, logs: str, *, patience_s: float = _PATIENCE_S) -> None:
        """
        Args:
            raylet_socket: path of the node manager's socket.
            gcs_address: `host:port` of the control server.
            logs: directory of Ray's logs on this machine, for the message.
            patience_s: seconds for which the control server may refuse connections.
        """
        host, _, port = gcs_address.rpartition(":")
        self._raylet_socket = raylet_socket
        self._raylet = _connected(raylet_socket)
        self._gcs = (host, int(port))
        self._logs = logs
        self._patience_s = patience_s
        self._refused_since: float | None = None
        self._lost: str | None = None
        self._looking, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rl-core-ray-watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """A message that says which server died before `close`, and where its log is; None: both were alive. Each
        access checks the node manager again."""
        with self._looking:
            if self._lost is None and not self._closing.is_set() and _is_closed(self._raylet):
                self._raylet.close()
                try:
                    self._raylet = _connected(self._raylet_socket)
                except OSError:
                    self._lose(f"Ray's node manager (raylet) on this machine died (its log: {self._logs}/raylet.out)")
            return self._lost

    def close(self) -> None:
        """Ends the thread, and closes the connection; a second call does nothing."""
        self._closing.set()
        self._thread.join()
        self._raylet.close()

    def _watch(self) -> None:
        while self.lost is None and not self._closing.wait(_INTERVAL_S):
            refuses, now = _refuses(self._gcs), time.monotonic()
            self._refused_since = (self._refused_since or now) if refuses else None
            with self._looking:
                if refuses and self._lost is None and now - (self._refused_since or now) >= self._patience_s:
                    host, port = self._gcs
                    self._lose(
                        f"Ray's control server (gcs_server) at {host}:{port} died: it has refused connections for "
                        f"{self._patience_s:g} s (its log: gcs_server.out in {self._logs} on its machine)"
                    )

    def _lose(self, what: str) -> None:
        self._lost = what
        logger.warning("%s. Ray will end this process; the run tries to end with an error first", what)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end, which never sends anything, has closed the connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
