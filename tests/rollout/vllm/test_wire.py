"""The wire format, and the guarantee that each request is computed once."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from rl_core.errors import GenerationError
from rl_core.interfaces import Completion, GenerateRequest, KeptTokens, Manifest, SamplingParams, TensorRecord
from rl_rollout.vllm import bodies, wire
from rl_rollout.vllm.calls import Calls

REQUEST = GenerateRequest(
    sample_id="s",
    prompt_tokens=(3, 1, 2**31 - 1),
    params=SamplingParams(max_tokens=7, stop=("ab", "ü"), stop_token_ids=(5,), top_p=0.5, structural_tag="{}"),
    seed=2**63 - 1,
    num_samples=2,
    session_id="episode",
)


def test_requests_completions_and_manifests_are_received_as_they_were_sent():
    routed = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    whole = Completion(
        tokens=(4, 5, 6),
        logprobs=tuple(np.array([-0.1, -2.5, -1e-7], np.float32).tolist()),
        policy_versions=(-1, 3, 3),
        stop_reason="stop",
        routed_experts=routed,
        kept_tokens=KeptTokens.of_each([[4], [151_935, 5], []]),
    )
    empty = Completion(tokens=(), logprobs=(), policy_versions=(), stop_reason="abort")
    body = msgspec.msgpack.decode(wire.request_body(REQUEST), type=bodies.GenerateBody)
    assert body.request() == REQUEST
    first, second = wire.completions_of(wire.decode(wire.completions_body([whole, empty])))
    assert attrs.evolve(first, routed_experts=None) == attrs.evolve(whole, routed_experts=None)
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(first.routed_experts, routed)
    assert second == empty
    without = attrs.evolve(whole, kept_tokens=None)
    # 4 bytes for each kept id, 4 for the count of each token, and less than 30 in all for names and sizes.
    assert (
        3 * 4 + 3 * 4
        <= len(wire.completions_body([whole])) - len(wire.completions_body([without]))
        < 3 * 4 + 3 * 4 + 30
    )
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
    {"params": {"structural_tag": {}}},
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
def test_a_request_with_a_wrong_or_unknown_field_is_refused(wrong: dict[str, Any]):
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


def test_each_routed_expert_takes_one_byte():
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


async def test_a_repeated_request_joins_the_running_one_or_gets_its_answer():
    calls, go, computed = Calls(), asyncio.Event(), []

    async def compute() -> bytes:
        computed.append("once")
        await go.wait()
        return b"answer"

    first = asyncio.ensure_future(calls.answer("id", b"body", compute))
    second = asyncio.ensure_future(calls.answer("id", b"body", compute))
    await asyncio.sleep(0)
    second.cancel()  # a lost connection ends neither the computation nor the other client's wait
    go.set()
    assert await first == b"answer"
    assert await calls.answer("id", b"body", compute) == b"answer"
    assert computed == ["once"]
    with pytest.raises(GenerationError, match="needs its own"):
        await calls.answer("id", b"another body", compute)


async def test_failed_requests_are_retried_and_old_answers_are_evicted():
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
        await calls.answer("a", b"", fail)  # its kept answer was dropped to make room


async def test_a_cancelled_request_ends_and_is_computed_again_if_repeated():
    calls = Calls()

    async def hang() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def compute() -> bytes:
        return b"answer"

    waiting = asyncio.ensure_future(calls.answer("id", b"", hang))
    await asyncio.sleep(0)
    calls.cancel(["id", "unknown"])
    with pytest.raises(GenerationError, match="sample id was cancelled"):
        await waiting
    assert await calls.answer("id", b"", compute) == b"answer"
