"""Speed of weight transfers from a rank to an engine's process, by each transport, compared with memcpy.

There is one rank and one engine, each in its own process. A sync is timed from its opening until both sides have
verified all data. Loading the weights into the engine is the same for all transports and is left out.

    memcpy    numpy copies the bytes into memory that is already mapped
    checksum  CRC-32 of the bytes on one core: each side computes it once

Then delta syncs are measured, for a model that AdamW trains in float32 at a learning rate of 1e-6 and that is published
in bfloat16. Printed after each of the first steps: the bytes sent relative to the weights' bytes, and the time of the
sync relative to the time of a full sync by the same transport.

Run: python benchmarks/weight_sync.py [--mebibytes 512] [--bucket-mebibytes 32] [--rounds 5] [--steps 4]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.rank_kit.weight_buckets import bucket_records, pack_buckets, require_same
from rl_core.rank_kit.weight_deltas import DeltaSender, HeldWeights, received

MEBIBYTE = 1 << 20
TENSOR_MEBIBYTES = 8
LEARNING_RATE = 1e-6


def main() -> None:
    """Measures all installed transports and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--bucket-mebibytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    num_bytes, bucket_bytes = options.mebibytes * MEBIBYTE, options.bucket_mebibytes * MEBIBYTE
    names = [plugin.name for plugin in plugins.installed("rl_core.weight_transports")]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        memcpy = report("memcpy", num_bytes, copy_of(num_bytes), options.rounds, None)
        report("checksum", num_bytes, checksum_of(num_bytes), options.rounds, memcpy)
        for name in [*names]:
            try:
                sync = sync_of(name, engine, num_bytes, bucket_bytes)
                sync()  # warms up: imports, first pages
            except ConfigError as error:
                names.remove(name)
                print(f"{name:14} not available: {error}")
                continue
            report(name, num_bytes, sync, options.rounds, memcpy)
        report_deltas(names, engine, bucket_bytes, options.steps)


def report(name: str, num_bytes: int, step: Callable[[], object], rounds: int, memcpy: float | None) -> float:
    """Prints and returns GB/s of the fastest round, because other load may take one of the two cores that a sync
    needs."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    speed = num_bytes / min(seconds) / 1e9
    relative = "" if memcpy is None else f"{speed / memcpy:7.2f} of memcpy"
    print(f"{name:14} {speed:7.2f} GB/s {relative}", flush=True)
    return speed


def copy_of(num_bytes: int) -> Callable[[], None]:
    """Returns a call that copies this many bytes."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


def checksum_of(num_bytes: int) -> Callable[[], int]:
    """Returns a call that computes the CRC-32 of this many bytes."""
    source = np.ones(num_bytes, np.uint8)
    return lambda: zlib_ng.crc32(source.data)


def sync_of(name: str, engine: ProcessPoolExecutor, num_bytes: int, bucket_bytes: int) -> Callable[[], object]:
    """Returns a call that syncs once from this process to `engine`'s; it raises if the received data differ."""
    num_tensors = max(1, num_bytes // (TENSOR_MEBIBYTES * MEBIBYTE))
    weights = {f"layer{i}": torch.rand(num_bytes // num_tensors // 4) for i in range(num_tensors)}
    return lambda: sync_once(name, engine, weights, bucket_bytes)


def sync_once(
    name: str,
    engine: ProcessPoolExecutor,
    weights: Mapping[str, Tensor],
    bucket_bytes: int,
    *,
    delta: Mapping[str, Any] | None = None,
    held: HeldWeights | None = None,
) -> Manifest:
    """Syncs once and returns what was sent: all weights, or with `delta` the changes since the rank's `held`
    weights."""
    transport = plugins.load("rl_core.weight_transports", name)
    rendezvous = attrs.evolve(transport.open(num_ranks=1, num_engines=1), delta=delta)
    try:
        receiving = engine.submit(receive, rendezvous)
        sender = transport.sender(rendezvous, 0, 1)
        if delta is not None:
            sender = DeltaSender(sender, delta, held or HeldWeights())
        sent = sender.send(pack_buckets(weights.items(), bucket_bytes), 0)
        require_same(sent, receiving.result())
    finally:
        transport.close(rendezvous)
    return sent


_engine_holds = HeldWeights()


def receive(rendezvous: Rendezvous) -> Manifest:
    """Receives a sync in the engine's process, as an engine does before it loads the weights."""
    receiver = plugins.load("rl_core.weight_transports", rendezvous.receiver)(rendezvous)
    records = {}
    for bucket in received(receiver, 0, rendezvous.delta, _engine_holds):
        records |= bucket_records(bucket)
    return Manifest(version=0, tensors=records)


# --- delta syncs ----------------------------------------------------------------------------------------------------


def report_deltas(names: Sequence[str], engine: ProcessPoolExecutor, bucket_bytes: int, num_steps: int) -> None:
    """Prints a line per transport and step."""
    published = list(published_weights(num_steps))
    num_bytes = sum(weight.nbytes for weight in published[0].values())
    print(f"changes of {num_bytes / 1e6:.1f} MB of bfloat16 weights, by AdamW at a learning rate of {LEARNING_RATE:g}")
    for name in names:
        held, found = HeldWeights(), []
        for step, weights in enumerate(published):
            delta = {"id": str(step), "base": str(step - 1) if step else None}
            start = time.perf_counter()
            sent = sync_once(name, engine, weights, bucket_bytes, delta=delta, held=held)
            found.append(((sent.num_sent_bytes or 0) / num_bytes, time.perf_counter() - start))
        start = time.perf_counter()
        sync_once(name, engine, published[-1], bucket_bytes)
        whole_s = time.perf_counter() - start
        for step, (share, seconds) in enumerate(found[1:], start=1):
            print(f"{name:14} step {step}: {100 * share:5.2f} % of the bytes, {seconds / whole_s:5.2f} of a full sync")


def published_weights(num_steps: int) -> Iterator[dict[str, Tensor]]:
    """The weights that a rank publishes before the first step and after each step: float32 weights, initialised with
    bfloat16 values, trained on random tokens and rounded to bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps + 1):
        yield {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
        if step < num_steps:
            tokens = torch.randint(config.vocab_size, (4, 64))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
