"""Which classes an engine's server may load as receivers: those of installed transports, and its own run's.

A rendezvous names its receiver, and it comes over the network. So a server has a list, made from what is installed and
from what the run that starts it says, and a request that names anything else is refused before anything is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from importlib.metadata import entry_points
from pathlib import Path

from rl_core import plugins
from rl_core.errors import PluginError, WeightSyncError
from rl_core.interfaces import WeightTransport

logger = logging.getLogger(__name__)

_GROUP = "rl_core.weight_transports"


def receiver_of(transport: WeightTransport) -> str:
    """`package.module:Class`, as the transport's rendezvous name it.

    A transport says it in its attribute `receiver`. One that has none is asked by a sync that is opened and closed.
    """
    receiver = getattr(transport, "receiver", None)
    if receiver is None:
        rendezvous = transport.open(num_ranks=1, num_engines=1)
        transport.close(rendezvous)
        receiver = rendezvous.receiver
    return receiver


def installed_receivers() -> frozenset[str]:
    """Of the transports among the entry points that say theirs; one that cannot be imported has none.

    What lies in the working directory is not installed, though Python finds entry points there too where that is on its
    path, as with `python -m`.
    """
    found, here = set(), Path.cwd().resolve()
    for entry in entry_points(group=_GROUP):
        if entry.dist is None or Path(str(entry.dist.locate_file(""))).resolve() == here:
            logger.warning("the weight transport %s is not installed: it lies in the working directory", entry.value)
            continue
        try:
            receiver = getattr(plugins.load(_GROUP, entry.value), "receiver", None)
        except PluginError as error:
            logger.warning("no server can receive weights by this transport: %s", error)
        else:
            found |= {receiver} - {None}
    return frozenset(found)


def require_allowed(receiver: str, allowed: AbstractSet[str]) -> None:
    """Raises WeightSyncError for a receiver that is not on the server's list."""
    if receiver not in allowed:
        raise WeightSyncError(
            f"{receiver!r} is not the receiver of an installed weight transport ({', '.join(sorted(allowed))}). If "
            "it is that of a transport of your own, start the server with the run's "
            "generator.inference_engine.weight_sync_backend, or give the transport the attribute `receiver` and an "
            f"entry point of {_GROUP} on the server's machine"
        )
