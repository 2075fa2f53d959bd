"""How fast weights travel from a rank to an engine's process, by each transport, against memcpy, in one run.

Two processes, one rank and one engine. A sync counts from its opening until both sides have everything, checked; what
an engine then does with it is the same for all transports and left out.

    memcpy    numpy copies the bytes into memory that is mapped and warm
    checksum  CRC-32 of the bytes on one core: each side computes it once, beside the transfer where the transport can

Run: python benchmarks/weight_sync.py [--mebibytes 512] [--bucket-mebibytes 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.rank_kit.weight_buckets import bucket_records, pack_buckets, require_same

MEBIBYTE = 1 << 20
TENSOR_MEBIBYTES = 8


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--bucket-mebibytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_bytes = options.mebibytes * MEBIBYTE
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        memcpy = report("memcpy", num_bytes, copy_of(num_bytes), options.rounds, None)
        report("checksum", num_bytes, checksum_of(num_bytes), options.rounds, memcpy)
        for plugin in plugins.installed("rl_core.weight_transports"):
            try:
                sync = sync_of(plugin.name, engine, num_bytes, options.bucket_mebibytes * MEBIBYTE)
                sync()  # imports, first pages
            except ConfigError as error:
                print(f"{plugin.name:14} not here: {error}")
                continue
            report(plugin.name, num_bytes, sync, options.rounds, memcpy)


def report(name: str, num_bytes: int, step: Callable[[], object], rounds: int, memcpy: float | None) -> float:
    """Prints and returns GB/s, of the median round."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    speed = num_bytes / statistics.median(seconds) / 1e9
    relative = "" if memcpy is None else f"{speed / memcpy:7.2f} of memcpy"
    print(f"{name:14} {speed:7.2f} GB/s {relative}", flush=True)
    return speed


def copy_of(num_bytes: int) -> Callable[[], None]:
    """Copies so many bytes."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


def checksum_of(num_bytes: int) -> Callable[[], int]:
    """CRC-32 of so many bytes."""
    source = np.ones(num_bytes, np.uint8)
    return lambda: zlib.crc32(source.data)


def sync_of(name: str, engine: ProcessPoolExecutor, num_bytes: int, bucket_bytes: int) -> Callable[[], None]:
    """One sync from this process to `engine`'s; raises if what arrived is not what was sent."""
    transport = plugins.load("rl_core.weight_transports", name)
    num_tensors = max(1, num_bytes // (TENSOR_MEBIBYTES * MEBIBYTE))
    weights = {f"layer{i}": torch.rand(num_bytes // num_tensors // 4) for i in range(num_tensors)}

    def sync() -> None:
        rendezvous = transport.open(num_ranks=1, num_engines=1)
        try:
            receiving = engine.submit(receive, rendezvous)
            sent = transport.sender(rendezvous, 0, 1).send(pack_buckets(weights.items(), bucket_bytes), 0)
            require_same(sent, receiving.result())
        finally:
            transport.close(rendezvous)

    return sync


def receive(rendezvous: Rendezvous) -> Manifest:
    """What an engine does before it loads."""
    receiver = plugins.load("rl_core.weight_transports", rendezvous.receiver)(rendezvous)
    records = {}
    for bucket in receiver.receive(0):
        records |= bucket_records(bucket)
    return Manifest(version=0, tensors=records)


if __name__ == "__main__":
    main()
