"""A bucket is packed only once: when its data are first read or when the next bucket is drawn, whichever is earlier."""

from __future__ import annotations

import zlib

import attrs
import pytest
import torch

from rl_core.interfaces import WeightBucket
from rl_core.rank_kit.weight_buckets import bucket_records, pack_buckets, packed_into, tensor_record, unpack_bucket
from rl_core.testing.transports import sample_tensors


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_checksums_are_those_of_zlib():
    for tensor in sample_tensors().values():
        assert tensor_record(tensor).checksum == zlib.crc32(bytes_of(tensor))


@pytest.mark.parametrize("bucket_bytes", [32, 1 << 20])
def test_packing_into_given_memory_gives_the_same_bytes_and_checksums(bucket_bytes):
    tensors = {**sample_tensors(), "larger than a chunk": torch.randn(100_003)}
    packed_before = list(pack_buckets(tensors.items(), bucket_bytes))
    for late, packed in zip(pack_buckets(tensors.items(), bucket_bytes), packed_before, strict=True):
        memory = torch.full((late.num_bytes,), 7, dtype=torch.uint8)
        expected = b"".join(bytes_of(tensors[name]) for name in late.names)
        written = packed_into(memory, late)
        assert bytes(memory.numpy()) == bytes(packed.data.numpy()) == expected
        assert written.data.data_ptr() == memory.data_ptr()
        assert bucket_records(written) == {name: tensor_record(tensors[name]) for name in late.names}
        again = packed_into(torch.empty_like(memory), packed)
        assert again.checksums == written.checksums, "a bucket that is already packed must keep its checksums"


def test_a_kept_bucket_does_not_change_with_the_weights():
    weights = {"a": torch.zeros(4), "b": torch.ones(4)}
    buckets = pack_buckets(weights.items(), 16)
    first = next(buckets)
    second = next(buckets)
    weights["a"].fill_(9.0)
    assert dict(unpack_bucket(first))["a"].tolist() == [0.0] * 4
    taken = pack_buckets(weights.items(), 16)
    let_go = next(taken)
    let_go.taken()
    next(taken)
    with pytest.raises(ValueError, match=r"\('a',\)…: has 0 parts, expected \d+; read `data` before `taken`"):
        let_go.data  # noqa: B018
    assert second.names == ("b",)


def test_evolving_a_bucket_with_other_data_drops_its_parts():
    (bucket,) = pack_buckets([("a", torch.zeros(4))], 16)
    (late,) = [attrs.evolve(b) for b in pack_buckets([("a", torch.zeros(4))], 16)]
    assert late.parts is not None
    other = attrs.evolve(late, data=torch.ones(16, dtype=torch.uint8))
    assert other.parts is None
    assert dict(unpack_bucket(other))["a"].view(torch.uint8).tolist() == [1] * 16
    assert bucket.num_bytes == late.num_bytes == other.num_bytes == 16


def test_a_bucket_needs_data_or_parts_but_may_be_empty():
    with pytest.raises(ValueError, match="neither `data` nor `parts`"):
        WeightBucket(names=("a",), dtypes=("float32",), shapes=((1,),))
    assert WeightBucket(names=(), dtypes=(), shapes=(), parts=()).data.numel() == 0
