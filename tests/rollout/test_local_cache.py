"""The local engine's cache gives the same samples as a plain cache that copies everything, and copies far less."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from rl_core.interfaces import SamplingParams
from rl_rollout.local import rows
from rl_rollout.local.cache import RowCache, rows_without
from rl_rollout.local.rows import Sample
from rl_rollout.local.scheduler import Scheduler
from rl_transformers.testing.models import make_checkpoint

HEADS, HEAD_DIM = 2, 4
COLUMN_BYTES = 2 * HEADS * HEAD_DIM * 4


@attrs.define(eq=False, slots=False)
class PlainCache:
    """A plain reference cache: exactly as large as its contents, and reallocated at every change of size."""

    pad_B: np.ndarray = attrs.field(factory=lambda: np.empty(0, np.int64))
    layers: list = attrs.field(factory=list)

    @property
    def num_rows(self):
        return len(self.pad_B)

    def with_room(self):
        self.cache = DynamicCache()
        for keys, values in self.layers:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            self.cache.layers.append(layer)
        return self.cache

    def appended(self):
        self.layers = [(layer.keys, layer.values) for layer in self.cache.layers]

    def add(self, num_rows, width, like):
        old = self.layers or [tuple(tensor[:0, :, :0] for tensor in layer) for layer in like]
        more = max(0, width - old[0][0].shape[2])
        shape = (0, 0, more, 0, 0, 0, 0, num_rows)
        padded = [[torch.nn.functional.pad(t, shape[:4]) for t in layer] for layer in old]
        self.layers = [
            tuple(torch.cat([t, t.new_zeros(num_rows, *t.shape[1:])]).contiguous() for t in layer) for layer in padded
        ]
        self.pad_B = np.concatenate([self.pad_B + more, np.full(num_rows, self.layers[0][0].shape[2])])

    def fill(self, rows, layers, sources, pad_B):
        for layer, others in zip(self.layers, layers, strict=True):
            for tensor, other in zip(layer, others, strict=True):
                for row, source in zip(rows.tolist(), sources.tolist(), strict=True):
                    tensor[row, :, tensor.shape[2] - other.shape[2] :] = other[source]
                    self.pad_B[row] = tensor.shape[2] - other.shape[2] + pad_B[source]

    def keep(self, row_B):
        if not len(row_B):
            self.pad_B, self.layers = self.pad_B[:0], []
            return
        pad_B = self.pad_B[row_B]
        cut = int(pad_B.min())
        self.layers = [tuple(t[torch.from_numpy(row_B), :, cut:].clone() for t in layer) for layer in self.layers]
        self.pad_B = pad_B - cut


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that tensor operations copy."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        written = {
            "copy_": lambda: args[0],
            "index_put_": lambda: args[2],
            "index": lambda: result,
            "cat": lambda: result,
            "clone": lambda: result,
        }.get(func.overloadpacket.__name__, lambda: None)()
        if written is not None:
            self.num_bytes += written.numel() * written.element_size()
        return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("cache") / "model")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def completions(model):
    """Completions of samples that join and end at different times, in two waves."""
    numbers, scheduler = random.Random(0), Scheduler(model, max_num_seqs=9)
    ended = []
    for wave in range(2):
        prompts = [tuple(numbers.randrange(40) for _ in range(numbers.choice([1, 2, 7, 30]))) for _ in range(12)]
        scheduler.submit(
            [
                Sample(
                    owner=wave,
                    index=i,
                    prompt_tokens=prompt,
                    params=SamplingParams(max_tokens=numbers.choice([1, 3, 9, 40])),
                    seed=i,
                    stop_tokens=(3,),
                    watch=None,
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        for _ in range(7):
            ended += scheduler.step()
    while scheduler.has_work:
        ended += scheduler.step()
    return {(sample.owner, sample.index): completion for sample, completion in ended}


def test_samples_equal_those_of_a_plain_cache_bit_for_bit(model, monkeypatch):
    found = completions(model)
    monkeypatch.setattr(rows, "RowCache", PlainCache)
    assert found == completions(model)
    assert len(found) == 24
    assert len({len(completion.tokens) for completion in found.values()}) > 4


@torch.inference_mode()
def copied(kind, num_tokens):
    """The bytes that a cache of 4 rows copies. Two rows decode `num_tokens` tokens. Every 64 tokens, the older of the
    other two rows ends and a new row joins.
    """
    cache = kind()
    like = [(torch.ones(1, HEADS, 8, HEAD_DIM), torch.ones(1, HEADS, 8, HEAD_DIM))]
    first_row, no_padding = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def join(count):
        first = cache.num_rows
        cache.add(count, 8, like)
        cache.fill(first + np.arange(count), like, first_row.repeat(count), no_padding)

    join(4)
    with CopiedBytes() as counter:
        for number in range(1, num_tokens + 1):
            column = torch.full((cache.num_rows, HEADS, 1, HEAD_DIM), float(number))
            past = cache.with_room()
            keys, values = past.layers[0].update(column, column)
            cache.appended()
            assert keys.shape[2] == values.shape[2]
            assert (keys[:, :, -1] == number).all()
            if number % 64 == 0:
                cache.keep(rows_without(4, np.array([2])))
                join(1)
    return counter.num_bytes


def test_copied_bytes_grow_linearly_with_the_tokens():
    sampled = 4 * COLUMN_BYTES
    short, long = (copied(RowCache, count) / (sampled * count) for count in (1024, 4096))
    # A token is copied once when it is written and about twice more as the cache doubles; short rows are also copied
    # when they join and move.
    assert long < 1.25 * short < 1.25 * 5
    # Negative control: a plain cache copies quadratically.
    short, long = (copied(PlainCache, count) / (sampled * count) for count in (1024, 4096))
    assert long > 2 * short


def test_remaining_rows_keep_their_places_and_the_last_rows_fill_gaps():
    assert rows_without(6, np.array([1, 4])).tolist() == [0, 5, 2, 3]
    assert rows_without(6, np.array([4, 5])).tolist() == [0, 1, 2, 3]
    assert rows_without(6, np.array([0, 1, 2, 3])).tolist() == [4, 5]
    assert rows_without(2, np.array([0, 1])).tolist() == []


def test_non_finite_values_of_an_ended_row_reach_no_other_row():
    cache = RowCache()
    broken, whole = (
        [(torch.full((1, 1, width, 1), value), torch.full((1, 1, width, 1), value))]
        for width, value in ((5, torch.nan), (2, 1.0))
    )
    for layers in (whole, broken):
        cache.add(1, layers[0][0].shape[2], layers)
        cache.fill(np.array([cache.num_rows - 1]), layers, np.array([0]), np.array([0]))
    cache.keep(rows_without(2, np.array([1])))
    cache.add(2, 5, whole)
    cache.fill(np.array([1, 2]), whole, np.array([0, 0]), np.array([0]))
    assert cache.pad_B.tolist() == [3, 3, 3]
    keys = cache.with_room().layers[0].keys
    assert keys.squeeze().tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0]] * 3
