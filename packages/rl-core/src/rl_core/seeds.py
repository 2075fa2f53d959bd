"""Seeds for all random numbers of a run, derived from the run's seed and the purpose of the numbers.

A seed depends only on its parts and is the same in every process and on every machine, so a resumed run draws the same
numbers as an uninterrupted one. Python's `hash` is not used, because for text it differs between processes, and because
it collides for small numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) from `parts`, e.g. the run's seed, a group and a sample. Different parts give unrelated
    seeds.

    The seed is the first 63 bits of the BLAKE2b hash of the parts, joined by `/`.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_of(*numbers: int) -> np.random.Generator:
    """A NumPy random generator. NumPy's SeedSequence derives its state from `numbers`, each at least 0."""
    return np.random.default_rng(numbers)
