"""The only engine is killed during a broadcast. The version is published again when the engine has restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_core.interfaces import WeightBucket
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_rollout.vllm.launch import create_client
from tests.rollout.vllm.servers import command_line, make_spec, request, write_model
from tests.rollout.vllm.trainers import BUCKET_BYTES, Trainer, policy_of, serving


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["core", "server"])
async def test_a_single_engine_killed_in_a_broadcast_gets_the_version_after_restart(
    ray_for_servers: None, tmp_path: Path, victim: str
):
    model_path = write_model(tmp_path / "model")
    client = await create_client(make_spec(model_path, tmp_path))
    async with policy_of(model_path) as policy:
        trainer, engines = Trainer(policy, client, "broadcast"), serving(policy, client, "broadcast", interval=None)
        await engines.publish(1)
        connection = client._pool.members[0].connection
        assert connection is not None
        server = psutil.Process((await connection.call("health", timeout_s=60))["pid"])
        cores = [child for child in server.children(recursive=True) if "EngineCore" in command_line(child)]
        killed = {"core": cores[0], "server": server}[victim].pid

        def kills(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
            tensors = [pair for bucket in buckets for pair in unpack_bucket(bucket)]
            for i, bucket in enumerate(pack_buckets(tensors, BUCKET_BYTES)):
                if i == 3:
                    os.kill(killed, signal.SIGKILL)
                    trainer.send_only(None)
                yield bucket

        trainer.send_only(kills)
        await engines.publish(2)
        assert not psutil.pid_exists(killed)
        (answer,) = await client.generate(request("after", max_tokens=4, ignore_eos=True))
        assert answer.policy_versions == (2,) * 4
    await client.close()
