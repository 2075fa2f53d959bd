"""Adapters sent without the base weights to a real vLLM server: updated in place, verified, refused as a whole, and
served beside others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.batch import Batch
from rl_core.errors import GenerationError, RLError, WeightSyncError
from rl_core.interfaces import LoraConfig, WeightBucket
from rl_core.rank_kit.weight_buckets import pack_buckets, unpack_bucket
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_rollout.transports.broadcast import BroadcastTransport
from rl_rollout.transports.files import FilesTransport
from rl_rollout.vllm.adapters import NamedAdapters
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.launch import create_client
from tests.rollout.vllm.servers import RunningServer, connect, make_spec, paused_under_way, request, write_model
from tests.rollout.vllm.test_weights import TRANSPORTS, cut_off, half, trained
from tests.rollout.vllm.trainers import BUCKET_BYTES, REFUSED, policy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, alpha=8, merge_lora=False)
LIMIT = 1e-4
"""The largest allowed error of a log-prob, in float32 on both sides; measured 1e-5."""
SEQUENCE = (5, 1, 9, 2, 7, 7, 3, 11, 4, 8)
_alphas = itertools.count(LORA.alpha + 1)


def new_configuration() -> LoraConfig:
    """An adapter configuration with a new alpha, for which the server does not know yet which tensors to expect."""
    return LoraConfig(rank=4, alpha=next(_alphas), merge_lora=False)


def without(*names: str) -> Callable[[Iterator[WeightBucket]], Iterator[WeightBucket]]:
    """Sends all tensors except these."""

    def part(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        tensors = {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}
        assert set(names) <= set(tensors), f"{names} are not among {list(tensors)}"
        kept = [(name, tensor) for name, tensor in tensors.items() if name not in names]
        return pack_buckets(kept, BUCKET_BYTES)

    return part


def matrices_of(layer: str) -> list[str]:
    return [f"base_model.model.{layer}.lora_{matrix}.weight" for matrix in "AB"]


async def scores_of(client: RemoteInferenceClient, adapter: str | None = None) -> list[float]:
    ((scores,),) = (await client.score([SEQUENCE], adapter=adapter)).values()
    return list(scores)


async def trainers_logprobs(policy: WorkerGroup, tokens: Sequence[int]) -> torch.Tensor:
    batch = Batch.from_sequences([{"tokens": list(tokens)}])
    return (await policy.forward(batch, MicroBatchLimits(max_sequences=1), temperature=1.0))["logprobs"]


# --- the policy's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "transport"), [*(("fsdp", name) for name in TRANSPORTS), ("megatron", "files")])
async def test_five_adapter_syncs_match_the_trainer_and_a_stale_adapter_is_found(
    adapter_server: RunningServer, strategy: str, transport: str
):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, LORA, strategy=strategy) as policy:
        trainer = trained(client, policy, transport)
        differences = await trainer.sync_five_times()
        assert (await client.health()).version == trainer.version
    assert max(differences) < LIMIT
    await client.close()


async def test_requests_under_way_continue_with_the_new_adapter(adapter_server: RunningServer):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, LORA) as policy:
        trainer = trained(client, policy)
        await trainer.train()
        await trainer.publish()
        first = trainer.version

        def ask(number: int) -> Any:
            return client.generate(request(f"under-way-{first}-{number}", SEQUENCE, max_tokens=400, ignore_eos=True))

        waiting = await paused_under_way(client, ask)
        await trainer.train()
        await trainer.publish()
        (completion,) = await waiting
        assert set(completion.policy_versions) == {first, trainer.version}
        found_T = torch.tensor(completion.logprobs)
        expected_T = (await trainers_logprobs(policy, (*SEQUENCE, *completion.tokens)))[len(SEQUENCE) :]
        is_new_T = torch.tensor(completion.policy_versions) == trainer.version
        assert (found_T - expected_T)[is_new_T].abs().max() < LIMIT
        assert (found_T - expected_T)[~is_new_T].abs().max() > 100 * LIMIT
    await client.close()


LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_missing_layer_fails_the_proof(adapter_server: RunningServer, layer: str):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, new_configuration()) as policy:
        trainer = trained(client, policy)
        trainer.send_only(without(*matrices_of(layer)))
        with pytest.raises(WeightSyncError, match=REFUSED):
            await trainer.verification.prove()
    await client.close()


async def test_the_engine_refuses_an_adapter_that_lacks_a_tensor(adapter_server: RunningServer):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, new_configuration()) as policy:
        trainer = trained(client, policy)
        trainer.send_only(without(matrices_of(LAYERS[0])[1]))
        with pytest.raises(WeightSyncError, match=r"the adapter does not have both matrices, A and B, of .*q_proj'\]"):
            await trainer.publish()
        trainer.send_only(None)
        await trainer.publish()
        good = trainer.version
        trainer.send_only(without(*matrices_of(LAYERS[0])))
        with pytest.raises(WeightSyncError, match=r"q_proj.lora_B.weight'\] are missing"):
            await trainer.publish()
        await client.resume()
        assert (await client.health()).version == good
    await client.close()


def resized(name: str, rows: float, columns: float) -> Callable[[Iterator[WeightBucket]], Iterator[WeightBucket]]:
    """Sends all tensors, but resizes this one by these factors: cuts it off or pads it with zeros."""

    def part(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        tensors = {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}
        height, width = tensors[name].shape
        other = torch.zeros(int(rows * height), int(columns * width))
        kept = tensors[name][: other.shape[0], : other.shape[1]]
        other[: kept.shape[0], : kept.shape[1]] = kept
        return pack_buckets((tensors | {name: other}).items(), BUCKET_BYTES)

    return part


@pytest.mark.parametrize(("matrix", "rows", "columns"), [(0, 1, 0.5), (1, 0.5, 1), (1, 2, 1), (1, 1, 0.5)])
async def test_a_matrix_that_does_not_fit_its_layer_is_refused(
    adapter_server: RunningServer, matrix: int, rows: float, columns: float
):
    """vLLM itself would raise no error, and fill only part of the slot with a matrix that is too small."""
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, LORA) as policy:
        trainer = trained(client, policy)
        await trainer.publish()
        good, name = trainer.version, matrices_of(LAYERS[0])[matrix]
        trainer.send_only(resized(name, rows, columns))
        with pytest.raises(WeightSyncError, match=rf"{name} has the shape .*; expected .* for rank 4 and the engine's"):
            await trainer.publish()
        await client.resume()
        assert (await client.health()).version == good
        trainer.send_only(None)
        await trainer.publish()
    await client.close()


@pytest.mark.parametrize("spoil", [cut_off, half])
@pytest.mark.parametrize("transport", [FilesTransport(), BroadcastTransport(timeout_s=60.0)])
async def test_a_damaged_update_leaves_the_old_adapter(adapter_server: RunningServer, transport: Any, spoil: Any):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path, LORA) as policy:
        trainer = trained(client, policy, transport)
        await trainer.train()
        await trainer.publish()
        good, before = trainer.version, await scores_of(client)
        await trainer.train()
        trainer.send_only(spoil)
        with pytest.raises(RLError):
            await trainer.publish()
        await client.resume()
        assert (await client.health()).version == good
        assert await scores_of(client) == pytest.approx(before, abs=1e-5)
        (after,) = await client.generate(request(f"after-{good}", max_tokens=8, ignore_eos=True))
        assert after.policy_versions == (good,) * 8
        trainer.send_only(None)
        await trainer.publish()
        assert (await trainer.verification.probe(trainer.version))["weight_sync/logprob_diff_max"] < LIMIT
    await client.close()


async def test_whole_weights_and_adapters_of_other_layers_are_refused(adapter_server: RunningServer):
    client = await connect(adapter_server)
    async with policy_of(adapter_server.model_path) as policy:
        with pytest.raises(WeightSyncError, match=r"got whole weights, but .* started for adapters; .*merge_lora"):
            await trained(client, policy).publish()
    async with policy_of(adapter_server.model_path, LORA) as policy:
        trainer = trained(client, policy)

        def renamed(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
            tensors = [pair for bucket in buckets for pair in unpack_bucket(bucket)]
            return pack_buckets([(name.replace("mlp.", "moe."), tensor) for name, tensor in tensors], BUCKET_BYTES)

        policy.adapter = new_configuration().peft_config()
        trainer.send_only(renamed)
        with pytest.raises(WeightSyncError, match=r"vLLM has no layers \['model.layers.0.moe.down_proj'"):
            await trainer.publish()
        policy.adapter = LoraConfig(rank=8, merge_lora=False).peft_config()
        with pytest.raises(WeightSyncError, match=r"lora_A.weight has the shape \[4, 32\]; expected \[8, 32\] "):
            await trainer.publish()
        policy.adapter = LORA.peft_config()
        trainer.send_only(None)
        await trainer.publish()
    async with policy_of(adapter_server.model_path, LoraConfig(rank=16, merge_lora=False)) as policy:
        with pytest.raises(WeightSyncError, match="rank 16 is greater than max_lora_rank 8"):
            await trained(client, policy).publish()
    await client.resume()
    await client.close()


# --- others by name -------------------------------------------------------------------------------------------------


def write_adapter(model_path: str, directory: Path, seed: int, rank: int = 4, **settings: Any) -> list[float]:
    """Writes a random adapter in peft's format. Returns the log-probs of SEQUENCE with it, by peft and transformers."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        model.save_pretrained(directory)
        logprobs_TV = model(input_ids=torch.tensor([SEQUENCE])).logits[0, :-1].log_softmax(-1)
    return [0.0, *logprobs_TV[range(len(SEQUENCE) - 1), SEQUENCE[1:]].tolist()]


async def completed(client: RemoteInferenceClient, **fields: Any) -> Mapping[str, Any]:
    """What an OpenAI client gets for SEQUENCE with greedy sampling."""
    connection = client._pool.members[0].connection
    assert connection is not None
    body = {"prompt": list(SEQUENCE), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return await connection.call_json("/v1/completions", body | fields, timeout_s=60)


async def greedy(client: RemoteInferenceClient, name: str) -> list[int]:
    (completion,) = await client.generate(request(name, SEQUENCE, max_tokens=8, temperature=0.0, ignore_eos=True))
    return list(completion.tokens)


async def test_two_named_adapters_score_as_in_peft_and_the_policy_stays_unchanged(
    adapter_server: RunningServer, tmp_path: Path
):
    client = await connect(adapter_server)
    expected = {name: write_adapter(adapter_server.model_path, tmp_path / name, i) for i, name in enumerate("abc")}
    async with policy_of(adapter_server.model_path, LORA) as policy:
        trainer = trained(client, policy)
        await trainer.train()
        await trainer.publish()
        before = await scores_of(client)
        for name in "ab":
            await client.load_lora_from_disk(name, tmp_path / name)
        for _ in range(2):  # three adapters, but at most two in a batch
            served = await asyncio.gather(*(scores_of(client, name) for name in ("a", "b", None)))
            for found, of in zip(served, (expected["a"], expected["b"], before), strict=True):
                assert found == pytest.approx(of, abs=LIMIT)
        assert max(abs(a - b) for a, b in zip(expected["a"], before, strict=True)) > 100 * LIMIT
        assert await scores_of(client) == pytest.approx((await trainers_logprobs(policy, SEQUENCE)).tolist(), abs=LIMIT)

        by_name = [(await completed(client, model=name))["choices"][0]["token_ids"] for name in ("policy", "a")]
        unnamed = (await completed(client))["choices"][0]["token_ids"]
        assert by_name[0] == unnamed == await greedy(client, f"greedy-{trainer.version}")
        assert by_name[1] != by_name[0]

        await client.load_lora_from_disk("a", tmp_path / "c")
        assert await scores_of(client, "a") == pytest.approx(expected["c"], abs=LIMIT)
        assert await scores_of(client, "b") == pytest.approx(expected["b"], abs=LIMIT)
    await client.close()


async def test_an_adapter_that_cannot_be_served_leaves_the_previous_adapter(
    adapter_server: RunningServer, tmp_path: Path
):
    client = await connect(adapter_server)
    expected = write_adapter(adapter_server.model_path, tmp_path / "good", seed=7)
    write_adapter(adapter_server.model_path, tmp_path / "large", seed=8, rank=16)
    write_adapter(adapter_server.model_path, tmp_path / "short", seed=9)
    file = tmp_path / "short" / "adapter_model.safetensors"
    short = load_file(file)
    short[matrices_of(LAYERS[0])[1]] = short[matrices_of(LAYERS[0])[1]][:1].clone()
    save_file(short, file)
    write_adapter(adapter_server.model_path, tmp_path / "strengths", seed=10, alpha_pattern={"q_proj": 64})
    elsewhere = shutil.copytree(tmp_path / "good", tmp_path / "elsewhere") / "adapter_model.safetensors"
    renamed = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in load_file(elsewhere).items()}
    save_file(renamed, elsewhere)
    await client.load_lora_from_disk("kept", tmp_path / "good")
    refused = {
        "strengths": r"vLLM does not read the settings alpha_pattern=\{'q_proj': 64\}.*merge_and_unload",
        "elsewhere": r"the model has no layers \['model.layers.7.mlp.down_proj'",
        "nowhere": "nowhere",
        "large": "rank 16 is greater than max_lora_rank 8",
        "short": r"q_proj.lora_B.weight has the shape \[1, 4\]",
    }
    for path, message in refused.items():
        with pytest.raises(GenerationError, match=message):
            await client.load_lora_from_disk("kept", tmp_path / path)
    assert await scores_of(client, "kept") == pytest.approx(expected, abs=LIMIT)
    assert client._pool.wanted.adapters == {"kept": str(tmp_path / "good")}
    with pytest.raises(GenerationError, match="'policy': it is empty, or the name of the policy"):
        await client.load_lora_from_disk("policy", tmp_path / "good")
    with pytest.raises(GenerationError, match="'rl-base': it is empty, or the name of the policy"):
        await client.load_lora_from_disk("rl-base", tmp_path / "good")
    with pytest.raises(GenerationError, match="no adapter 'unknown'"):
        await client.score([SEQUENCE], adapter="unknown")
    await client.close()


class TwoCores:
    """A server's engine with two data-parallel core processes, which give the answers that the test sets."""

    errored = False

    def __init__(self, answers: Mapping[tuple[str, int], Any]) -> None:
        self.engine_core = self
        self.core_engines = [0, 1]
        self.asked: list[tuple[str, int]] = []
        self._answers = answers

    async def _call_utility_async(self, method: str, *arguments: Any, engine: int) -> Any:
        self.asked.append((method, engine))
        answer = self._answers.get((method, engine), [None])
        if isinstance(answer, Exception):
            raise answer
        return answer


def named_adapters(engine: Any) -> tuple[NamedAdapters, dict[str, Any]]:
    """Adapters of which one, named `kept`, is loaded already. Also returns their dict from name to adapter."""
    held: dict[str, Any] = {"kept": SimpleNamespace(lora_int_id=7)}
    counter = itertools.count(1)
    models: Any = SimpleNamespace(
        lora_requests=held,
        lora_id_counter=SimpleNamespace(inc=lambda _: next(counter)),
        is_base_model=lambda name: name == "policy",
    )
    return NamedAdapters(engine, models), held


async def test_if_one_data_parallel_engine_refuses_an_adapter_no_adapter_changes():
    engine = TwoCores({("collective_rpc", 1): [None, "its rank is too high"]})
    adapters, held = named_adapters(engine)
    before = dict(held)
    with pytest.raises(GenerationError, match="'kept' at /there cannot be served: its rank is too high"):
        await adapters.load("kept", "/there")
    assert engine.asked == [("collective_rpc", 0), ("collective_rpc", 1)]
    assert held == before


async def test_a_name_has_no_adapter_if_only_some_engines_loaded_it():
    engine = TwoCores({("add_lora", 1): OSError("the file is gone")})
    adapters, held = named_adapters(engine)
    with pytest.raises(GenerationError, match=r"loaded: the file is gone\. The name now has no adapter"):
        await adapters.load("kept", "/there")
    assert "kept" not in held
    with pytest.raises(GenerationError, match="no adapter 'kept'"):
        adapters["kept"]


async def test_an_adapter_is_loaded_by_every_data_parallel_engine_after_all_have_checked_it():
    engine = TwoCores({})
    adapters, _ = named_adapters(engine)
    await adapters.load("kept", "/there")
    assert engine.asked == [("collective_rpc", 0), ("collective_rpc", 1), ("add_lora", 0), ("add_lora", 1)]
    assert adapters["kept"].lora_int_id == 7


@pytest.mark.soak
@pytest.mark.timeout(2400)
async def test_a_killed_server_gets_the_policys_adapter_and_the_other_adapters_again(
    ray_for_servers: None, tmp_path: Path
):
    model_path = write_model(tmp_path / "model")
    spec = make_spec(model_path, tmp_path, lora={"rank": 4, "merge_lora": False})
    client = await create_client(spec)
    expected = write_adapter(str(model_path), tmp_path / "a", seed=1)
    async with policy_of(model_path, LORA) as policy:
        trainer = trained(client, policy)
        await trainer.train()
        await trainer.publish()
        await client.load_lora_from_disk("a", tmp_path / "a")
        connection = client._pool.members[0].connection
        assert connection is not None
        os.kill((await connection.call("health", timeout_s=60))["pid"], signal.SIGKILL)
        async with asyncio.timeout(900):
            await client.needs_weights()
        assert not client._pool.serving
        await trainer.publish()
        assert (await trainer.verification.probe(trainer.version))["weight_sync/logprob_diff_max"] < LIMIT
        assert await scores_of(client, "a") == pytest.approx(expected, abs=LIMIT)
    await client.close()
