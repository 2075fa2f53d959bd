"""Noise on sharded parameters: on every rank the same model, and gone bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from rl_fsdp import perturbation


class Mesh:
    def __init__(self, *coordinate: int):
        self.coordinate = coordinate

    def get_coordinate(self):
        return self.coordinate


class Piece:
    """As much of a DTensor as says which part of the whole a rank holds."""

    def __init__(self, mesh, placements):
        self.device_mesh, self.placements = mesh, placements

    def to_local(self):
        return torch.zeros(1)


@pytest.mark.parametrize(("copy", "shard"), [(0, 0), (1, 0), (0, 1)])
def test_copies_of_a_shard_get_the_same_noise_and_shards_their_own(copy, shard, monkeypatch):
    monkeypatch.setattr(perturbation, "DTensor", Piece)
    _, piece = perturbation._piece(Piece(Mesh(copy, shard), (Replicate(), Shard(0))))
    assert piece == (shard,)


def test_seeds_differ_by_parameter_and_piece():
    seeds = {perturbation._seed_of(0, i, piece) for i in range(50) for piece in range(8)}
    assert len(seeds) == 400
