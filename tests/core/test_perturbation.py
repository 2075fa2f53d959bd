"""Noise on parameters: of the stated size, equal however the parameters are split, and removed bit for bit."""

from __future__ import annotations

import pytest
import torch

from rl_core.rank_kit import Perturbation, Piece


def whole(tensor: torch.Tensor, name: str = "weight") -> Piece:
    return Piece(tensor=tensor, name=name, offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def noise(pieces: list[Piece], seed: int = 1, scale: float = 0.5) -> list[torch.Tensor]:
    before = [piece.tensor.clone() for piece in pieces]
    perturbation = Perturbation.perturb(pieces, seed=seed, scale=scale)
    added = [piece.tensor - old for piece, old in zip(pieces, before, strict=True)]
    perturbation.restore(pieces)
    assert all(torch.equal(piece.tensor, old) for piece, old in zip(pieces, before, strict=True))
    return added


def test_a_piece_gets_its_part_of_the_whole_parameters_noise():
    parameter = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    (expected,) = noise([whole(parameter)])
    corners = [(0, 0), (5, 0), (0, 4), (5, 4)]
    pieces = [
        Piece(
            tensor=parameter[row : 5 if row == 0 else 12, column : 4 if column == 0 else 10].clone(),
            name="weight",
            offset=(row, column),
            shape=(12, 10),
        )
        for row, column in corners
    ]
    for piece, found in zip(pieces, noise(pieces), strict=True):
        rows, columns = found.shape
        row, column = piece.offset
        # Here the norm of the whole parameter is summed over its pieces, so its rounding differs from `expected`.
        assert torch.allclose(found, expected[row : row + rows, column : column + columns], atol=1e-6)


@pytest.mark.parametrize(("parameter", "expected"), [(2.0, 1.0), (0.0, 0.5 * 400**-0.5)], ids=["large", "zero"])
def test_noise_scales_with_the_parameter_or_with_an_initialisation_if_the_parameter_is_zero(
    parameter: float, expected: float
):
    (found,) = noise([whole(torch.full((300, 400), parameter))])
    assert float(found.square().mean().sqrt()) == pytest.approx(expected, rel=0.02)  # about ten standard errors


def test_other_seeds_and_other_parameters_get_other_noise():
    one, other = noise([whole(torch.zeros(50, 4), "a"), whole(torch.zeros(50, 4), "b")])
    (again,) = noise([whole(torch.zeros(50, 4), "a")], seed=2)
    assert not torch.isclose(one, other).any()
    assert not torch.isclose(one, again).any()
