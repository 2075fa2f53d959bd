"""Checks that a batch's routes (`routed_experts` [T, L, K], `routed` [T]) fit the model that follows them.

Engines return the routes of all L transformer layers of the whole model. A rank may get the routes of only some layers;
the column `route_layers` says which. Values in layers without experts, and at tokens for which `routed` is False, are
ignored.
"""

from __future__ import annotations

import itertools

import attrs
import torch

from rl_core.batch import Batch
from rl_core.columns import ROUTE_COLUMNS
from rl_core.errors import ConfigError, ShapeError
from rl_core.rank_kit.route_layers import layers_of_routes, routes_of


@attrs.frozen(kw_only=True)
class RouteShape:
    """The shape of a model's routes."""

    num_layers: int
    """L: number of all transformer layers of the model, on all ranks."""
    layers: tuple[int, ...]
    """Indices of the layers on this rank whose experts follow routes."""
    num_experts: int
    experts_per_token: int
    """K: number of experts that the router chooses for a token."""


def require_routes(batch: Batch, shape: RouteShape | None, *, key: str) -> None:
    """Requires that the batch has fitting routes if router replay is on, and no routes if it is off.

    A batch in which every route is unknown (only the column `routed`, all False) is always accepted: routers then make
    their own choices.

    Args:
        batch: the batch to be scored or trained on.
        shape: the model's route shape; None: replay is off.
        key: configuration key that switches replay on, for messages.

    Raises:
        ConfigError: the batch has routes and replay is off, or vice versa.
        ShapeError: L or K differs, `route_layers` does not fit `routed_experts`, a layer of this rank is missing, an
            expert id is out of range, or a token has the same expert twice.
    """
    if "routed_experts" not in batch and "routed" in batch and not batch["routed"].any():
        return
    arrived = [name for name in ROUTE_COLUMNS if name in batch]
    if shape is None:
        if arrived:
            raise ConfigError(
                f"the batch has {' and '.join(arrived)}, but router replay is off; set {key}=true, or "
                "generator.inference_engine.enable_return_routed_experts=false",
                key=key,
            )
        return
    if len(arrived) < 2:
        raise ConfigError(
            f"router replay is on, but the batch has {arrived[0] if arrived else 'no routes'}; expected routed_experts "
            f"and routed. Set generator.inference_engine.enable_return_routed_experts=true, or {key}=false",
            key=key,
        )
    _require_fitting(batch, shape)


def _require_fitting(batch: Batch, shape: RouteShape) -> None:
    num_layers, experts_per_token = batch["routed_experts"].shape[1:]
    if "route_layers" in batch:
        num_layers = batch["route_layers"].shape[1]
    if (num_layers, experts_per_token) != (shape.num_layers, shape.experts_per_token):
        raise ShapeError(
            f"routed_experts: {num_layers} layers with {experts_per_token} experts per token; the model has "
            f"{shape.num_layers} layers and chooses {shape.experts_per_token}"
        )
    found = layers_of_routes(batch)
    if len(found) != batch["routed_experts"].shape[1]:
        raise ShapeError(
            f"routed_experts: {batch['routed_experts'].shape[1]} layers, but route_layers names {len(found)}: {found}"
        )
    missing = [layer for layer in shape.layers if layer not in found]
    if missing:
        raise ShapeError(
            f"routed_experts: no routes of layer {missing[0]}, which this rank replays; route_layers names {found}, "
            f"expected all of {list(shape.layers)}. `Worker.route_layers` must name every layer "
            "that it replays"
        )
    routes_TLK = routes_of(batch, shape.layers)
    # Comparing the K ids in pairs takes a quarter of the time of sorting each token's ids.
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
            raise ShapeError(f"routed_experts: token {token}, layer {shape.layers[layer]}: {ids}; expected {expected}")
