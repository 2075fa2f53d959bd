"""Noise by position: hashes are splitmix64, noise is standard normal, and a part of a tensor keeps its indices."""

from __future__ import annotations

import pytest
import torch

from rl_core.rank_kit.noise import element_index, hash_of, normal_noise


def test_hashes_are_the_published_sequence_of_splitmix64():
    """The first numbers of splitmix64 for the seed 1234567, as other implementations print them."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [number % 2**64 for number in hash_of(torch.arange(5), 1234567).tolist()] == known


def test_noise_is_standard_normal():
    noise = normal_noise(torch.arange(1 << 20), 3).double()
    # Bounds: four standard errors of each moment, and the expected range of the largest of 2^20 normal numbers.
    assert float(noise.mean()) == pytest.approx(0.0, abs=4 * 2**-10)
    assert float(noise.square().mean()) == pytest.approx(1.0, abs=4 * 2**0.5 * 2**-10)
    assert float(noise.pow(4).mean()) == pytest.approx(3.0, abs=4 * 96**0.5 * 2**-10)
    assert 4.0 < float(noise.abs().max()) < 6.5
    neighbours = float((noise[1:] * noise[:-1]).mean())
    assert neighbours == pytest.approx(0.0, abs=4 * 2**-10)


def test_element_indices_of_a_part_are_those_in_the_whole():
    whole = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    assert torch.equal(element_index((4, 6, 5), (0, 0, 0), (4, 6, 5)), whole)
    assert torch.equal(element_index((2, 3, 5), (1, 3, 0), (4, 6, 5)), whole[1:3, 3:6])
    # Padding rows after the last row do not change the indices.
    assert torch.equal(element_index((4, 6, 5), (0, 0, 0), (7, 6, 5)), whole)
