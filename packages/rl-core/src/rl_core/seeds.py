"""Where every random number of a run comes from: seeds that follow from the run's seed and what they are for.

A seed depends on its parts alone, in every process and on every machine, so a resumed run draws what the uninterrupted
one would have drawn. Python's `hash` is not used: it differs between processes for text, and collides for small
numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) for what `parts` name, e.g. the run's seed, a group and a sample; unrelated for other parts.

    The first 63 bits of the BLAKE2b hash of the parts, written with `/` between them.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_of(*numbers: int) -> np.random.Generator:
    """numpy's generator for what `numbers` (0 or more) name; NumPy's SeedSequence mixes them."""
    return np.random.default_rng(numbers)
