"""Encodes messages between client and servers as MessagePack, with token ids, log-probs and routed experts as raw
bytes.

In JSON a number takes 4 to 20 bytes of text, and is a Python object on both sides. Here a token id and a log-prob take
4 bytes each, a routed expert takes 1 or 2, and the kept ids of a token take 4 bytes each, plus 4 for their number. All
arrays are little-endian.
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
    KeptTokens,
    Manifest,
    TensorRecord,
)

MEDIA_TYPE = "application/x-msgpack"
MAX_BODY_BYTES = 64 * 2**20
"""Size limit of a request's body, which mostly consists of token ids of four bytes each."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def request_body(request: GenerateRequest) -> bytes:
    """Encodes a request; the server decodes it as `bodies.GenerateBody`."""
    record = attrs.asdict(request, recurse=False)
    record["prompt_tokens"] = np.asarray(request.prompt_tokens, dtype="<i4").tobytes()
    record["params"] = attrs.asdict(request.params)
    return encode(record)


def completions_body(completions: Iterable[Completion]) -> bytes:
    """Encodes the samples of one request."""
    return encode([_completion_record(completion) for completion in completions])


def completions_of(records: Iterable[Mapping[str, Any]]) -> tuple[Completion, ...]:
    """Converts the plain data of a decoded `completions_body` back to samples."""
    return tuple(_completion(record) for record in records)


def _completion_record(completion: Completion) -> dict[str, Any]:
    routed, kept = completion.routed_experts, completion.kept_tokens
    return {
        "tokens": np.asarray(completion.tokens, dtype="<i4").tobytes(),
        "logprobs": np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        # Pairs (version, number of consecutive tokens); nearly always only one pair.
        "versions": [[version, len(list(run))] for version, run in groupby(completion.policy_versions)],
        "stop_reason": completion.stop_reason,
        "routed_experts": None if routed is None else _array_record(routed),
        "kept_tokens": None if kept is None else [_array_record(kept.counts), _array_record(kept.ids)],
    }


def _completion(record: Mapping[str, Any]) -> Completion:
    routed, kept = record["routed_experts"], record["kept_tokens"]
    return Completion(
        tokens=tuple(np.frombuffer(record["tokens"], dtype="<i4").tolist()),
        logprobs=tuple(np.frombuffer(record["logprobs"], dtype="<f4").tolist()),
        policy_versions=tuple(version for version, count in record["versions"] for _ in range(count)),
        stop_reason=record["stop_reason"],
        routed_experts=None if routed is None else _array(routed),
        kept_tokens=None if kept is None else KeptTokens(counts=_array(kept[0]), ids=_array(kept[1])),
    )


def _array_record(array: np.ndarray) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(array.shape), np.ascontiguousarray(little).data.cast("B")]


def _array(record: Sequence[Any]) -> np.ndarray:
    dtype, shape, data = record
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def sequences_record(sequences: Iterable[Sequence[int]]) -> list[bytes]:
    """Encodes lists of token ids."""
    return [np.asarray(tokens, dtype="<i4").tobytes() for tokens in sequences]


def sequences_of(record: Iterable[bytes]) -> list[list[int]]:
    """Decodes the lists that `sequences_record` encoded."""
    return [np.frombuffer(data, dtype="<i4").tolist() for data in record]


def float_lists_record(values: Iterable[Sequence[float]]) -> list[bytes]:
    """Encodes lists of numbers as float32."""
    return [np.asarray(floats, dtype="<f4").tobytes() for floats in values]


def float_lists(record: Iterable[bytes]) -> list[list[float]]:
    """Decodes the lists that `float_lists_record` encoded."""
    return [np.frombuffer(data, dtype="<f4").tolist() for data in record]


def manifest_record(manifest: Manifest) -> dict[str, Any]:
    """Converts a manifest to plain data."""
    tensors = {name: [list(t.shape), t.dtype, t.checksum] for name, t in manifest.tensors.items()}
    return {"version": manifest.version, "tensors": tensors}


def manifest_of(record: Mapping[str, Any]) -> Manifest:
    """Converts the plain data of `manifest_record` back to a manifest."""
    tensors = {
        name: TensorRecord(shape=tuple(shape), dtype=dtype, checksum=checksum)
        for name, (shape, dtype, checksum) in record["tensors"].items()
    }
    return Manifest(version=record["version"], tensors=tensors)
