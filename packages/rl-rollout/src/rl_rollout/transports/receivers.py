"""Limits which classes an engine's server may load as weight receivers.

A rendezvous names its receiver class and arrives over the network. So a server has a list of allowed classes: the
receivers of installed transports, and the receiver of the run that starts the server. It refuses a request that names
any other class, before importing anything.
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
    """Returns the name of the transport's receiver class, `package.module:Class`, as in the transport's rendezvous.

    Reads the transport's attribute `receiver`. If there is none, opens a sync, reads the receiver from its rendezvous,
    and closes the sync.
    """
    receiver = getattr(transport, "receiver", None)
    if receiver is None:
        rendezvous = transport.open(num_ranks=1, num_engines=1)
        transport.close(rendezvous)
        receiver = rendezvous.receiver
    return receiver


def installed_receivers() -> frozenset[str]:
    """Returns the receivers of all installed transports that have the attribute `receiver`. Skips a transport that
    cannot be imported.

    Also skips entry points of packages in the working directory. Python finds these if the directory is on `sys.path`,
    as with `python -m`.
    """
    found, here = set(), Path.cwd().resolve()
    for entry in entry_points(group=_GROUP):
        if entry.dist is None or Path(str(entry.dist.locate_file(""))).resolve() == here:
            logger.warning("ignoring weight transport %s: it is not part of an installed distribution", entry.value)
            continue
        try:
            receiver = getattr(plugins.load(_GROUP, entry.value), "receiver", None)
        except PluginError as error:
            logger.warning("this server cannot receive weights by an installed transport: %s", error)
        else:
            found |= {receiver} - {None}
    return frozenset(found)


def require_allowed(receiver: str, allowed: AbstractSet[str]) -> None:
    """Raises WeightSyncError for a receiver that is not on the server's list."""
    if receiver not in allowed:
        raise WeightSyncError(
            f"{receiver!r} is not the receiver of an installed weight transport ({', '.join(sorted(allowed))}). If "
            "it belongs to your own transport, start the server with the run's "
            "generator.inference_engine.weight_sync_backend, or give the transport the attribute `receiver` and an "
            f"entry point of {_GROUP} on the server's machine"
        )
