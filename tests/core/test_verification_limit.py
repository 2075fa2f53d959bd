"""The limit of the weight proof grows for a model that finds the fixed tokens unlikely; a limit set by the user stays.

The scores are scripted; tests/rollout/test_verification.py and tests/real_model use real weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from rl_core.batch import Batch
from rl_core.config import from_mapping
from rl_core.errors import WeightSyncError
from rl_core.trainer.settings import serving_settings
from rl_core.trainer.verification import LIMITS, VerificationSettings, WeightVerification
from rl_core.workers import MicroBatchLimits

PRETRAINED, USUAL = -15.3, -5.0
"""Mean log-probs of random tokens in nats: SmolLM2-135M's, and the value below which the limit grows."""
BETWEEN_RIGHT_SIDES = 0.12
"""Difference in nats between SmolLM2-135M's log-probs in the trainer and in an engine, both in bfloat16."""
LIMIT_KEY = "generator.inference_engine.weight_verification.limit"


class Sides:
    """A trainer with two tensors and its engine. Noise on a tensor raises or lowers each log-prob by 8 times the scale
    of the noise. The engine rounds differently."""

    vocab_size = 50

    def __init__(self, mean_logprob: float, stale: str | None = None):
        self.mean_logprob = mean_logprob
        self.stale = stale
        self.trained = {"embedding": 0.0, "norm": 0.0}
        self.served = dict(self.trained)

    async def is_perturbable(self) -> bool:
        return True

    async def perturb(self, seed: int, scale: float) -> None:
        self.trained = dict.fromkeys(self.trained, 8 * scale)

    async def restore(self) -> None:
        self.trained = dict.fromkeys(self.trained, 0.0)

    async def publish(self) -> None:
        self.served |= {name: noise for name, noise in self.trained.items() if name != self.stale}

    async def forward(self, batch: Batch, limits: MicroBatchLimits, *, temperature: float) -> dict[str, torch.Tensor]:
        return {"logprobs": torch.cat([self._logprobs(self.trained, 0.0, int(length)) for length in batch.lengths])}

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, list[list[float]]]:
        return {
            "scripted": [self._logprobs(self.served, BETWEEN_RIGHT_SIDES, len(tokens)).tolist() for tokens in sequences]
        }

    def _logprobs(self, weights: Mapping[str, float], rounding: float, length: int) -> torch.Tensor:
        moved = sum(weights.values()) + rounding
        return self.mean_logprob + moved * torch.tensor([1.0, -1.0]).repeat(length)[:length]


def settings_of(**keys: Any) -> VerificationSettings:
    """The verification settings of a run in bfloat16."""
    return serving_settings(from_mapping({"trainer.policy.model.path": "a model", **keys})).verification


async def prove(sides: Sides, settings: VerificationSettings) -> None:
    await WeightVerification(settings, cast(Any, sides), sides, sides.publish).prove()


async def test_a_correct_pretrained_model_in_bfloat16_passes():
    settings = settings_of()
    assert settings.limit == LIMITS["bfloat16"] < BETWEEN_RIGHT_SIDES
    await prove(Sides(PRETRAINED), settings)


async def test_a_limit_that_the_user_set_does_not_grow():
    with pytest.raises(WeightSyncError, match=r"every weight was restored, .* 0.12 \(limit 0.06\)"):
        await prove(Sides(PRETRAINED), settings_of(**{LIMIT_KEY: LIMITS["bfloat16"]}))


async def test_the_limit_of_a_usual_model_does_not_grow():
    with pytest.raises(WeightSyncError, match=r"every weight was restored, .* 0.12 \(limit 0.06\)"):
        await prove(Sides(USUAL), settings_of())


@pytest.mark.parametrize("stale", ["embedding", "norm"])
async def test_a_stale_tensor_is_found_within_the_grown_limit(stale: str):
    with pytest.raises(WeightSyncError, match=r"every weight was perturbed, .* \(limit 0.551\)"):
        await prove(Sides(PRETRAINED, stale=stale), settings_of())
