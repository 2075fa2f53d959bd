"""Whether a batch's routes (`routed_experts` [T, L, K], `routed` [T]) fit the model that is to follow them.

L counts all transformer layers of the whole model, as engines return them; what stands in layers without experts, and
where `routed` is False, is never read.
"""

from __future__ import annotations

import itertools

import attrs
import torch

from rl_core.batch import Batch
from rl_core.columns import ROUTE_COLUMNS
from rl_core.errors import ConfigError, ShapeError


@attrs.frozen(kw_only=True)
class RouteShape:
    """What a model's routes look like."""

    num_layers: int
    """L: all transformer layers of the model, wherever they are computed."""
    layers: tuple[int, ...]
    """The layers among these whose experts follow routes on this rank."""
    num_experts: int
    experts_per_token: int
    """K"""


def require_routes(batch: Batch, shape: RouteShape | None, *, key: str) -> None:
    """The batch carries routes that fit where they are followed, and none where they are not.

    One that says of every token that its route is unknown (`routed` alone, False throughout) fits everywhere: the
    router's own choices score it.

    Args:
        batch: about to be scored or trained on.
        shape: of the model; None where replay is off.
        key: configuration key that switches replay on, for messages.

    Raises:
        ConfigError: routes arrived and replay is off, or the other way round.
        ShapeError: L or K is another, an expert's id is out of range, or a token has an expert twice.
    """
    if "routed_experts" not in batch and "routed" in batch and not batch["routed"].any():
        return
    arrived = [name for name in ROUTE_COLUMNS if name in batch]
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
    layers = list(shape.layers)
    routes_TLK = batch["routed_experts"] if len(layers) == num_layers else batch["routed_experts"][:, layers]
    # Pairs of whole planes: a quarter of the time of a sort of every token's few ids.
    routes_KTL = routes_TLK.permute(2, 0, 1).contiguous()
    is_wrong_TL = ((routes_KTL < 0) | (routes_KTL >= shape.num_experts)).any(0)
    is_twice_TL = torch.zeros_like(is_wrong_TL)
    for one_TL, other_TL in itertools.combinations(routes_KTL, 2):
        is_twice_TL |= one_TL == other_TL
    for is_faulty_TL, expected in (
        (is_wrong_TL, f"ids from 0 to {shape.num_experts - 1}"),
        (is_twice_TL, "each expert once"),
    ):
        is_faulty_TL &= batch["routed"][:, None]
        if is_faulty_TL.any():
            token, layer = (int(i) for i in is_faulty_TL.nonzero()[0])
            ids = routes_TLK[token, layer].tolist()
            raise ShapeError(f"routed_experts: token {token}, layer {layers[layer]}: {ids}; expected {expected}")
