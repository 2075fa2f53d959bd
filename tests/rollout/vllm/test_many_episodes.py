"""Plays the 200 disturbed episodes of `many_episodes` on a server, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from rl_rollout.transports.files import FilesTransport
from rl_transformers.testing.inference import make_bench
from tests.rollout.many_episodes import play_disturbed, require_exact_accounting
from tests.rollout.vllm.servers import RunningServer, connect


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_one_of_two_hundred_episodes_is_accounted_for_despite_pauses_and_aborts(dense_server: RunningServer):
    with asyncio.Runner() as runner:
        client = runner.run(connect(dense_server))
        bench = make_bench(client, FilesTransport(timeout_s=60.0), dense_server.model_path, runner)
        first_version = runner.run(client.health()).version + 1
        played = runner.run(play_disturbed(bench, first_version))
        runner.run(client.close())
    require_exact_accounting(bench, *played)
