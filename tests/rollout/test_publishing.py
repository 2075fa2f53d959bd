"""How long engines pause for a sync: for the swap alone if the version is staged, otherwise for the whole transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rl_core.errors import WeightSyncError
from rl_core.interfaces import GenerateRequest, SamplingParams, WeightBucket
from tests.rollout.test_verification import local_engine
from tests.rollout.vllm.servers import write_model
from tests.rollout.vllm.trainers import Trainer, policy_of, serving

ASKED = GenerateRequest(
    sample_id="meanwhile", prompt_tokens=(1, 2, 3), params=SamplingParams(max_tokens=4, ignore_eos=True), seed=0
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("published") / "model")


async def versions_sampled_meanwhile(model_path, transport, *, within_s: float) -> tuple[int, ...]:
    """The versions that sample a request sent in the middle of a sync. The rank waits `within_s` for the answer before
    it sends the rest; without an answer by then, the result is empty.
    """
    engine, loop = await local_engine(model_path), asyncio.get_running_loop()
    async with policy_of(model_path) as policy:
        trainer = Trainer(policy, engine, transport)
        await trainer.publish()
        found: list[tuple[int, ...]] = []

        def sampling_meanwhile(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
            yield next(buckets)
            asked = asyncio.run_coroutine_threadsafe(engine.generate(ASKED), loop)
            try:
                found.append(asked.result(timeout=within_s)[0].policy_versions)
            except TimeoutError:
                asked.cancel()
                found.append(())
            yield from buckets

        trainer.send_only(sampling_meanwhile)
        await trainer.publish()
        assert (await engine.health()).version == trainer.version
    await engine.close()
    return found[0]


@pytest.mark.parametrize("transport", ["files", "shared_memory"])
async def test_an_engine_samples_while_a_staged_version_arrives(model_path, transport):
    assert await versions_sampled_meanwhile(model_path, transport, within_s=60.0) == (1,) * 4


async def test_an_engine_pauses_while_an_unstaged_version_arrives(model_path):
    """Negative control: broadcast does not stage versions."""
    assert await versions_sampled_meanwhile(model_path, "broadcast", within_s=2.0) == ()


async def test_after_a_staged_version_failed_the_engine_serves_the_old_one(model_path):
    engine = await local_engine(model_path)
    async with policy_of(model_path) as policy:
        trainer = Trainer(policy, engine, "files")
        await trainer.publish()

        def breaks(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
            yield next(buckets)
            raise WeightSyncError("the rank broke off")

        trainer.send_only(breaks)
        with pytest.raises(WeightSyncError, match="broke off"):
            await trainer.publish()
        (answer,) = await engine.generate(ASKED)
        assert answer.policy_versions == (1,) * 4
    await engine.close()


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
async def test_the_pause_is_a_metric(model_path, transport):
    engine = await local_engine(model_path)
    async with policy_of(model_path) as policy:
        metrics = await serving(policy, engine, transport, interval=None).publish(1)
    assert metrics.keys() == {"time/pause"}
    assert 0 < metrics["time/pause"] < 60
    await engine.close()
