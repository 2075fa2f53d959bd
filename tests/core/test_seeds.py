"""A seed depends only on its parts, in every process."""

from __future__ import annotations

import subprocess
import sys

from rl_core.seeds import generator_of, seed_of

# BLAKE2b of "7/3/0" with a digest of 8 bytes, as printed by `b2sum -l 64`, without the last bit.
KNOWN = 0x750633D68E807538 >> 1
NAMED = "from rl_core.seeds import seed_of; print(seed_of(7, 3, 0), seed_of('a', 1))"


def test_a_seed_is_the_same_in_every_process():
    printed = {
        subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True, check=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert printed == {f"{seed_of(7, 3, 0)} {seed_of('a', 1)}\n"}


def test_a_seed_has_its_documented_value():
    assert seed_of(7, 3, 0) == KNOWN


def test_seeds_of_similar_parts_are_all_different_and_fit_into_63_bits():
    seeds = {seed_of(*parts) for parts in ((a, b, c) for a in range(20) for b in range(20) for c in range(20))}
    assert len(seeds) == 8000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(1, 23) != seed_of(12, 3)


def test_generators_of_the_same_numbers_draw_the_same():
    assert generator_of(3, 1).integers(1 << 40) == generator_of(3, 1).integers(1 << 40)
    assert generator_of(3, 1).integers(1 << 40) != generator_of(3, 2).integers(1 << 40)
