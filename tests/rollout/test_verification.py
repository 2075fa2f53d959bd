"""Weight verification with the local engine: it passes if the weights are the trainer's; otherwise it stops the run
with an error that states both log-probs.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import attrs
import pytest

from rl_core.errors import WeightSyncError
from rl_core.interfaces import LoraConfig
from rl_core.trainer.publishing import verification
from rl_core.trainer.publishing.verification import verification_of
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from tests.rollout.vllm.servers import write_model
from tests.rollout.vllm.trainers import Trainer, policy_of


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("verified") / "model")


async def local_engine(path, dtype="float32", **model_kwargs):
    load = partial(load_model, str(path), dtype=dtype, device="cpu", model_kwargs=model_kwargs)
    return await LocalEngine.start(lambda: (load(), None), max_num_seqs=4, timeout_s=250.0, num_threads=1)


@pytest.fixture
async def trainer(model_path):
    engine = await local_engine(model_path)
    async with policy_of(model_path) as policy:
        yield Trainer(policy, engine, "files")
    await engine.close()


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.worker.shards.exported()}


async def test_the_proof_passes_and_leaves_every_weight_bit_for_bit(trainer):
    before = weights_of(trainer)
    await trainer.verification.prove()
    after = weights_of(trainer)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    found = await trainer.verification.probe(trainer.version)
    assert found["weight_sync/logprob_diff_max"] < 1e-5, "both sides run the same model code in float32"


async def test_noise_reaches_every_trained_tensor_and_depends_on_the_seed(trainer):
    before = weights_of(trainer)
    await trainer.policy.perturb(1, 0.5)
    first = weights_of(trainer)
    assert not [name for name in before if before[name].equal(first[name])]
    await trainer.policy.perturb(2, 0.5)
    second = weights_of(trainer)
    assert not [name for name in before if first[name].equal(second[name])]
    await trainer.policy.perturb(1, 0.5)
    again = weights_of(trainer)
    assert all(first[name].equal(again[name]) for name in before), "noise must replace earlier noise, not add to it"
    await trainer.policy.restore()
    await trainer.policy.restore()
    assert all(tensor.equal(before[name]) for name, tensor in weights_of(trainer).items())


async def test_stale_weights_stop_the_run_with_both_log_probs(trainer):
    await trainer.publish()
    await trainer.train()
    with pytest.raises(WeightSyncError) as stopped:
        await trainer.verification.probe(1)
    message = str(stopped.value)
    assert "engine local does not compute with the trainer's weights: on 256 fixed tokens" in message
    assert "the trainer's mean log-prob is -" in message
    assert "the engine's -" in message
    assert "(limit 0.001)" in message


async def test_nan_log_probs_fail_the_probe(trainer, monkeypatch):
    await trainer.publish()

    async def score(sequences):
        return {"sick": [[math.nan] * len(sequence) for sequence in sequences]}

    monkeypatch.setattr(trainer.client, "score", score)
    with pytest.raises(WeightSyncError, match="engine sick does not compute"):
        await trainer.verification.probe(1)


async def test_without_a_running_engine_a_probe_warns_and_a_proof_fails(trainer, monkeypatch, caplog):
    await trainer.publish()

    async def score(sequences):
        return {}

    monkeypatch.setattr(trainer.client, "score", score)
    assert await trainer.verification.probe(1) == {}
    assert "no engine was in service: the weights are not verified" in caplog.text
    with pytest.raises(WeightSyncError, match="no engine was in service to prove"):
        await trainer.verification.prove()


async def test_a_probe_compares_each_engine_and_names_the_wrong_one(trainer, monkeypatch):
    await trainer.publish()
    honest = trainer.client.score

    async def score(sequences):
        (scores,) = (await honest(sequences)).values()
        return {"good": scores, "bad": [[value - 0.01 for value in one] for one in scores]}

    monkeypatch.setattr(trainer.client, "score", score)
    with pytest.raises(WeightSyncError, match=r"engine bad .* mean \|difference\| 0.01 "):
        await trainer.verification.probe(1)


async def test_noise_that_is_too_small_cannot_prove_the_weights(trainer, monkeypatch):
    monkeypatch.setattr(verification, "LEAST_NOISE", 1e-12)
    with pytest.raises(WeightSyncError, match=r"too little to prove .* \(it takes \d.*bf16=false"):
        await trainer.verification.prove()


async def test_probes_run_at_the_interval(trainer):
    trainer.verification._settings = attrs.evolve(trainer.verification._settings, interval=2)
    await trainer.publish()
    probed = [bool(await trainer.verification.after_sync(version)) for version in range(4)]
    assert probed == [True, False, True, False]


async def test_a_resumed_run_probes_after_its_first_sync_and_then_as_if_uninterrupted(trainer):
    trainer.verification._settings = attrs.evolve(trainer.verification._settings, interval=2)
    await trainer.publish()
    probed = [version for version in range(3, 9) if await trainer.verification.after_sync(version)]
    assert probed == [3, 4, 6, 8]


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj"]], ids=str)
async def test_noise_fits_small_adapters(model_path, targets, caplog):
    """With noise scaled for whole weights, the adapter of `v_proj` alone would change the model too little."""
    engine = await local_engine(model_path)
    async with policy_of(model_path, LoraConfig(rank=1, alpha=1, target_modules=targets)) as policy:
        trainer = Trainer(policy, engine, "files")
        # The limit for bfloat16 is 60 times the limit for float32, in which this model computes.
        trainer.verification._settings = attrs.evolve(
            trainer.verification._settings, limit=verification.LIMITS["bfloat16"]
        )
        before = weights_of(trainer)
        await trainer.verification.prove()
        assert all(before[name].equal(tensor) for name, tensor in weights_of(trainer).items())
    await engine.close()


async def test_an_engine_that_cannot_score_is_reported_as_unverified(trainer, caplog):
    silent = SimpleNamespace(can_score=False)
    made = verification_of(trainer.verification._settings, trainer.policy, silent, trainer.publish)
    assert made is None
    assert "cannot score tokens" in caplog.text


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_every_pause_mode_ends_with_the_new_version_served(trainer, mode):
    trainer.pause_mode = mode
    await trainer.publish()
    assert (await trainer.client.health()).version == trainer.version
    assert await trainer.verification.probe(trainer.version)


class SamplesWith:
    """Scores with one engine and samples with another, as an engine does whose cache is quantised."""

    def __init__(self, scoring, sampling):
        self._scoring, self.generate = scoring, sampling.generate

    def __getattr__(self, name):
        return getattr(self._scoring, name)


@pytest.fixture
async def otherwise(model_path):
    """An engine of which an option (`engine_init_kwargs.rms_norm_eps`) changes all numbers."""
    engine = await local_engine(model_path, rms_norm_eps=0.1)
    yield engine
    await engine.close()


async def test_an_option_that_changes_the_numbers_of_an_engine_is_refused_with_a_remedy(model_path, otherwise):
    async with policy_of(model_path) as policy:
        with pytest.raises(WeightSyncError, match=r"fixed tokens .*tis_ratio_type=token"):
            await Trainer(policy, otherwise, "files").verification.prove()


async def test_an_option_that_changes_only_what_is_sampled_is_refused(trainer, otherwise):
    trainer.verification._client = SamplesWith(trainer.client, otherwise)
    with pytest.raises(WeightSyncError, match=r"do not sample from the trainer's policy: on 128 sampled tokens"):
        await trainer.verification.prove()


async def test_with_a_correction_the_difference_is_logged_and_a_stale_tensor_is_still_found(
    model_path, otherwise, caplog
):
    caplog.set_level("WARNING")
    async with policy_of(model_path) as policy:
        trainer = Trainer(policy, otherwise, "files")
        trainer.verification._settings = attrs.evolve(trainer.verification._settings, is_corrected=True)
        await trainer.verification.prove()
        assert "fixed tokens" in caplog.text
        assert "sampled tokens" in caplog.text
        assert "off_policy_correction is on, so the run goes on" in caplog.text
        await trainer.policy.perturb(1, 1.0)
        with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
            await trainer.verification.probe(2)


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "bfloat16"), (True, "float32")])
async def test_rounding_alone_is_within_the_limit_of_the_coarser_dtype(model_path, bf16, dtype, caplog):
    """Measured on random Qwen2, Qwen3 (12 layers), Llama, Mixtral and Qwen3-MoE models: float32 at most 4e-7, bfloat16
    at most 0.0065, with experts at most 0.015. The limits are 1e-3 and 6e-2."""
    caplog.set_level("INFO")
    engine = await local_engine(model_path, dtype)
    async with policy_of(model_path, bf16=bf16) as policy:
        trainer = Trainer(policy, engine, "files")
        limit = verification.LIMITS["bfloat16"]
        trainer.verification._settings = attrs.evolve(trainer.verification._settings, limit=limit / 3)
        await trainer.publish()
        await trainer.verification.probe(1)
        await trainer.verification._prove_sampling()
    assert "sampling proved" in caplog.text
    await engine.close()
