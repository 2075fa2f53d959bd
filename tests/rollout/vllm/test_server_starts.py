"""A server whose processes die while it starts, and what the error shows of its log. Runs over Ray, with an actor that
loads no model.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_core.errors import DeadlineError, GenerationError
from rl_rollout.vllm import server_group
from rl_rollout.vllm.placement import reserve_places
from rl_rollout.vllm.server import ServerSettings, log_excerpt
from rl_rollout.vllm.server_group import Server
from tests.rollout.vllm.dying_server import Dying
from tests.rollout.vllm.servers import TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def started(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, start_timeout_s: float = 300.0, **arguments: Any
) -> int:
    """Starts the server, and returns how often it loaded."""
    remote: Any = ray.remote
    monkeypatch.setattr(server_group, "_ACTOR", remote(max_restarts=0)(Dying))
    log = directory / "log"

    async def start() -> None:
        (place,) = await reserve_places(1, 1, shares_devices=False, timeout_s=300)
        settings = ServerSettings(
            engine_args={"model": "none", **arguments}, host="127.0.0.1", tokens=TOKENS, log_path=str(log)
        )
        server = Server(index=0, place=place, settings=settings, environment={}, start_timeout_s=start_timeout_s)
        try:
            await server.start()
        finally:
            server.kill()
            place.free()

    try:
        asyncio.run(start())
    finally:
        count = len(log.read_text().splitlines()) if log.exists() else 0
    return count


@pytest.mark.parametrize("kind", ["killed", "engine died"])
def test_a_server_is_started_once_more_if_its_process_dies_during_the_start(
    kind: str, ray_for_servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert started(tmp_path, monkeypatch, kind=kind, deaths=1) == 2
    assert "vLLM server 0 failed to start and is started once more" in caplog.text


def test_a_second_death_is_an_error(ray_for_servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(GenerationError, match="died while it started"):
        started(tmp_path, monkeypatch, kind="killed", deaths=2)
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_server_that_is_not_ready_in_time_is_given_up(
    ray_for_servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 5 s .*start_timeout_s.* from its log"):
        started(tmp_path, monkeypatch, start_timeout_s=5.0, kind="hangs", deaths=1)
    assert time.monotonic() - began < 300, "the server hangs for an hour"
    assert re.search(r"vLLM server 0: loading none, \d+ s after its start", caplog.text)


def test_an_engine_that_refuses_its_arguments_is_not_started_again(
    ray_for_servers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(GenerationError, match="did not start: ValueError"):
        started(tmp_path, monkeypatch, kind="ValueError: no such model", deaths=1)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_excerpt_of_a_long_log_begins_with_the_errors_of_the_last_start(tmp_path: Path):
    log = tmp_path / "log"
    before = ["---- this server's process started: pid 1", "ERROR of an earlier start"]
    stack = [f"(EngineCore pid=3)   File {i}" for i in range(60)]
    log.write_text(
        "\n".join(
            [*before, "---- this server's process started: pid 2", "INFO loading", "ERROR Worker died (-11)", *stack]
        )
    )
    assert log_excerpt(log).splitlines() == ["ERROR Worker died (-11)", "...", *stack[-40:]]
    log.write_text("one line")
    assert log_excerpt(log) == "one line"
    assert "cannot be read" in log_excerpt(tmp_path / "none")


def test_the_error_of_engines_that_find_no_room_on_cpus_does_not_advise_to_share_gpus(ray_for_servers: None):
    with pytest.raises(DeadlineError, match=r"engine 0: waited 1 s for 6250 CPU, 0 GPU; .*num_engines$"):
        asyncio.run(reserve_places(1, 100_000, shares_devices=False, timeout_s=1))
