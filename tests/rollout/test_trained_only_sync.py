"""After the first sync, a run with frozen parameters sends only the layers and tensors that are trained."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.trainer.publishing.publish import Publication
from tests.rollout.test_delta_sync import experts_path, local_engine, model_path, scores_of, train
from tests.rollout.vllm.trainers import policy_of, serving

__all__ = ["experts_path", "model_path"]
TRAINABLE = (r"layers\.1\.mlp", "model.norm")


async def published(engines: Any, version: int) -> set[str]:
    """Publishes; returns the names of the tensors that were sent."""
    engines._version = version
    publication: Publication = await engines._publish()
    return set(publication.sent.tensors)


@pytest.mark.parametrize("transport", ["files", "shared_memory", "broadcast"])
async def test_only_trained_layers_are_sent_again_and_the_engine_scores_like_one_with_whole_weights(
    model_path, transport
):
    part, whole = await local_engine(model_path), await local_engine(model_path)
    async with policy_of(model_path, bf16=True, trainable=TRAINABLE) as policy:
        by_part = serving(policy, part, transport, interval=None, only_trained=True)
        by_whole = serving(policy, whole, transport, interval=None)
        every = await published(by_part, 0)
        before = await scores_of(part)
        for version in (1, 2):
            for seed in range(20):
                await train(policy, seed)
            again = await published(by_part, version)
            assert again == {name for name in every if name.startswith("model.layers.1.")} | {"model.norm.weight"}
            assert await published(by_whole, version) == every
            assert await scores_of(part) == await scores_of(whole) != before
            assert (await part.health()).version == version
    await part.close()
    await whole.close()


async def test_packed_experts_of_frozen_layers_are_kept(experts_path):
    await test_only_trained_layers_are_sent_again_and_the_engine_scores_like_one_with_whole_weights(
        experts_path, "shared_memory"
    )


async def test_an_engine_with_weights_of_another_sync_gets_whole_weights(model_path, caplog):
    engine = await local_engine(model_path)
    async with policy_of(model_path, bf16=True, trainable=TRAINABLE) as policy:
        engines = serving(policy, engine, interval=None, only_trained=True)
        every = await published(engines, 0)
        await published(serving(policy, engine, interval=None), 1)
        assert await published(engines, 2) == every
        assert "but this engine holds none" in caplog.text
        assert await published(engines, 3) < every
        engines._turns.engine_sleeps = True
        assert await published(engines, 4) == every, "an engine that has slept has lost its weights"
    await engine.close()


async def test_a_part_sent_to_an_engine_that_expects_the_whole_is_refused(model_path, monkeypatch):
    """Control: the engine checks that a version is complete unless the sync says that it is a part."""
    from rl_rollout.local import model

    engine = await local_engine(model_path)
    monkeypatch.setattr(model, "has_only_trained", lambda delta: False)
    async with policy_of(model_path, bf16=True, trainable=TRAINABLE) as policy:
        engines = serving(policy, engine, interval=None, only_trained=True)
        every = await published(engines, 0)
        assert await published(engines, 1) == every, "the part was refused, and the whole was sent again"
    await engine.close()
