"""SmolLM2-135M-Instruct in bfloat16 with the local engine: the weight proof accepts a correct run, and stops a run in
which a weight does not reach the engine."""

from __future__ import annotations

from functools import partial

import attrs
import pytest

from rl_core.config import from_mapping
from rl_core.errors import WeightSyncError
from rl_core.trainer.before.settings import serving_settings
from rl_core.trainer.publishing.verification import WeightVerification
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from tests.real_model.real_text import real_model
from tests.rollout.vllm.trainers import Trainer, policy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STALE = "model.embed_tokens.weight"
"""The weight that does not arrive. Noise on it changes log-probs by 1.15 nats; the limit is 0.61, and rounding changes
them by 0.14."""

NUM_TOKENS = 64
"""A quarter of the default, because bfloat16 is slow on processors without instructions for it."""


async def test_weights_of_a_real_model_are_proved_and_a_missing_one_is_found():
    model = real_model()
    settings = serving_settings(from_mapping({"trainer.policy.model.path": str(model)})).verification
    settings = attrs.evolve(settings, num_tokens=NUM_TOKENS)
    load = partial(load_model, str(model), dtype="bfloat16", device="cpu", model_kwargs={})
    engine = await LocalEngine.start(lambda: (load(), None), max_num_seqs=4, timeout_s=300.0, num_threads=1)
    async with policy_of(model, bf16=True) as policy:
        trainer = Trainer(policy, engine, "files", max_bucket_bytes=1 << 26)
        verification = WeightVerification(settings, policy, engine, trainer.publish)
        await verification.prove()

        without_growth = attrs.evolve(settings, limit_grows=False)
        with pytest.raises(WeightSyncError, match=r"\(limit 0.06\)"):
            await WeightVerification(without_growth, policy, engine, trainer.publish).probe(trainer.version)

        trainer.send_always_as_now(STALE)
        with pytest.raises(WeightSyncError, match="every weight was perturbed"):
            await verification.prove()
    await engine.close()
