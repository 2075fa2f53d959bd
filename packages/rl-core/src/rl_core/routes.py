"""Whether a batch's routes (`routed_experts` [T, L, K], `routed` [T]) fit the model that is to follow them.

L counts all transformer layers of the whole model, as engines return them; what stands in layers without experts, and
where `routed` is False, is never read.
"""

from __future__ import annotations

import attrs

from rl_core.batch import Batch
from rl_core.errors import ConfigError, ShapeError


@attrs.frozen(kw_only=True)
class RouteShape:
    """What a model's routes look like."""

    num_layers: int
    """L: all transformer layers of the model, wherever they are computed."""
    layers: tuple[int, ...]
    """Of those, the ones with experts that follow routes here."""
    num_experts: int
    experts_per_token: int
    """K"""


def require_routes(batch: Batch, shape: RouteShape | None, *, key: str) -> None:
    """The batch carries routes that fit where they are followed, and none where they are not.

    Args:
        batch: about to be scored or trained on.
        shape: of the model; None where replay is off.
        key: configuration key that switches replay on, for messages.

    Raises:
        ConfigError: routes arrived and replay is off, or the other way round.
        ShapeError: L or K is another, an expert's id is out of range, or a token has an expert twice.
    """
    arrived = [name for name in ("routed_experts", "routed") if name in batch]
    if shape is None:
        if arrived:
            raise ConfigError(
                f"{key}: the batch carries {' and '.join(arrived)}, and router replay is off; set {key}=true, or "
                "generator.inference_engine.enable_return_routed_experts=false"
            )
        return
    if len(arrived) < 2:
        raise ConfigError(
            f"{key}: router replay is on, and the batch carries {arrived[0] if arrived else 'no routes'}, expected "
            "routed_experts and routed; set generator.inference_engine.enable_return_routed_experts=true, or "
            f"{key}=false"
        )
    _require_fitting(batch, shape)


def _require_fitting(batch: Batch, shape: RouteShape) -> None:
    num_layers, experts_per_token = batch["routed_experts"].shape[1:]
    if (num_layers, experts_per_token) != (shape.num_layers, shape.experts_per_token):
        raise ShapeError(
            f"routed_experts: {num_layers} layers with {experts_per_token} experts per token; the model has "
            f"{shape.num_layers} layers and chooses {shape.experts_per_token}"
        )
    token_R = batch["routed"].nonzero().squeeze(1)
    routes_RLK = batch["routed_experts"][token_R][:, list(shape.layers)]
    wrong_RLK = (routes_RLK < 0) | (routes_RLK >= shape.num_experts)
    sorted_RLK = routes_RLK.sort(-1).values
    twice_RL = (sorted_RLK[..., 1:] == sorted_RLK[..., :-1]).any(-1)
    for is_wrong_RL, fault in (
        (wrong_RLK.any(-1), f"expected ids from 0 to {shape.num_experts - 1}"),
        (twice_RL, "expected each expert once"),
    ):
        if is_wrong_RL.any():
            row, layer = (int(i) for i in is_wrong_RL.nonzero()[0])
            raise ShapeError(
                f"routed_experts: token {int(token_R[row])}, layer {shape.layers[layer]}: "
                f"{routes_RLK[row, layer].tolist()}; {fault}"
            )
