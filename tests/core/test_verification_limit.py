"""The limit of the weight proof grows for a model that finds the fixed tokens unlikely; a limit set by the user stays.

The scores are scripted; tests/rollout/test_verification.py and tests/real_model use real weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rl_core.batch import Batch
from rl_core.config import from_mapping
from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import Completion, GenerateRequest
from rl_core.trainer.before.settings import serving_settings
from rl_core.trainer.publishing.verification import (
    LIMITS,
    VerificationSettings,
    WeightVerification,
    verification_of,
)
from rl_core.workers import MicroBatchLimits

PRETRAINED, USUAL = -15.3, -5.0
"""Mean log-probs of random tokens in nats: SmolLM2-135M's, and the value below which the limit grows."""
BETWEEN_RIGHT_SIDES = 0.12
"""Difference in nats between SmolLM2-135M's log-probs in the trainer and in an engine, both in bfloat16."""
LIMIT_KEY = "generator.inference_engine.weight_verification.limit"


class Sides:
    """A trainer with two tensors and its engine. Noise on a tensor raises or lowers each log-prob by 8 times the scale
    of the noise. The engine rounds differently."""

    can_perturb = True
    vocab_size = 50

    def __init__(self, mean_logprob: float, stale: str | None = None, sampled_differently: float = 0.0):
        self.sampled_differently = sampled_differently
        self.mean_logprob = mean_logprob
        self.stale = stale
        self.trained = {"embedding": 0.0, "norm": 0.0}
        self.served = dict(self.trained)

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

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.requested = request.params
        length, count = len(request.prompt_tokens), request.params.max_tokens
        logprobs = self._logprobs(self.served, self.sampled_differently + BETWEEN_RIGHT_SIDES, length + count)[length:]
        return (
            Completion(
                tokens=(1,) * count,
                logprobs=tuple(logprobs.tolist()),
                policy_versions=(0,) * count,
                stop_reason="length",
            ),
        )

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


CORRECTION = {"trainer.algorithm.off_policy_correction.tis_ratio_type": "token"}
PASSED = {
    "generator.inference_engine.backend": "vllm",
    "generator.inference_engine.engine_init_kwargs": {"kv_cache_dtype": "fp8", "quantization": "fp8"},
}


async def test_an_engine_that_samples_other_log_probs_than_it_scores_is_refused_with_its_options():
    message = (
        r"do not sample from the trainer's policy: on 128 sampled tokens, .* by 1.12 on average \(limit 0.184\) and at "
        r"most by 1.12.*engine_init_kwargs sets kv_cache_dtype, quantization.*off_policy_correction"
    )
    with pytest.raises(WeightSyncError, match=message):
        await prove(Sides(PRETRAINED, sampled_differently=1.0), settings_of(**PASSED))


class Unperturbable(Sides):
    can_perturb = False


async def test_sampling_is_proved_for_arguments_of_the_engine_even_if_weights_cannot_be_perturbed():
    sides = Unperturbable(PRETRAINED, sampled_differently=1.0)
    arguments = {"generator.sampling_params.extra_args": {"extra_args": {"my_sampler": 1}}}
    await prove(sides, settings_of(**PASSED))  # without them, nothing is proved
    await prove(Unperturbable(PRETRAINED), settings_of(**PASSED, **arguments))
    with pytest.raises(WeightSyncError, match=r"do not sample .*extra_args \(extra_args\); remove what changes"):
        await prove(sides, settings_of(**PASSED, **arguments))
    assert sides.requested.extra_args == {"extra_args": {"my_sampler": 1}}


def test_arguments_of_an_engine_that_cannot_score_are_refused():
    settings = settings_of(**PASSED, **{"generator.sampling_params.extra_args": {"extra_args": {}}})
    with pytest.raises(ConfigError, match=r"extra_args: got extra_args, but this engine cannot score tokens"):
        verification_of(settings, cast(Any, None), cast(Any, SimpleNamespace(can_score=False)), cast(Any, None))


async def test_with_a_correction_the_difference_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture):
    await prove(Sides(PRETRAINED, sampled_differently=1.0), settings_of(**PASSED, **CORRECTION))
    assert "differ from the trainer's by 1.12 on average (limit 0.184)" in caplog.text
    assert "off_policy_correction is on, so the run goes on" in caplog.text


async def test_with_a_correction_an_engine_that_scores_otherwise_is_compared_with_its_first_difference(
    caplog: pytest.LogCaptureFixture,
):
    sides = Sides(USUAL)
    verification = WeightVerification(settings_of(**CORRECTION), cast(Any, sides), sides, sides.publish)
    await verification.prove()
    assert "mean |difference| 0.12 (limit 0.06)" in caplog.text
    assert (await verification.probe(1))["weight_sync/logprob_diff_mean"] == pytest.approx(0.12)
    sides.trained = {"embedding": 0.5, "norm": 0.0}  # not published
    with pytest.raises(WeightSyncError, match=r"\(limit 0.24\)"):
        await verification.probe(2)


async def test_with_a_correction_a_tensor_that_does_not_arrive_is_found_if_the_engine_differs_by_rounding_alone():
    with pytest.raises(WeightSyncError, match="every weight was perturbed"):
        await prove(Sides(PRETRAINED, stale="embedding"), settings_of(**CORRECTION))


async def test_the_correction_that_asynchronous_runs_have_by_default_excuses_no_engine():
    settings = settings_of(**{"trainer.max_staleness": 1, "trainer.placement.colocate_all": False})
    assert not settings.is_corrected
    assert settings_of(**CORRECTION).is_corrected


async def test_an_engine_whose_log_probs_are_not_numbers_is_refused_with_a_correction_too():
    with pytest.raises(WeightSyncError, match="nan"):
        await prove(Sides(math.nan), settings_of(**CORRECTION))
