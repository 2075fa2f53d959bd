"""What needs no server: bytes on the wire, requests answered once, the choice of a server, arguments of the engine."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import attrs
import msgspec
import numpy as np
import pytest
from aiohttp import web

from rl_core.errors import ConfigError, DeadlineError, GenerationError, WeightSyncError
from rl_core.interfaces import Completion, GenerateRequest, Manifest, Rendezvous, SamplingParams, TensorRecord
from rl_core.tasks import IdleTime
from rl_core.trainer.publish import publish_weights
from rl_rollout.local.plugin import local
from rl_rollout.vllm import bodies, wire
from rl_rollout.vllm.calls import Calls
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.connection import LostUnderRequest
from rl_rollout.vllm.engine_arguments import MAX_LORA_RANKS, engine_arguments, known_arguments
from rl_rollout.vllm.launch import cpu_environment
from rl_rollout.vllm.placement import shared_gpus
from rl_rollout.vllm.plugin import vllm
from rl_rollout.vllm.pool import EngineFacts, Member, Pool, Wanted
from rl_rollout.vllm.server import ServerAddress
from rl_rollout.vllm.supervisor import Heartbeat, Supervisor
from rl_rollout.vllm.weights.stored_tensors import StoredTensor, require_matrix
from tests.core.virtual_time import run_virtually
from tests.rollout.vllm.servers import make_spec

REQUEST = GenerateRequest(
    sample_id="s",
    prompt_tokens=(3, 1, 2**31 - 1),
    params=SamplingParams(max_tokens=7, stop=("ab", "ü"), stop_token_ids=(5,), top_p=0.5),
    seed=2**63 - 1,
    num_samples=2,
    session_id="episode",
)


# --- wire -----------------------------------------------------------------------------------------------------------


def test_requests_completions_and_manifests_survive_the_wire():
    routed = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    whole = Completion(
        tokens=(4, 5, 6),
        logprobs=tuple(np.array([-0.1, -2.5, -1e-7], np.float32).tolist()),
        policy_versions=(-1, 3, 3),
        stop_reason="stop",
        routed_experts=routed,
    )
    empty = Completion(tokens=(), logprobs=(), policy_versions=(), stop_reason="abort")
    body = msgspec.msgpack.decode(wire.request_body(REQUEST), type=bodies.GenerateBody)
    assert body.request() == REQUEST
    first, second = wire.completions_of(wire.completions_body([whole, empty]))
    assert attrs.evolve(first, routed_experts=None) == attrs.evolve(whole, routed_experts=None)
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(first.routed_experts, routed)
    assert second == empty
    manifest = Manifest(version=3, tensors={"w": TensorRecord(shape=(2, 3), dtype="bfloat16", checksum=2**32 - 1)})
    assert wire.manifest_of(wire.decode(wire.encode(wire.manifest_record(manifest)))) == manifest


WRONG_FIELDS = [
    {"params": {"max_tokens": 2.5}},
    {"params": {"max_tokens": 0}},
    {"params": {"max_tokens": 2**31}},
    {"params": {"max_tokens": True}},
    {"params": {"temperature": -0.1}},
    {"params": {"temperature": math.inf}},
    {"params": {"temperature": math.nan}},
    {"params": {"top_p": 0.0}},
    {"params": {"top_k": -2}},
    {"params": {"min_p": 1.5}},
    {"params": {"stop": "ab"}},
    {"params": {"stop": [""]}},
    {"params": {"stop_token_ids": [-1]}},
    {"params": {"unknown": 1}},
    {"params": None},
    {"sample_id": ""},
    {"sample_id": 7},
    {"prompt_tokens": [1, 2]},
    {"prompt_tokens": b"12345"},
    {"seed": 1.5},
    {"num_samples": 0},
    {"num_samples": -1},
    {"num_samples": bodies.MAX_SAMPLES + 1},
    {"session_id": ["user"]},
    {"unknown": 1},
]


@pytest.mark.parametrize("wrong", WRONG_FIELDS, ids=str)
def test_a_request_with_a_field_of_another_type_or_range_is_refused(wrong: dict[str, Any]):
    record = wire.decode(wire.request_body(REQUEST))
    for name, value in wrong.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=r"at `\$|unknown field|buffer size"):
        msgspec.msgpack.decode(wire.encode(record), type=bodies.GenerateBody).request()


def test_a_request_that_lacks_a_field_is_refused():
    record = wire.decode(wire.request_body(REQUEST))
    for name in record:
        lacking = {other: value for other, value in record.items() if other != name}
        with pytest.raises(msgspec.ValidationError, match=f"missing required field `{name}`"):
            msgspec.msgpack.decode(wire.encode(lacking), type=bodies.GenerateBody)


def test_routed_experts_cost_one_byte_each():
    def num_bytes(routed: np.ndarray | None) -> int:
        completion = Completion(
            tokens=(1,) * 1000,
            logprobs=(0.0,) * 1000,
            policy_versions=(1,) * 1000,
            stop_reason="length",
            routed_experts=routed,
        )
        return len(wire.completions_body([completion]))

    layers, experts = 48, 8
    extra = num_bytes(np.zeros((1000, layers, experts), np.uint8)) - num_bytes(None)
    assert extra <= 1000 * layers * experts + 32


# --- calls ----------------------------------------------------------------------------------------------------------


async def test_a_repeated_request_joins_the_running_one_or_gets_its_answer():
    calls, go, computed = Calls(), asyncio.Event(), []

    async def compute() -> bytes:
        computed.append("once")
        await go.wait()
        return b"answer"

    first = asyncio.ensure_future(calls.answer("id", b"body", compute))
    second = asyncio.ensure_future(calls.answer("id", b"body", compute))
    await asyncio.sleep(0)
    second.cancel()  # a lost connection ends neither the request nor the other's wait
    go.set()
    assert await first == b"answer"
    assert await calls.answer("id", b"body", compute) == b"answer"
    assert computed == ["once"]
    with pytest.raises(GenerationError, match="needs its own"):
        await calls.answer("id", b"another body", compute)


async def test_a_failed_request_is_tried_anew_and_old_answers_make_room():
    calls, answers = Calls(max_kept_bytes=10), iter([b"12345", b"1234567"])

    async def fail() -> bytes:
        raise GenerationError("broken")

    async def compute() -> bytes:
        return next(answers)

    with pytest.raises(GenerationError, match="broken"):
        await calls.answer("a", b"", fail)
    assert await calls.answer("a", b"", compute) == b"12345"
    assert await calls.answer("b", b"", compute) == b"1234567"
    with pytest.raises(GenerationError, match="broken"):
        await calls.answer("a", b"", fail)  # its answer had to go


async def test_a_cancelled_request_ends():
    calls = Calls()

    async def compute() -> bytes:
        await asyncio.Event().wait()
        return b""

    waiting = asyncio.ensure_future(calls.answer("id", b"", compute))
    await asyncio.sleep(0)
    calls.cancel(["id", "unknown"])
    with pytest.raises(GenerationError, match="sample id was cancelled"):
        await waiting
    assert calls.running == ()


# --- pool -----------------------------------------------------------------------------------------------------------


async def _pool(*versions: int) -> tuple[Pool, list[Member]]:
    pool = Pool(len(versions))
    for member, version in zip(pool.members, versions, strict=True):
        await pool.joined(member, object(), version, is_quarantined=False)  # pyright: ignore
    pool.version = 0
    return pool, pool.members


async def test_a_session_stays_on_its_server_and_others_go_where_there_is_least_to_do():
    pool, (first, second) = await _pool(0, 0)
    with pool.carries(first, 3):
        assert await pool.choose("episode", timeout_s=1) is second
    with pool.carries(second, 3):
        assert await pool.choose("episode", timeout_s=1) is second
        assert await pool.choose("other", timeout_s=1) is first
        assert await pool.choose(None, timeout_s=1) is first
    await pool.left(second, "killed")
    assert await pool.choose("episode", timeout_s=1) is first


async def test_the_idle_time_of_each_server_is_the_time_without_samples():
    """Worked by hand: the first has samples from 2 to 7, twice at a time, the second none; it is asked for tokens."""
    now, pool = 0.0, Pool(2)
    for member in pool.members:
        member.idle = IdleTime(lambda: now)
    client = RemoteInferenceClient(pool, timeout_s=1)
    first, second = pool.members
    now = 2.0
    with pool.carries(first, 4), pool.carries(second, 0):
        now = 3.0
        assert client.idle_lap() == {"0": 2.0, "1": 3.0}
        with pool.carries(first, 1):
            now = 5.0
        now = 7.0
    now = 11.0
    assert client.idle_lap() == {"0": 4.0, "1": 8.0}
    assert client.idle_lap() == {"0": 0.0, "1": 0.0}


async def test_a_server_with_other_weights_serves_nothing_until_it_has_the_current_ones():
    pool, (old, _) = await _pool(-1, 0)
    assert [member.index for member in pool.serving] == [1]
    assert pool.lacks_weights
    async with pool.updating():
        assert not pool.lacks_weights
        await pool.changed_version(1, [old])
    assert pool.serving == [old]
    assert pool.lacks_weights


async def test_waiting_for_a_server_names_the_state_of_each():
    pool, (first, second) = await _pool(0, -1)
    await pool.left(first, "killed by a test")
    second.is_quarantined = True
    with pytest.raises(DeadlineError, match=r"server 0 is down \(killed by a test\); vLLM server 1 is quarantined"):
        await pool.choose(None, timeout_s=0.01)
    waiting = asyncio.ensure_future(pool.choose(None, timeout_s=5))
    await asyncio.sleep(0)
    await pool.changed_version(4, [second])
    assert await waiting is second


# --- sizes of adapters ------------------------------------------------------------------------------------------------


def test_a_matrix_of_an_adapter_has_its_layers_size_where_that_is_known():
    """A layer of 6 outputs and 4 inputs, and rank 2."""
    float32 = "float32"
    stored = {
        "model.q.weight": StoredTensor((6, 4), float32),
        "model.packed.weight": StoredTensor((6, 1), "U8"),
    }

    def require(name: str, *shape: int, dtype: str = "bfloat16") -> None:
        require_matrix(f"base_model.model.{name}.weight", StoredTensor(shape, dtype), stored, 2)

    require("model.q.lora_A", 2, 4)
    require("model.q.lora_B", 6, 2)
    require("model.packed.lora_B", 5, 2)
    require("model.unknown.lora_A", 2, 5)
    for name, shape in (("A", (1, 4)), ("A", (2, 3)), ("A", (4, 2)), ("B", (3, 2)), ("B", (12, 2)), ("B", (6, 1))):
        with pytest.raises(WeightSyncError, match=rf"lora_{name}\.weight has the shape \[\d+, \d\]; with rank 2 the"):
            require(f"model.q.lora_{name}", *shape)
    with pytest.raises(WeightSyncError, match="has the dtype int8"):
        require("model.unknown.lora_A", 2, 5, dtype="int8")


# --- a sync that breaks -----------------------------------------------------------------------------------------------


class Scripted:
    """A server whose part of an update is a function."""

    def __init__(self, name: str, update: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        self._update = update

    async def call(self, method: str, arguments: Any = None, *, timeout_s: float) -> Any:
        if method == "update_weights":
            return await self._update()
        return {}


async def refuses() -> Any:
    raise WeightSyncError("vLLM server 0, update_weights: it does not fit")


async def is_gone() -> Any:
    raise LostUnderRequest("vLLM server 0: its connection broke")


async def never_answers() -> Any:
    await asyncio.Event().wait()


class Closable:
    """A transport that carries nothing: ranks and engines wait until it is closed."""

    name = "closable"
    contract_version = 1

    def __init__(self, *, is_staged: bool = False) -> None:
        self.is_staged = is_staged
        self.is_closed = asyncio.Event()

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        return Rendezvous(transport=self.name, receiver="", data={})

    def close(self, rendezvous: Rendezvous) -> None:
        self.is_closed.set()

    async def taken(self) -> Any:
        await self.is_closed.wait()
        raise WeightSyncError("the sync was closed")

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
        return await self.taken()


async def broken(transport: Closable, *updates: Callable[[], Awaitable[Any]]) -> tuple[str, float, list[Member]]:
    """What is raised by a sync with these servers, after how many seconds, and the members that were reported."""
    pool, failed = Pool(len(updates)), []
    for member, update in zip(pool.members, updates, strict=True):
        scripted: Any = Scripted(str(member), update)
        await pool.joined(member, scripted, 0, is_quarantined=False)
    pool.version, pool.facts = 0, EngineFacts(vocab_size=8, num_workers=1)
    client = RemoteInferenceClient(pool, timeout_s=1000.0, on_failure=failed.append)
    policy: Any = SimpleNamespace(mesh=SimpleNamespace(world_size=1), adapter=None, publish=transport.publish)
    clock = asyncio.get_running_loop()
    with pytest.raises(WeightSyncError) as raised:
        await publish_weights(policy, client, transport, 1, max_bucket_bytes=1)
    took_s = clock.time()
    await asyncio.sleep(60.0)
    return str(raised.value), took_s, failed


@pytest.mark.parametrize("first", [refuses, is_gone])
def test_a_server_that_fails_breaks_a_sync_off_at_once_for_those_that_wait_in_it(first: Any):
    async def work() -> None:
        transport = Closable()
        message, took_s, failed = await broken(transport, first, transport.taken)
        assert message.startswith("vLLM server 0")
        assert message.endswith("; vLLM server 1 had not ended its part")
        assert took_s == 0.0
        assert [member.index for member in failed] == [0, 1]
        assert [member.hung for member in failed] == [None, None]

    run_virtually(work())


def test_a_server_that_does_not_end_its_part_of_a_broken_sync_is_given_up_as_hung():
    async def work() -> None:
        _, took_s, failed = await broken(Closable(), refuses, never_answers)
        assert took_s == 0.0
        assert [member.index for member in failed] == [0, 1]
        assert failed[1].hung is not None
        assert "30 s after update_weights failed" in failed[1].hung

    run_virtually(work())


def test_the_only_server_that_hangs_in_a_sync_is_given_up_seconds_after_the_ranks_failed():
    class Unjoined(Closable):
        async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
            await asyncio.sleep(30.0)
            raise WeightSyncError("waited 30 s for 1 receivers, of which 0 have joined")

    async def work() -> None:
        message, took_s, failed = await broken(Unjoined(), never_answers)
        assert "of which 0 have joined" in message
        assert took_s == 40.0
        assert [member.hung is not None for member in failed] == [True]

    run_virtually(work())


def test_a_staged_version_is_waited_for_on_every_server():
    """The negative control: there one server's failure is not the others'."""

    async def work() -> None:
        async def slowly() -> Any:
            await asyncio.sleep(100.0)
            return wire.manifest_record(Manifest(version=1, tensors={}))

        class Sent(Closable):
            async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Manifest:
                return Manifest(version=version, tensors={})

        _, took_s, failed = await broken(Sent(is_staged=True), refuses, slowly)
        assert took_s == 100.0
        assert [member.index for member in failed] == [0]

    run_virtually(work())


@pytest.mark.parametrize(("comes_back_s", "expected_s"), [(0.0, 0.5), (40.0, 40.5), (None, 130.5)])
def test_whether_a_server_was_lost_in_a_sync_is_said_when_it_is_known_and_one_is_up_again(
    comes_back_s: float | None, expected_s: float
):
    """The server refuses its part half a second before it is known to be dead, as one whose core process was killed."""

    async def work() -> None:
        pool = Pool(1)
        (member,) = pool.members
        scripted: Any = Scripted("vLLM server 0", refuses)
        client = RemoteInferenceClient(pool, timeout_s=1000.0, start_timeout_s=100.0)
        clock = asyncio.get_running_loop()

        async def supervise() -> None:
            await asyncio.sleep(0.5)
            await pool.left(member, "its core process is dead")
            if comes_back_s is not None:
                await asyncio.sleep(comes_back_s)
                await pool.joined(member, scripted, -1, is_quarantined=False)

        await pool.joined(member, scripted, 0, is_quarantined=False)
        with pytest.raises(WeightSyncError, match="does not fit"):
            await client.update_weights(Rendezvous(transport="", receiver="", data={}), 1)
        supervising = asyncio.ensure_future(supervise())
        if comes_back_s is None:
            with pytest.raises(DeadlineError, match=r"to be started again; .* is down \(its core process is dead\)"):
                await client.has_lost_engines()
        else:
            assert await client.has_lost_engines()
            assert pool.up == [member]
        assert clock.time() == expected_s
        await supervising

    run_virtually(work())


def test_no_server_was_lost_where_none_is_given_up_for_seconds():
    async def work() -> None:
        pool = Pool(2)
        refusing: Any = Scripted("vLLM server 0", refuses)
        await pool.left(pool.members[1], "it was lost before")
        await pool.joined(pool.members[0], refusing, 0, is_quarantined=False)
        client = RemoteInferenceClient(pool, timeout_s=1000.0)
        with pytest.raises(WeightSyncError, match="does not fit"):
            await client.update_weights(Rendezvous(transport="", receiver="", data={}), 1)
        assert not await client.has_lost_engines()
        assert asyncio.get_running_loop().time() == 10.0

    run_virtually(work())


async def test_a_server_that_is_known_to_be_hung_is_started_again_though_it_answers():
    pool, server = Pool(1), StartedAgain()
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=10.0), control_token="token")
    await supervisor.start()
    (member,) = pool.members
    first, member.hung = member.connection, "it is hung, says a test"
    supervisor.suspect(member)
    async with asyncio.timeout(20):
        await member.lost.wait()
        assert member.why_down == "it is hung, says a test"
    await pool.wait_for(lambda: bool(pool.up), "the server", timeout_s=20)
    assert member.connection is not first
    assert member.hung is None
    await supervisor.close()


# --- configuration --------------------------------------------------------------------------------------------------


def test_engine_arguments_come_from_the_configuration(tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, tensor_parallel_size=2, max_num_seqs=7)
    experts = make_spec(tmp_path, tmp_path, tensor_parallel_size=2, expert_parallel_size=2)
    on_gpus, on_cpus = (engine_arguments(spec, has_gpus=gpus) for gpus in (True, False))
    assert on_gpus["tensor_parallel_size"] == 2
    assert not on_gpus["enable_expert_parallel"]
    assert engine_arguments(experts, has_gpus=True)["enable_expert_parallel"]
    assert on_gpus["max_num_seqs"] == 7
    assert on_gpus["logprobs_mode"] == "processed_logprobs"
    assert on_gpus["enable_sleep_mode"]
    assert (on_gpus["enforce_eager"], on_cpus["enforce_eager"]) == (False, True)
    assert on_gpus.keys() <= known_arguments()
    assert on_cpus.keys() <= known_arguments()


def test_an_engine_has_places_for_adapters_that_are_sent_alone_and_for_them_only(tmp_path: Path):
    def arguments(**lora: object) -> dict[str, object]:
        chosen = engine_arguments(make_spec(tmp_path, tmp_path, lora=lora), has_gpus=False)
        names = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras")
        return {name: chosen[name] for name in names if name in chosen}

    alone = arguments(rank=9, merge_lora=False)
    assert alone.keys() <= known_arguments()
    assert list(alone.values()) == [True, 16, 1, 2, False]
    assert list(arguments(rank=1, merge_lora=False, max_loras=3, max_cpu_loras=5).values()) == [True, 1, 3, 6, False]
    assert arguments(rank=9) == {}


def test_the_ranks_of_adapters_are_vllms():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == MAX_LORA_RANKS


def test_experts_with_adapters_are_left_to_gpus(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    spec = make_spec(tmp_path, tmp_path, lora={"rank": 4, "merge_lora": False})
    with pytest.raises(ConfigError, match=r"merge_lora: got false, and vLLM computes a Mixture of Experts"):
        engine_arguments(spec, has_gpus=False)
    assert engine_arguments(spec, has_gpus=True)["enable_lora"]


@pytest.mark.parametrize(
    ("lora", "engine", "message"),
    [
        ({"rank": 513}, {}, "rank: got 513, and vLLM serves adapters up to rank 512"),
        ({"rank": 4}, {"engine_init_kwargs": {"max_lora_rank": 8}}, r"set it with trainer\.policy\.model\.lora\.rank"),
    ],
)
def test_adapters_that_cannot_be_served_alone_are_refused_before_anything_starts(
    lora: dict[str, object], engine: dict[str, object], message: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=message):
        vllm.validate(make_spec(tmp_path, tmp_path, lora={**lora, "merge_lora": False}, **engine))


def test_the_local_engine_refuses_adapters_alone(tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, lora={"rank": 4, "merge_lora": False})
    with pytest.raises(ConfigError, match="merge_lora: got false, but the local engine accepts only whole weights"):
        local.validate(spec)


@pytest.mark.parametrize(
    "engine", [{"tensor_parallel_size": 2, "expert_parallel_size": 2}, {"pipeline_parallel_size": 2}]
)
def test_what_vllms_cpu_build_cannot_do_is_refused_there(engine: dict[str, object], tmp_path: Path):
    spec = make_spec(tmp_path, tmp_path, **engine)
    engine_arguments(spec, has_gpus=True)
    with pytest.raises(ConfigError, match="but on CPUs vLLM"):
        engine_arguments(spec, has_gpus=False)


def test_experts_are_not_split_over_data_parallel_engines_on_cpus(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    spec = make_spec(tmp_path, tmp_path, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2, but on CPUs .* has experts: set it to 1"):
        engine_arguments(spec, has_gpus=False)
    assert engine_arguments(spec, has_gpus=True)["data_parallel_size"] == 2


@pytest.mark.parametrize(
    ("engine", "spans_nodes", "backend"),
    [
        ({}, False, None),
        ({"tensor_parallel_size": 2}, False, "mp"),
        ({"data_parallel_size": 2}, False, "mp"),
        ({"tensor_parallel_size": 2}, True, "ray"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, False, "ray"),
    ],
)
def test_the_ranks_of_an_engine_are_processes_of_its_machine_where_they_fit(
    engine: dict[str, object], spans_nodes: bool, backend: str | None, tmp_path: Path
):
    arguments = engine_arguments(make_spec(tmp_path, tmp_path, **engine), has_gpus=True, spans_nodes=spans_nodes)
    assert arguments.get("distributed_executor_backend") == backend


def test_engines_fill_the_gpus_that_they_share_node_by_node():
    """Of a node with 8 and one with 4, in engines of 2: each GPU has one engine."""
    nodes = {"node:a": 8, "node:b": 4}
    places = [shared_gpus(nodes, index, 2) for index in range(6)]
    assert [(place.node, place.first) for place in places] == [
        ("node:a", 0),
        ("node:a", 2),
        ("node:a", 4),
        ("node:a", 6),
        ("node:b", 0),
        ("node:b", 2),
    ]
    with pytest.raises(ConfigError, match=r"engine 6 of 2 ranks has no GPUs left to share: nodes have \[8, 4\]"):
        shared_gpus(nodes, 6, 2)
    with pytest.raises(ConfigError, match="such an engine stands on one node"):
        shared_gpus(nodes, 0, 12)


def test_an_engine_computes_on_its_own_gpus_and_sees_those_where_weights_may_lie():
    place = shared_gpus({"node:a": 4}, 1, 2)
    assert place.visible(None) == "2,3,0,1"
    assert place.visible("4,5,6,7") == "6,7,4,5"
    assert place.visible("GPU-a,GPU-b,GPU-c,GPU-d") == "GPU-c,GPU-d,GPU-a,GPU-b"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        place.visible("4,5")


def test_the_threads_of_a_machine_are_shared_by_all_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    assert cpu_environment(1)["OMP_NUM_THREADS"] == "8"
    assert cpu_environment(4)["OMP_NUM_THREADS"] == "2"
    assert cpu_environment(16)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"engine_init_kwargs": {"max_model_length": 3}}, "no such engine argument. Did you mean 'max_model_len'"),
        ({"engine_init_kwargs": {"dtype": "float32"}}, "set it with generator.inference_engine.model_dtype"),
        ({"expert_parallel_size": 3}, "expert_parallel_size: got 3.*set it to 1$"),
        ({"external_server_urls": ["10.0.0.7:8000"]}, "is no URL"),
        ({"external_server_urls": ["http://a:1", "http://b:1"]}, "num_engines: 1.*set it to 2"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_starts(engine: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        vllm.validate(make_spec(tmp_path, tmp_path, **engine))


# --- servers that start later -----------------------------------------------------------------------------------------


class StartedAgain:
    """A server that answers every route, and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self._runners: list[web.AppRunner] = []

    async def start(self) -> ServerAddress:
        self.told.clear()
        app = web.Application()
        app.router.add_post("/rl/{name}", self._answer)
        runner = web.AppRunner(app)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return ServerAddress(url=f"http://127.0.0.1:{runner.addresses[0][1]}", pid=0)

    async def _answer(self, request: web.Request) -> web.Response:
        name, arguments = request.match_info["name"], wire.decode(await request.read())
        if name != "health":
            self.told.append((name, arguments))
        health = {"quarantine": None, "version": -1, "vocab_size": 8, "num_workers": 1}
        return web.Response(body=wire.encode(health if name == "health" else {}))

    def kill(self) -> None: ...

    async def stop(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()


async def test_a_server_that_starts_while_others_sleep_goes_to_sleep_too():
    """It took its memory when it started, and training has that by then."""
    pool, server = Pool(1), StartedAgain()
    pool.wanted = Wanted(adapters={"judge": "/at"}, sleep_level=2)
    supervisor = Supervisor(pool, [server], Heartbeat(interval_s=100.0, hung_after_s=10.0), control_token="token")
    await supervisor.start()
    adapter = ("load_adapter", {"name": "judge", "path": "/at"})
    assert server.told == [adapter, ("sleep", {"level": 2}), ("wake", {"tags": []})]
    await supervisor.close()

    pool.wanted = pool.wanted.awake(["weights"])
    await supervisor.start()
    assert server.told == [adapter, ("sleep", {"level": 2}), ("wake", {"tags": ["weights"]})]
    await supervisor.close()

    pool.wanted = pool.wanted.awake(["kv_cache"])
    await supervisor.start()
    assert server.told == [adapter]
    await supervisor.close()
