"""A transport that does not say which class receives, as all were at first, and an object that no request may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from rl_core.interfaces import CONTRACT_VERSION, Rendezvous
from rl_rollout.transports.files import FilesReceiver, FilesSender, FilesTransport

_files = FilesTransport()


@attrs.frozen
class OtherTransport:
    """As `files`, with a receiver of its own, and no attribute that names it."""

    contract_version: int = CONTRACT_VERSION
    name: str = "tests.rollout.vllm.other_transport:other"
    is_staged: bool = True

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        opened = _files.open(num_ranks=num_ranks, num_engines=num_engines)
        return attrs.evolve(opened, transport=self.name, receiver=f"{__name__}:OtherReceiver")

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> FilesSender:
        return _files.sender(rendezvous, rank, world_size)

    def close(self, rendezvous: Rendezvous) -> None:
        _files.close(rendezvous)


class OtherReceiver(FilesReceiver):
    """In a module that no installed transport names."""


def leave_a_trace(rendezvous: Rendezvous) -> Any:
    """Shows that it was called: no receiver at all."""
    Path(rendezvous.data["trace"]).write_text("called")
    return None


other = OtherTransport()
