"""Further sampling parameters of vLLM (`extra_args`): they reach the engine, and what could make the log-probs of
training inexact is refused before the run, or found by the run's proof."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import pytest_asyncio

from rl_core.errors import ConfigError, GenerationError, WeightSyncError
from rl_core.interfaces import SamplingParams
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.plugin import vllm
from rl_rollout.vllm.sampling_arguments import _FIXED, _OWN_KEYS, CHANGING, sampling_fields, try_sampling_arguments
from tests.rollout.vllm.servers import RunningServer, connect, make_spec, request
from tests.rollout.vllm.trainers import Trainer, policy_of

REPEATED = {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}
"""Ends a response after the same token twice."""


def refusal(extra_args: Mapping[str, Any], directory: Path, section: str = "sampling") -> str:
    """The error of the check before the run; empty if it passes."""
    spec = make_spec(directory, directory)
    try:
        vllm.validate(attrs.evolve(spec, **{section: SamplingParams(extra_args=extra_args)}))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ({"top_p": 0.9}, "sampling_params.extra_args.top_p: set it with generator.sampling_params.top_p"),
        ({"max_tokens": 3}, "set it with generator.sampling_params.max_generate_length"),
        ({"n": 3}, "set it with generator.n_samples_per_prompt"),
        ({"logprobs": 3}, "cannot be set, because it changes what vLLM returns"),
        ({"structured_outputs": {}}, "cannot be set, because an environment constrains responses"),
        ({"repetition_detections": {}}, "no such field. Did you mean 'repetition_detection'?"),
        ({"_eos_token_id": 3}, "no such field"),
        ({"repetition_detection": 3}, "got 3; vLLM expects RepetitionDetectionParams | None"),
        ({"skip_reading_prefix_cache": 1}, "got 1; vLLM expects bool | None"),
        ({"extra_args": ["a"]}, r"got ['a']; vLLM expects dict[str, Any] | None"),
        *(({name: 1}, "set it only in generator.eval_sampling_params.extra_args") for name in CHANGING),
    ],
    ids=str,
)
def test_a_wrong_sampling_argument_is_refused_before_anything_starts(
    extra_args: Mapping[str, Any], expected: str, tmp_path: Path
):
    assert expected in refusal(extra_args, tmp_path)


def test_what_keeps_log_probs_exact_is_accepted_in_training_and_everything_in_evaluation(tmp_path: Path):
    assert refusal({**REPEATED, "extra_args": {"my_sampler": 1}}, tmp_path) == ""
    changing = {"min_tokens": 3, "logit_bias": {"5": 1.0}, "bad_words": ["a"], "repetition_penalty": 1.1}
    assert refusal(changing, tmp_path, "eval_sampling") == ""
    assert "min_tokens: got 'x'; vLLM expects int" in refusal({"min_tokens": "x"}, tmp_path, "eval_sampling")


def test_every_sampling_parameter_of_vllm_is_either_listed_or_keeps_log_probs_exact():
    """A new one must be looked at: does it change the distribution?"""
    listed = {*_OWN_KEYS, *_FIXED, *CHANGING}
    unlisted = {name for name in sampling_fields() if not name.startswith("_")} - listed
    assert unlisted == {"extra_args", "repetition_detection", "skip_reading_prefix_cache"}
    assert listed <= set(sampling_fields())


@pytest_asyncio.fixture
async def client(dense_server: RunningServer) -> AsyncIterator[RemoteInferenceClient]:
    client = await connect(dense_server)
    yield client
    await client.close()


@pytest.mark.slow
async def test_a_sampling_argument_arrives_in_its_request(client: RemoteInferenceClient):
    (free,) = await client.generate(request("free", max_tokens=20, ignore_eos=True))
    assert not set(free.tokens) <= {7, 9}
    (allowed,) = await client.generate(
        request("allowed", max_tokens=20, ignore_eos=True, extra_args={"allowed_token_ids": [7, 9]})
    )
    assert set(allowed.tokens) == {7, 9}
    (biased,) = await client.generate(
        request("biased", max_tokens=5, ignore_eos=True, extra_args={"logit_bias": {"7": 100.0}})
    )
    assert set(biased.tokens) == {7}


@pytest.mark.slow
async def test_a_response_that_repetition_detection_ends_is_cut_with_exact_log_probs(client: RemoteInferenceClient):
    sent = request("repeated", max_tokens=200, ignore_eos=True, temperature=0.0, extra_args=REPEATED)
    (cut,) = await client.generate(sent)
    assert (cut.tokens[-1], cut.stop_reason) == (cut.tokens[-2], "length")
    assert len(cut.tokens) < 200
    whole = attrs.evolve(sent, sample_id="whole", params=attrs.evolve(sent.params, extra_args={}, max_tokens=200))
    ((without,), scores) = (await client.generate(whole), await client.score([[*sent.prompt_tokens, *cut.tokens]]))
    assert without.tokens[: len(cut.tokens)] == cut.tokens
    ((scored,),) = scores.values()
    assert scored[len(sent.prompt_tokens) :] == pytest.approx(cut.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"unknown": 1}, "vLLM has no sampling parameters unknown"),
        ({"min_tokens": "many"}, "Expected `int`, got `str`"),
        ({"min_tokens": 30}, "min_tokens must be less than or equal to max_tokens=5"),
        ({"logit_bias": {"1000000": 1.0}}, "out-of-vocab"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "min_count must be >= 2"),
    ],
    ids=str,
)
async def test_the_server_refuses_what_vllm_refuses_and_serves_on(
    client: RemoteInferenceClient, dense_server: RunningServer, extra_args: Mapping[str, Any], message: str
):
    with pytest.raises(GenerationError, match=message):
        await client.generate(request(f"wrong-{message}", max_tokens=5, extra_args=extra_args))
    evaluation = SamplingParams(max_tokens=5, temperature=0.0, extra_args=extra_args)
    with pytest.raises(ConfigError, match=r"generator\.eval_sampling_params\.extra_args: .*vLLM refuses"):
        await try_sampling_arguments(client, attrs.evolve(dense_server.spec, eval_sampling=evaluation))
    assert await client.generate(request("right", max_tokens=5))


@pytest.mark.slow
async def test_the_proof_passes_an_argument_that_keeps_log_probs_exact_and_finds_one_that_does_not(
    client: RemoteInferenceClient, dense_server: RunningServer
):
    async with policy_of(dense_server.model_path) as policy:
        trainer = Trainer(policy, client, "files")
        trainer.version = 50_000
        settings = trainer.verification._settings
        trainer.verification._settings = attrs.evolve(settings, extra_args={**REPEATED, "extra_args": {"mine": 1}})
        await trainer.verification.prove()
        trainer.verification._settings = attrs.evolve(settings, extra_args={"presence_penalty": 1.0}, seed=1)
        with pytest.raises(WeightSyncError, match=r"do not sample .*extra_args \(presence_penalty\); remove what ch"):
            await trainer.verification.prove()
