"""Delta syncs send only changed weights. These tests cover the path from a real optimizer step to the engine's
log-probs. After a failure, the next sync sends whole weights.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from rl_core.batch import Batch
from rl_core.errors import WeightSyncError
from rl_core.interfaces import LossSpec
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from tests.rollout.vllm.servers import write_model
from tests.rollout.vllm.trainers import LIMITS, policy_of, serving

VOCAB = 24
TOKENS = [range(1, 20), range(3, 22, 2)]
SHARE = "weight_sync/sent_share"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("changed") / "model", hidden_size=256, intermediate_size=512)


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory):
    """A model whose experts are two packed tensors per layer in transformers; a sync sends tensors per expert."""
    sizes = {"num_experts": 4, "hidden_size": 256, "moe_intermediate_size": 128}
    return write_model(tmp_path_factory.mktemp("experts") / "model", **sizes)


async def local_engine(path):
    load = partial(load_model, str(path), dtype="bfloat16", device="cpu", model_kwargs={})
    return await LocalEngine.start(lambda: (load(), None), max_num_seqs=4, timeout_s=250.0, num_threads=1)


async def train(policy: Any, seed: int) -> None:
    """One AdamW step with a learning rate of 1e-6."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (4, 32), generator=generator).tolist()
    rows = [{"tokens": row, "loss_mask": [False] + [True] * 31, "loss_weights": [1 / 124] * 32} for row in tokens]
    await policy.forward_backward(Batch.from_sequences(rows), LIMITS, LossSpec(name="cross_entropy"), temperature=1.0)
    await policy.optim_step()


async def scores_of(engine: LocalEngine) -> Any:
    return (await engine.score(TOKENS))["local"]


@pytest.mark.parametrize("transport", ["files", "shared_memory", "broadcast"])
async def test_a_delta_sync_gives_the_log_probs_of_whole_weights_bit_for_bit(model_path, transport):
    changed, whole = await local_engine(model_path), await local_engine(model_path)
    async with policy_of(model_path, bf16=True) as policy:
        by_changes, by_whole = serving(policy, changed, transport), serving(policy, whole, transport, interval=None)
        assert (await by_changes.publish(0))[SHARE] == 1.0
        before = await scores_of(changed)
        for version in (1, 2, 3):
            await train(policy, version)
            assert 0 < (await by_changes.publish(version))[SHARE] < 0.05, "at most 5 % of the bytes may be sent"
            assert SHARE not in await by_whole.publish(version)
            assert await scores_of(changed) == await scores_of(whole)
        assert await scores_of(changed) != before, "three steps of 1e-6 must change bfloat16 log-probs"
    await changed.close()
    await whole.close()


async def test_a_delta_sync_of_packed_experts_gives_the_log_probs_of_whole_weights_bit_for_bit(experts_path):
    await test_a_delta_sync_gives_the_log_probs_of_whole_weights_bit_for_bit(experts_path, "shared_memory")


async def test_every_third_sync_is_whole(model_path):
    engine = await local_engine(model_path)
    async with policy_of(model_path, bf16=True) as policy:
        engines = serving(policy, engine, interval=3)
        shares = [(await engines.publish(version))[SHARE] for version in range(7)]
    assert [share == 1.0 for share in shares] == [True, False, False, True, False, False, True]
    await engine.close()


async def test_an_engine_that_lost_its_base_gets_whole_weights(model_path, caplog):
    engine = await local_engine(model_path)
    async with policy_of(model_path, bf16=True) as policy:
        engines = serving(policy, engine)
        await engines.publish(0)
        await train(policy, 1)
        engine._held.drop()
        assert (await engines.publish(1))[SHARE] == 1.0
        assert "publishing again with whole weights because the sync of changes failed" in caplog.text
        assert "but this engine holds none" in caplog.text
        assert (await engine.health()).version == 1
        assert (await engines.publish(2))[SHARE] < 0.05
    await engine.close()


async def test_wrong_weights_in_the_base_are_noticed_and_replaced(model_path, caplog):
    engine, other = await local_engine(model_path), await local_engine(model_path)
    async with policy_of(model_path, bf16=True) as policy:
        engines, beside = serving(policy, engine), serving(policy, other, interval=None)
        await engines.publish(0)
        await train(policy, 1)
        engine._held.tensors["model.norm.weight"][0] += 1
        assert (await engines.publish(1))[SHARE] == 1.0
        assert re.search("model.norm.weight: got .* after its changes", caplog.text)
        await beside.publish(1)
        assert await scores_of(engine) == await scores_of(other)
    await engine.close()
    await other.close()


async def test_the_sync_after_a_failed_sync_sends_whole_weights(model_path, monkeypatch):
    engine = await local_engine(model_path)
    async with policy_of(model_path, bf16=True) as policy:
        engines = serving(policy, engine)
        await engines.publish(0)
        honest = engine.update_weights

        async def refuse(rendezvous, version):
            await honest(rendezvous, version)
            raise WeightSyncError("lost")

        monkeypatch.setattr(engine, "update_weights", refuse)
        with pytest.raises(WeightSyncError, match="lost"):
            await engines.publish(1)
        monkeypatch.undo()
        assert (await engines.publish(2))[SHARE] == 1.0
        assert (await engines.publish(3))[SHARE] < 0.05
    await engine.close()
