"""The format between client and servers: MessagePack, with token ids, log-probs and routed experts as raw bytes.

A number in JSON takes 4 to 20 bytes of text and a Python object on both sides; here a token id and a log-prob take 4
bytes each, a routed expert 1 or 2. All arrays are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
import msgspec
import numpy as np

from rl_core.interfaces import (
    Completion,
    GenerateRequest,
    Manifest,
    TensorRecord,
)

MEDIA_TYPE = "application/x-msgpack"
MAX_BODY_BYTES = 64 * 2**20
"""Size limit of a request. The largest requests consist of token ids, four bytes each."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def request_body(request: GenerateRequest) -> bytes:
    """A request as bytes, to be decoded as `bodies.GenerateBody`."""
    record = attrs.asdict(request, recurse=False)
    record["prompt_tokens"] = np.asarray(request.prompt_tokens, dtype="<i4").tobytes()
    record["params"] = attrs.asdict(request.params)
    return encode(record)


def completions_body(completions: Iterable[Completion]) -> bytes:
    """The samples of one request as bytes."""
    return encode([_completion_record(completion) for completion in completions])


def completions_of(body: bytes) -> tuple[Completion, ...]:
    """The samples of `completions_body`."""
    return tuple(_completion(record) for record in decode(body))


def _completion_record(completion: Completion) -> dict[str, Any]:
    routed = completion.routed_experts
    return {
        "tokens": np.asarray(completion.tokens, dtype="<i4").tobytes(),
        "logprobs": np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        # Runs of (version, number of tokens); nearly always one.
        "versions": [[version, len(list(run))] for version, run in groupby(completion.policy_versions)],
        "stop_reason": completion.stop_reason,
        "routed_experts": None if routed is None else _array_record(routed),
    }


def _completion(record: Mapping[str, Any]) -> Completion:
    routed = record["routed_experts"]
    return Completion(
        tokens=tuple(np.frombuffer(record["tokens"], dtype="<i4").tolist()),
        logprobs=tuple(np.frombuffer(record["logprobs"], dtype="<f4").tolist()),
        policy_versions=tuple(version for version, count in record["versions"] for _ in range(count)),
        stop_reason=record["stop_reason"],
        routed_experts=None if routed is None else _array(routed),
    )


def _array_record(array: np.ndarray) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(array.shape), np.ascontiguousarray(little).data.cast("B")]


def _array(record: Sequence[Any]) -> np.ndarray:
    dtype, shape, data = record
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def sequences_record(sequences: Iterable[Sequence[int]]) -> list[bytes]:
    """Lists of token ids."""
    return [np.asarray(tokens, dtype="<i4").tobytes() for tokens in sequences]


def sequences_of(record: Iterable[bytes]) -> list[list[int]]:
    """The lists of `sequences_record`."""
    return [np.frombuffer(data, dtype="<i4").tolist() for data in record]


def float_lists_record(values: Iterable[Sequence[float]]) -> list[bytes]:
    """Lists of float32."""
    return [np.asarray(floats, dtype="<f4").tobytes() for floats in values]


def float_lists(record: Iterable[bytes]) -> list[list[float]]:
    """The lists of `float_lists_record`."""
    return [np.frombuffer(data, dtype="<f4").tolist() for data in record]


def manifest_record(manifest: Manifest) -> dict[str, Any]:
    """A manifest as plain data."""
    tensors = {name: [list(t.shape), t.dtype, t.checksum] for name, t in manifest.tensors.items()}
    return {"version": manifest.version, "tensors": tensors}


def manifest_of(record: Mapping[str, Any]) -> Manifest:
    """The manifest of `manifest_record`."""
    tensors = {
        name: TensorRecord(shape=tuple(shape), dtype=dtype, checksum=checksum)
        for name, (shape, dtype, checksum) in record["tensors"].items()
    }
    return Manifest(version=record["version"], tensors=tensors)
