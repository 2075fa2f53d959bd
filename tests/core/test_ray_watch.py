"""The watch of Ray's own servers; sockets stand in for the servers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.workers.ray_watch import RayWatch


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "raylet"))
        listener.listen()
        yield listener


@pytest.fixture
def gcs() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def watch(raylet: socket.socket, gcs: socket.socket) -> Iterator[RayWatch]:
    watch = RayWatch(raylet.getsockname(), f"127.0.0.1:{gcs.getsockname()[1]}", "/logs", patience_s=0.0)
    yield watch
    watch.close()


def lost_at_last(watch: RayWatch) -> str:
    deadline = time.monotonic() + 200
    while (lost := watch.lost) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lost


def test_a_node_manager_that_died_is_found_at_once_and_named(
    watch: RayWatch, raylet: socket.socket, caplog: pytest.LogCaptureFixture
):
    assert watch.lost is None
    raylet.close()
    with caplog.at_level(logging.WARNING):
        assert watch.lost == "Ray's node manager (raylet) on this machine died (its log: /logs/raylet.out)"
        watch.close()  # its thread does not log the death a second time
    assert [record.getMessage().count("raylet") for record in caplog.records] == [2]


def test_servers_that_end_after_the_watch_closed_are_not_reported(
    watch: RayWatch, raylet: socket.socket, gcs: socket.socket
):
    watch.close()
    raylet.close()
    gcs.close()
    assert watch.lost is None


def test_a_control_server_that_refuses_connections_for_too_long_is_named(watch: RayWatch, gcs: socket.socket):
    address = f"127.0.0.1:{gcs.getsockname()[1]}"
    gcs.close()
    assert lost_at_last(watch).startswith(f"Ray's control server (gcs_server) at {address} died: it has refused")
