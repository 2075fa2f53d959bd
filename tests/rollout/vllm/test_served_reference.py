"""A teacher on a real vLLM server."""

from __future__ import annotations

import itertools

import pytest
import torch

from rl_core.batch import Batch
from rl_core.trainer.update.served_reference import ServedReference
from rl_rollout.transports.files import FilesTransport
from tests.rollout.vllm.servers import RunningServer, connect
from tests.rollout.vllm.trainers import LIMITS, Trainer, policy_of

_versions = itertools.count(9000)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_served_teacher_scores_like_a_teacher_on_ranks(dense_server: RunningServer):
    """Agreement to 1e-4 nats in float32; other tests measure 1e-5."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 48, (length,), generator=generator).tolist() for length in (2, 40, 17)]
    batch = Batch.from_sequences([{"tokens": tokens, "routed": [False] * len(tokens)} for tokens in sequences])
    client = await connect(dense_server)
    async with policy_of(dense_server.model_path) as policy:
        trainer = Trainer(policy, client, FilesTransport())
        trainer.version = next(_versions)
        await trainer.publish()
        served_T = await ServedReference(client, timeout_s=60.0).logprobs(batch)
        on_ranks = await policy.forward(batch, LIMITS, temperature=1.0, returns=("logprobs",))
    await client.close()
    first_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first_T[batch.offsets[:-1]] = True
    torch.testing.assert_close(served_T[~first_T], on_ranks["logprobs"][~first_T], rtol=0.0, atol=1e-4)
