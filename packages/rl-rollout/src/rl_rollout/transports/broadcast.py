"""Sends weights by broadcast: by NCCL if every participant has its own GPU, else by gloo.

Serves any number of ranks and engines, on any number of hosts. A sync is not staged: engines load buckets as they
arrive, so the transport holds no second copy of the weights. A rank sends one bucket while it makes the next.

Every sync has its own store and its own process groups, created when needed and dropped at its end. Neither groups nor
bucket layouts are reused: a group may contain an engine that has died since, and a layout may be older than a change of
the model. Either could lead to wrong weights. A group consists of one sending rank and all receivers; a rank that
sends nothing has no group.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import Rendezvous, WeightTransport

if TYPE_CHECKING:
    from rl_rollout.transports.broadcast_ends import BroadcastSender


@attrs.frozen
class BroadcastTransport(WeightTransport):
    """Implements `WeightTransport` with process groups of torch."""

    host: str | None = None
    """Address at which ranks and engines reach the controller. None: the controller's address in Ray's cluster if the
    cluster has several nodes, else loopback."""
    timeout_s: float = 600.0
    """Seconds that a rank and an engine wait for each other's next message or bucket."""
    join_timeout_s: float = 30.0
    """Seconds that a rank, before it sends its first bucket, waits for all engines to join. When the sync begins,
    engines are called, and they join before they do anything else, so an engine that takes longer is dead or hangs."""
    name: str = "broadcast"
    is_staged: bool = False
    receiver: str = "rl_rollout.transports.broadcast_ends:BroadcastReceiver"

    def validate(self) -> None:
        """Raises ConfigError if `host` is not an address of this machine, on which the controller runs."""
        if self.host is None:
            return
        try:
            socket.create_server((self.host, 0)).close()
        except OSError as error:
            raise ConfigError(
                f"broadcast cannot listen at {self.host}: {error}; set BroadcastTransport.host to an IPv4 address of "
                "this machine that ranks and engines can reach",
                key="generator.inference_engine.weight_sync_backend",
            ) from error

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Starts the sync's store in this process, the controller."""
        from rl_rollout.transports.channel import open_store

        host = self.host or controller_address()
        data = open_store(
            host,
            num_ranks=num_ranks,
            num_receivers=num_engines,
            timeout_s=self.timeout_s,
            join_timeout_s=self.join_timeout_s,
        )
        return Rendezvous(transport=self.name, receiver=self.receiver, data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> BroadcastSender:
        from rl_rollout.transports.broadcast_ends import BroadcastSender

        if world_size != rendezvous.data["num_ranks"]:
            raise WeightSyncError(f"the sync was opened for {rendezvous.data['num_ranks']} ranks, not {world_size}")
        return BroadcastSender(rendezvous, rank)

    def close(self, rendezvous: Rendezvous) -> None:
        from rl_rollout.transports.channel import close_store

        close_store(rendezvous.data["port"])


def controller_address() -> str:
    """Returns the address at which the other processes of this run reach this one."""
    import sys

    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1:
        return "127.0.0.1"
    return ray.util.get_node_ip_address()


broadcast = BroadcastTransport()
