"""The source of all random numbers of a run: seeds derived from the run's seed and their purpose.

A seed depends only on its parts, in every process and on every machine, so a resumed run draws the same numbers as an
uninterrupted one. Python's `hash` is not used, because it differs between processes for text, and collides for small
numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) from `parts`, e.g. the run's seed, a group and a sample. Other parts give unrelated seeds.

    The first 63 bits of the BLAKE2b hash of the parts, written with `/` between them.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_of(*numbers: int) -> np.random.Generator:
    """A NumPy generator from `numbers` (each at least 0), which NumPy's SeedSequence mixes."""
    return np.random.default_rng(numbers)
