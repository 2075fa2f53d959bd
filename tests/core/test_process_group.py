"""Process groups: a rank without a group, a second group in one process, and a store opened before the ranks join."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rl_core.errors import ConfigError, WorkerError
from rl_core.interfaces import RankInfo
from rl_core.rank_kit import agree, from_first, join_process_group
from rl_core.rank_kit.process_group import JOINS_OPEN_STORE, open_store


def refuse() -> None:
    raise ConfigError("told to fail")


def test_a_rank_without_a_process_group_agrees_with_itself():
    assert not dist.is_initialized()
    assert agree(lambda: 1) == from_first(lambda: 1) == 1
    for call in (agree, from_first):
        with pytest.raises(ConfigError, match="told to fail"):
            call(refuse)


def test_the_error_for_a_second_process_group_says_what_to_do():
    join_process_group(RankInfo(), torch.device("cpu"))
    try:
        assert agree(lambda: 1) == 1
        with pytest.raises(WorkerError, match=r"rank 0 of 1: this process already has .* from the backend's needs_own"):
            join_process_group(RankInfo(), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_rank_0_joins_an_open_store_whose_port_nobody_else_can_take(monkeypatch):
    for variable, value in JOINS_OPEN_STORE.items():
        monkeypatch.setenv(variable, value)
    opened = open_store()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", opened.port))
    joined, rank, _ = next(rendezvous(f"tcp://127.0.0.1:{opened.port}", rank=0, world_size=2))
    assert rank == 0
    joined.set("met", "here")
    assert opened.get("met") == b"here"
