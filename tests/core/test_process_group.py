"""What a rank's process group does for a rank alone."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from rl_core.errors import ConfigError, WorkerError
from rl_core.interfaces import RankInfo
from rl_core.rank_kit import agree, from_first, join_process_group
from rl_core.rank_kit.process_group import kept_port


def refuse() -> None:
    raise ConfigError("told to fail")


def test_a_rank_without_a_process_group_agrees_with_itself():
    assert not dist.is_initialized()
    assert agree(lambda: 1) == from_first(lambda: 1) == 1
    for call in (agree, from_first):
        with pytest.raises(ConfigError, match="told to fail"):
            call(refuse)


def test_a_second_process_group_in_one_process_says_why_there_is_one_and_what_to_do():
    join_process_group(RankInfo(), torch.device("cpu"))
    try:
        assert agree(lambda: 1) == 1
        with pytest.raises(WorkerError, match=r"rank 0 of 1: this process already has .* from the backend's needs_own"):
            join_process_group(RankInfo(), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_a_kept_port_is_given_to_nobody_else_and_a_store_listens_on_it():
    with kept_port() as kept:
        port = kept.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True)
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port).get("key") == b"value"
