"""Decides which passes of a model follow routes that come with the batch, and which passes record routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.interfaces import Plan, WorkerSpec
from rl_core.rank_kit.model_shapes import model_shape
from rl_core.rank_kit.route_checks import RouteShape, require_routes
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.options import field_key, transformer_fields
from rl_megatron.place import Place
from rl_megatron.rank.router_replay import RoutedChunks
from rl_megatron.rank.schedule import Around


class Routing:
    """Handles the routes of one model: they come with the batch, or a scoring pass records and returns them."""

    def __init__(self, chunks: Sequence[Any], place: Place, spec: WorkerSpec, hf_config: Mapping[str, Any]):
        """
        Args:
            chunks: the model's chunks on this rank, as passed to the schedule.
            place: this rank's place in the mesh.
            spec: its options say whether routes are followed, and whether the rollout or a scoring pass records them.
            hf_config: the fields of the model's config.json.
        """
        where = f"{SECTIONS[spec.role]}.megatron_config"
        shape = model_shape(hf_config, f"{SECTIONS[spec.role]}.model.path")
        config = chunks[0].config
        self._key = field_key("moe_enable_routing_replay", spec.options.transformer_config_kwargs, where)
        self._chunks = None
        if shape.is_moe and not config.moe_router_fusion:
            summed = 1 if shape.model_type == "deepseek_v2" else 2
            self._chunks = RoutedChunks(chunks, place, summed_per_group=summed)
        self._shape: RouteShape | None = None
        if transformer_fields(spec.options, where)["moe_enable_routing_replay"]:
            self._shape = RouteShape(
                num_layers=shape.num_layers,
                layers=self.layers,
                num_experts=shape.num_experts,
                experts_per_token=shape.experts_per_token,
            )
        self._records_scoring = self._shape is not None and spec.options.moe_routing_replay_source == "scoring"

    @property
    def around(self) -> Around:
        """The contexts for `run_schedule`."""
        return self._chunks or Around()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers on this rank whose routers can follow routes, as indices in the whole model."""
        return () if self._chunks is None else tuple(self._chunks.layers)

    def require(self, batch: Batch) -> None:
        """Raises ConfigError if router replay is on and the batch has no routes, or if it is off and the batch has
        routes. Raises ShapeError if the routes do not fit the model. Accepts a batch in which every route is
        unknown."""
        require_routes(batch, self._shape, key=self._key)

    @contextmanager
    def scoring(self, batch: Batch) -> Iterator[None]:
        """Context of a scoring pass. If training follows the routes of scoring passes and the batch has no routes, the
        pass records its own routes; otherwise `require` checks the batch."""
        records = self._records_scoring and "routed_experts" not in batch
        if not records:
            self.require(batch)
        if self._chunks is None:
            yield
            return
        self._chunks.records = records
        try:
            yield
        finally:
            self._chunks.records = False

    def taken(self, batch: Batch, plan: Plan) -> dict[str, Tensor]:
        """Returns `routed_experts` and `routed` if the pass in the current `scoring` context records routes, else an
        empty dict. All ranks of a model replica must call this method."""
        if self._chunks is None or self._shape is None or not self._chunks.records:
            return {}
        parts = self._chunks.recorded(self._shape.num_layers)
        routes_TLK = torch.zeros(batch.num_tokens, *parts[0].shape[1:], dtype=torch.int16)
        routed_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
        for sequences, part_TLK in zip(plan, parts, strict=True):
            index_T = batch.token_index(torch.as_tensor(list(sequences), dtype=torch.int64))
            routes_TLK[index_T] = part_TLK
            routed_T[index_T] = True
        return {"routed_experts": routes_TLK, "routed": routed_T}
