"""Tests of the local engine alone: padding, KV cache, rows, weight updates, failures, and models that it refuses."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import threading
from typing import ClassVar

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.config import engine_spec, from_mapping
from rl_core.errors import ConfigError, DeadlineError, GenerationError, WeightSyncError
from rl_core.interfaces import GenerateRequest, Manifest, Rendezvous, SamplingParams
from rl_core.plugins import installed, load
from rl_core.rank_kit.weight_buckets import tensor_record
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import StagedWeights, load_model, load_weights, require_complete
from rl_rollout.local.rows import Rows, Sample
from rl_rollout.local.scheduler import Scheduler
from rl_transformers.testing.models import make_checkpoint
from tests.model_families import UNUSUAL, random_model
from tests.passing_time import pass_time, until

SAMPLED = SamplingParams(max_tokens=12)


def load_checkpoint(path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("local") / "model")


@pytest.fixture
def model(checkpoint):
    return load_checkpoint(checkpoint)


def sample_of(prompt, params=SAMPLED, *, index=0, seed=0, stop_tokens=()):
    return Sample(
        owner="test", index=index, prompt_tokens=prompt, params=params, seed=seed, stop_tokens=stop_tokens, watch=None
    )


def random_samples(count, params=SAMPLED):
    numbers = random.Random(0)
    prompts = [tuple(numbers.randrange(40) for _ in range(numbers.choice([1, 2, 7, 30]))) for _ in range(count)]
    return [sample_of(prompt, params, index=i, seed=i) for i, prompt in enumerate(prompts)]


def finish(scheduler):
    ended = []
    while scheduler.has_work:
        ended += scheduler.step()
    return ended


@torch.no_grad()
def own_logprobs(model, sample, completion):
    tokens = torch.tensor([sample.prompt_tokens + completion.tokens])
    logprobs_RV = model(input_ids=tokens, use_cache=False).logits[0, len(sample.prompt_tokens) - 1 : -1].log_softmax(-1)
    return logprobs_RV.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def largest_difference(model, ended):
    return max(
        float((own_logprobs(model, sample, completion) - torch.tensor(completion.logprobs)).abs().max())
        for sample, completion in ended
    )


# --- rows -----------------------------------------------------------------------------------------------------------

MODELS = {
    "qwen3": {"family": "qwen3"},
    "qwen2": {"family": "qwen2"},
    "llama untied": {"family": "llama", "tie_word_embeddings": False},
    "sliding window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_all_lengths_side_by_side_have_the_logprobs_of_a_plain_forward(name, attention, tmp_path):
    model = load_checkpoint(make_checkpoint(tmp_path / "model", **MODELS[name]), attn_implementation=attention)
    scheduler = Scheduler(model, max_num_seqs=6)
    samples = random_samples(20)
    scheduler.submit(samples)
    ended = finish(scheduler)
    assert sorted(sample.index for sample, _ in ended) == list(range(20))
    # Rounding of float32 in two layers: the largest difference seen was 1e-6.
    assert largest_difference(model, ended) < 1e-5


@pytest.mark.parametrize(("family", "config"), UNUSUAL, ids=lambda value: value if isinstance(value, str) else "")
def test_families_with_unusual_settings_have_the_logprobs_of_a_plain_forward(family, config, tmp_path):
    path = random_model(tmp_path, family, **config)
    scheduler = Scheduler(load_model(str(path), dtype="float32", device="cpu", model_kwargs={}), max_num_seqs=6)
    scheduler.submit(random_samples(12))
    plain = load_checkpoint(path, attn_implementation="eager")
    # Rounding of float32 in two layers: the largest difference seen was 3e-6.
    assert largest_difference(plain, finish(scheduler)) < 1e-5


def test_a_wrong_position_or_mask_is_noticed(model, monkeypatch):
    """Negative control of the test above: if padding is treated as tokens, the log-probs are far off."""
    forward = Rows._forward

    def without_padding(self, inputs_BQ, pad_B, past):
        return forward(self, inputs_BQ, 0 * pad_B, past)

    monkeypatch.setattr(Rows, "_forward", without_padding)
    scheduler = Scheduler(model, max_num_seqs=6)
    scheduler.submit(random_samples(20))
    assert largest_difference(model, finish(scheduler)) > 1e-2


def test_greedy_responses_are_those_of_transformers_generate(model, checkpoint):
    params = SamplingParams(max_tokens=15, temperature=0.0)
    eos = AutoTokenizer.from_pretrained(checkpoint).eos_token_id
    samples = [attrs.evolve(sample, stop_tokens=(eos,)) for sample in random_samples(12, params)]
    scheduler = Scheduler(model, max_num_seqs=5)
    scheduler.submit(samples)
    ended = finish(scheduler)
    assert len(ended) == 12
    for sample, completion in ended:
        prompt = torch.tensor([sample.prompt_tokens])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=15, do_sample=False)
        assert completion.tokens == tuple(expected[0, len(sample.prompt_tokens) :].tolist())


def test_samples_of_a_prompt_that_start_together_share_a_prefill_within_the_limit_of_rows(model):
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    scheduler = Scheduler(model, max_num_seqs=8)
    scheduler.submit([sample_of((1, 2, 3), SamplingParams(max_tokens=3), index=i, seed=i) for i in range(16)])
    assert len(finish(scheduler)) == 16
    # Twice: prefill of one row, then two decoding steps of eight rows.
    assert shapes == [(1, 3), (8, 1), (8, 1)] * 2


def test_a_cache_that_is_not_recomputed_after_an_update_is_noticed(model, monkeypatch):
    """After a weight update, log-probs are right if the cache is recomputed, and far off if it is not (negative
    control)."""
    differences = {}
    for name in ("recomputed", "stale"):
        if name == "stale":
            monkeypatch.setattr(Rows, "recompute", lambda self: None)
        scheduler = Scheduler(model, max_num_seqs=8)
        scheduler.submit(random_samples(8))
        ended = [pair for _ in range(4) for pair in scheduler.step()]
        assert not ended
        scheduler.pause("keep")
        scheduler.update_weights(staged(perturbed(model)))
        scheduler.resume()
        pairs = [
            (
                attrs.evolve(s, prompt_tokens=s.prompt_tokens + c.tokens[:5]),
                attrs.evolve(c, tokens=c.tokens[5:], logprobs=c.logprobs[5:]),
            )
            for s, c in finish(scheduler)
            if c.policy_versions == (-1,) * 5 + (1,) * 7
        ]
        assert len(pairs) == 8
        differences[name] = largest_difference(model, pairs)
    assert differences["recomputed"] < 1e-5
    assert differences["stale"] > 1e-2


# --- weights --------------------------------------------------------------------------------------------------------


def perturbed(model):
    generator = torch.Generator().manual_seed(1)
    return {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def staged(tensors, version=1):
    records = {name: tensor_record(tensor) for name, tensor in tensors.items()}
    return StagedWeights(version=version, tensors=tensors, manifest=Manifest(version=version, tensors=records))


def test_a_tied_weight_may_come_under_either_name_or_both(model):
    tensors = perturbed(model)
    embedding = tensors.pop("model.embed_tokens.weight")
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        weights = staged({**tensors, **dict.fromkeys(names, embedding)})
        require_complete(model, weights)
        load_weights(model, weights)
        assert torch.equal(model.lm_head.weight, embedding)


def test_a_tensor_that_does_not_fit_is_named_and_nothing_is_loaded(model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tensors = perturbed(model)
    norm = tensors["model.norm.weight"]
    wrong = {
        "model.norm.weight did not arrive": {n: t for n, t in tensors.items() if n != "model.norm.weight"},
        r"model.norm.weight has shape \(31,\), the model's is \(32,\)": {**tensors, "model.norm.weight": norm[1:]},
        "model.extra is not a parameter": {**tensors, "model.extra": norm},
        "are one tied weight": {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
    }
    for message, weights in wrong.items():
        with pytest.raises(WeightSyncError, match=message):
            Scheduler(model, max_num_seqs=1).update_weights(staged(weights))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# --- the engine and its thread --------------------------------------------------------------------------------------


async def start(model, *, timeout_s=250.0, max_num_seqs=16):
    return await LocalEngine.start(lambda: (model, None), max_num_seqs=max_num_seqs, timeout_s=timeout_s, num_threads=1)


def request_of(name, params=SAMPLED, **fields):
    return GenerateRequest(sample_id=name, prompt_tokens=(1, 2, 3), params=params, seed=0, **fields)


LONG = SamplingParams(max_tokens=250, ignore_eos=True)


async def test_an_error_on_the_engines_thread_fails_running_and_later_requests(model):
    calls = []

    def breaks_later(module, args):
        calls.append(1)
        if len(calls) > 3:
            raise ArithmeticError("the accelerator is gone")

    model.register_forward_pre_hook(breaks_later)
    engine = await start(model)
    failed = await asyncio.gather(
        *[engine.generate(request_of(f"{i}", LONG)) for i in range(3)], return_exceptions=True
    )
    for error in failed:
        assert isinstance(error, GenerationError)
        assert isinstance(error.__cause__, ArithmeticError)
        assert "ArithmeticError: the accelerator is gone" in str(error)
    for late in (engine.generate(request_of("late")), engine.pause(), engine.health(), engine.resume(), engine.abort()):
        with pytest.raises(GenerationError, match="the accelerator is gone"):
            await late
    await engine.close()


async def test_nan_weights_fail_the_request(model):
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    engine = await start(model)
    with pytest.raises(GenerationError, match="logits are not finite"):
        await engine.generate(request_of("nan"))
    await engine.close()


async def test_the_error_of_a_late_request_says_what_it_waited_for(model):
    engine = await start(model)
    await engine.pause()
    deadline_s, engine._timeout_s = engine._timeout_s, 0.3
    with pytest.raises(DeadlineError, match=r"waited 0\.3 s for request 'frozen' of the local engine"):
        await engine.generate(request_of("frozen"))
    engine._timeout_s = deadline_s
    await engine.resume()
    assert (await engine.health()).num_waiting == 0
    await engine.generate(request_of("frozen", SamplingParams(max_tokens=2)))
    await engine.close()


class HeldUp:
    """A receiver that records the version. Version 0 arrives only when `go_on` is set."""

    is_staged = True
    begun: ClassVar[list[int]] = []
    go_on = threading.Event()

    def __init__(self, rendezvous):
        pass

    def receive(self, version):
        self.begun.append(version)
        assert version or self.go_on.wait(120)
        return iter(())


async def test_a_sync_waits_for_an_earlier_one_that_missed_its_deadline(model, monkeypatch):
    engine = await start(model)
    rendezvous = Rendezvous(transport="held_up", receiver=f"{__name__}:HeldUp", data={})
    for version in range(2):
        preparing = asyncio.ensure_future(engine.prepare_weights(rendezvous, version))
        await asyncio.sleep(0)  # now it waits, with a deadline
        await until(lambda: HeldUp.begun == [0])
        pass_time(monkeypatch, engine._timeout_s)
        with pytest.raises(DeadlineError, match=rf"waited 250 s for weight version {version} to arrive"):
            await preparing
    HeldUp.go_on.set()
    await engine.prepare_weights(rendezvous, 2)
    assert HeldUp.begun == [0, 2]
    await engine.close()


class Gate:
    """Holds up the engine's thread in a model's third forward pass until `go_on` is set."""

    def __init__(self, model):
        self.num_passes, self.go_on = 0, threading.Event()
        model.register_forward_pre_hook(self._hold_up)

    def _hold_up(self, module, args):
        self.num_passes += 1
        if self.num_passes == 3:
            assert self.go_on.wait(120), "the test did not go on while the engine computed"

    async def until_reached(self):
        await until(lambda: self.num_passes == 3)


async def test_a_cancelled_request_gives_its_row_back(model):
    gate, engine = Gate(model), await start(model)
    task = asyncio.ensure_future(engine.generate(request_of("cancelled", LONG)))
    await gate.until_reached()
    assert (await engine.health()).num_running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.go_on.set()
    await engine.pause()
    assert (await engine.health()).num_running == 0
    await engine.close()


async def test_the_event_loop_goes_on_while_the_engine_computes(model):
    gate, engine = Gate(model), await start(model)
    task = asyncio.ensure_future(engine.generate(request_of("slow", SamplingParams(max_tokens=8, ignore_eos=True))))
    await gate.until_reached()
    for _ in range(20):  # if the model computed on the event loop, this would run only after the gate's timeout
        await asyncio.sleep(0.005)
    assert not task.done()
    gate.go_on.set()
    await task
    await engine.close()


async def test_requests_of_one_event_loop_iteration_start_as_one_batch(model):
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine = await start(model)
    await asyncio.gather(
        *[engine.generate(request_of(f"{i}", SamplingParams(max_tokens=2, ignore_eos=True))) for i in range(9)]
    )
    assert shapes == [(1, 3), (9, 1)]
    await engine.close()


async def test_a_different_request_with_the_id_of_a_running_one_is_refused(model):
    engine = await start(model)
    task = asyncio.ensure_future(engine.generate(request_of("same", LONG)))
    await asyncio.sleep(0)
    with pytest.raises(GenerationError, match="'same' is running with a different request"):
        await engine.generate(request_of("same"))
    await engine.abort()
    await task
    await engine.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt_tokens": (1,) * 200, "params": LONG},
            r"200 prompt tokens \+ max_tokens 250 = 450 exceed the model's 256",
        ),
        ({"prompt_tokens": ()}, "0 prompt tokens"),
        ({"prompt_tokens": (1, 99_999)}, r"got token ids 1…99999, but the model's vocabulary is 0…\d+"),
        ({"params": SamplingParams(max_tokens=4, stop=("x",))}, "stop strings need a tokenizer"),
        (
            {"params": SamplingParams(max_tokens=4, structural_tag="{}")},
            "cannot constrain a response by a grammar .*vllm",
        ),
        ({"num_samples": 0}, "num_samples 0"),
    ],
)
async def test_the_error_of_an_impossible_request_gives_the_reason(model, fields, message):
    engine = await start(model)
    with pytest.raises(GenerationError, match=message):
        await engine.generate(attrs.evolve(request_of("impossible", SamplingParams(max_tokens=4)), **fields))
    await engine.close()


async def test_a_closed_engine_fails_its_requests_and_refuses_new_ones(model):
    gate, engine = Gate(model), await start(model)
    task = asyncio.ensure_future(engine.generate(request_of("running", LONG)))
    await gate.until_reached()
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)  # it is closed now, and waits for its thread
    gate.go_on.set()
    await closing
    await engine.close()
    for late in (task, engine.generate(request_of("late"))):
        with pytest.raises(GenerationError, match="was closed"):
            await late


async def test_an_error_in_loading_the_model_reaches_the_caller():
    def load():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await LocalEngine.start(load, max_num_seqs=1, timeout_s=250)


async def test_an_engine_that_loads_too_slowly_ends_when_it_has_loaded(model):
    """The caller has no engine to close, so an engine that did not end would keep the model in memory."""
    may_load, before = threading.Event(), set(threading.enumerate())

    def load():
        may_load.wait(120)
        return model, None

    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the local engine to load its model"):
        await LocalEngine.start(load, max_num_seqs=1, timeout_s=0.05)
    (thread,) = (thread for thread in set(threading.enumerate()) - before if "local-engine" in thread.name)
    may_load.set()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


# --- the plug-in ----------------------------------------------------------------------------------------------------


def spec_of(path, **engine):
    values = {"trainer.policy.model.path": str(path), "trainer.num_threads": 1, "trainer.bf16": False}
    values |= {f"generator.inference_engine.{key}": value for key, value in engine.items()}
    return engine_spec(from_mapping(values))[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_plugin_serves_the_policy_in_the_configured_dtype(checkpoint, dtype):
    plugin = load("rl_core.inference", "local")
    client = await plugin.create(spec_of(checkpoint, model_dtype=dtype))
    (completion,) = await client.generate(request_of("x"))
    reference = load_checkpoint(checkpoint)
    difference = largest_difference(reference, [(sample_of((1, 2, 3)), completion)])
    # bfloat16 has 8 significant bits; the difference seen after two layers was 0.02. A difference below 1e-4 would
    # mean that the engine computes in float32.
    assert difference < 1e-5 if dtype == "float32" else 1e-4 < difference < 0.2
    assert (await client.health()).version == -1
    await client.close()


def test_several_local_engines_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="num_engines: got 2, but there is only one local engine") as refusal:
        load("rl_core.inference", "local").validate(spec_of(checkpoint, num_engines=2))
    has_vllm = any(plugin.name == "vllm" for plugin in installed("rl_core.inference"))
    assert ("backend=vllm" in str(refusal.value)) == has_vllm


def test_a_missing_model_and_one_with_linear_attention_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot load this model: OSError"):
        load_model(str(tmp_path / "nowhere"), dtype="float32", device="cpu", model_kwargs={})
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_next", "num_hidden_layers": 4, "architectures": ["Qwen3NextForCausalLM"]}'
    )
    with pytest.raises(ConfigError, match=r"linear_attention; set generator\.inference_engine\.backend=vllm"):
        load_model(str(tmp_path), dtype="float32", device="cpu", model_kwargs={})


def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path):
    """transformers would fill the output layer with random values, with which `rl eval` would be wrong."""
    path = make_checkpoint(tmp_path, tie_word_embeddings=False)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights for 1 parameters .* lm_head\.weight; expected a complete"):
        load_model(str(path), dtype="float32", device="cpu", model_kwargs={})


def test_engine_init_kwargs_may_change_fields_of_the_models_configuration(checkpoint):
    model = load_model(str(checkpoint), dtype="float32", device="cpu", model_kwargs={"rms_norm_eps": 0.5})
    assert model.config.rms_norm_eps == 0.5


def test_a_models_own_code_runs_only_with_trust_remote_code(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (path / "config.json").write_text(json.dumps(config | own))
    kind = config["architectures"][0].removesuffix("ForCausalLM")
    (path / "own.py").write_text(
        f"from transformers import {kind}Config, {kind}ForCausalLM\n"
        f"class OwnConfig({kind}Config):\n    model_type = 'own'\n"
        f"class OwnModel({kind}ForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(ConfigError, match="contains custom code"):
        load_model(str(path), dtype="float32", device="cpu", model_kwargs={})
    model = load_model(str(path), dtype="float32", device="cpu", model_kwargs={"trust_remote_code": True})
    assert type(model).__name__ == "OwnModel"
