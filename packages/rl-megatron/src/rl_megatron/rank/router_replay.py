"""Chooses the experts for each token of one model: recorded ones, the router's own choice or, for padding, round-robin.

A mixture-of-experts router picks K of E experts for each token from scores. Rounding can change the choice, so engine
and trainer, or two passes of the trainer, may use different experts for a token. Replay (R3, arXiv 2510.11370) fixes
the choice but keeps the router's scores, so that gradients still reach the router.

Megatron-Core 0.16.1 calls `router.router_replay.get_replay_topk` for the choice. Megatron's own `RouterReplay` keeps
one list of routers per process, and replaces all of a router's choices or none; `RouterChoices` belongs to one router
and decides per token. With recomputation, a router sees all micro-batches again in backward, in the order of the
forward pass. `RouterChoices` keeps the choices of the forward pass until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from rl_core.layout.balancing import IntArray
from rl_core.rank_kit.device_copies import on_device
from rl_core.rank_kit.route_layers import routes_of
from rl_megatron.place import Place
from rl_megatron.rank.micro_batch import MicroBatch
from rl_megatron.rank.route_layout import deal_padding, router_order
from rl_megatron.rank.schedule import Around


@attrs.frozen(kw_only=True, eq=False)
class TokenRoutes:
    """Routes of the S tokens that a rank's routers see in one micro-batch, in the order in which they see them."""

    padding_S: Tensor
    """bool; whether the token is padding."""
    padding_experts_SK: Tensor | None
    """int64; read only for padding tokens. None: there is no padding."""
    known_S: Tensor | None = None
    """bool; whether the token has a route to follow. None: no token has one."""
    experts_SMK: Tensor | None = None
    """Experts to follow in the rank's M layers with experts; read only where `known_S` is true."""


class RouterChoices(RouterReplay):
    """Chooses the experts for one router, and keeps the choices for recomputation and for recording."""

    # Does not call the base class, which would add this object to a list of all routers of the process.
    def __init__(self, layer: int, *, summed_per_group: int):  # pyright: ignore[reportMissingSuperCall]
        self.layer = layer
        """Transformer layer of the whole model, from 0."""
        self.summed_per_group = summed_per_group
        """Number of a group's best experts whose scores are summed to give the group's score."""
        self.place = 0
        """Index of the router's layer among the rank's M layers with experts."""
        self.in_schedule = False
        self.keeps_for_backward = False
        self.records = False
        self.current: TokenRoutes | None = None
        """Routes of the micro-batch whose forward pass is running."""
        self.kept: deque[tuple[Tensor, Tensor]] = deque()
        """Padding mask and choices of the micro-batches that backward may recompute."""
        self.recorded: list[Tensor] = []
        """int64 [S, K], the choices of each micro-batch's forward pass."""

    @property
    def padding_S(self) -> Tensor | None:
        """Padding mask of the micro-batch that the router is about to see; None outside of a schedule."""
        if self.current is not None:
            return self.current.padding_S
        return self.kept[0][0] if self.in_schedule else None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and the indices of the chosen experts, both [S, K], from the scores of all experts [S, E].

        `default_compute_topk`, Megatron's own choice, is not used: it sums the scores of a group's best
        `topk // group_topk` experts, but in transformers the number of these experts depends on the model type.
        """
        if self.in_schedule and self.current is None:
            chosen_SK = self.kept.popleft()[1]
            return scores.gather(1, chosen_SK), chosen_SK
        chosen_SK = best_experts(
            scores, topk, num_groups=num_groups, best_groups=group_topk, summed_per_group=self.summed_per_group
        )
        if self.current is not None:
            chosen_SK = self._choose(self.current, chosen_SK)
            if self.keeps_for_backward:
                self.kept.append((self.current.padding_S, chosen_SK))
            if self.records:
                self.recorded.append(chosen_SK)
        return scores.gather(1, chosen_SK), chosen_SK

    def _choose(self, routes: TokenRoutes, own_SK: Tensor) -> Tensor:
        assert len(routes.padding_S) == len(own_SK), f"{len(own_SK)} tokens, but routes for {len(routes.padding_S)}"
        chosen_SK = own_SK
        if routes.known_S is not None and routes.experts_SMK is not None:
            given_SK = routes.experts_SMK[:, self.place].to(own_SK.dtype)
            chosen_SK = torch.where(routes.known_S[:, None], given_SK, chosen_SK)
        if routes.padding_experts_SK is not None:
            chosen_SK = torch.where(routes.padding_S[:, None], routes.padding_experts_SK, chosen_SK)
        return chosen_SK


class RoutedChunks(Around):
    """Controls the choices of all routers of one model on this rank.

    A token with a known route follows the route, other tokens take the router's own choice, and padding is spread
    evenly over the experts. Padding is excluded from the routers' statistics (expert bias, auxiliary losses). Recorded
    choices are kept until the next schedule, all other state only during one schedule.
    """

    def __init__(self, chunks: Sequence[Any], place: Place, *, summed_per_group: int):
        """
        Args:
            chunks: the model's chunks on this rank, as passed to the schedule; none of their routers may be fused.
            place: this rank's place in the mesh.
            summed_per_group: number of a group's best experts whose scores are summed to give the group's score.
        """
        config = chunks[0].config
        self._place = place
        self._device = place.device
        self._num_experts: int = config.num_moe_experts
        self._experts_per_token: int = config.moe_router_topk
        self._recomputes = config.recompute_granularity is not None
        self._by_chunk = {
            id(chunk): [_attach(router, summed_per_group) for router in _routers(chunk)] for chunk in chunks
        }
        self._all = sorted((c for choices in self._by_chunk.values() for c in choices), key=lambda c: c.layer)
        for place_in_rank, choices in enumerate(self._all):
            choices.place = place_in_rank
        self.layers = [choices.layer for choices in self._all]
        """Layers whose routers are on this rank, as indices in the whole model, ascending."""
        self.records = False
        """Whether the schedules that start from now on record their choices."""
        self._recorded: list[MicroBatch] = []

    @contextmanager
    def schedule(self, micro_batches: Sequence[MicroBatch], *, forward_only: bool) -> Iterator[None]:
        """Context of one run of Megatron's schedule."""
        self._recorded = list(micro_batches) if self.records else []
        for choices in self._all:
            choices.recorded.clear()
            choices.in_schedule = True
            choices.keeps_for_backward = self._recomputes and not forward_only
            choices.records = self.records
        try:
            yield
        finally:
            for choices in self._all:
                choices.in_schedule = False
                choices.kept.clear()

    @contextmanager
    def forward(self, chunk: Any, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of a micro-batch's forward pass through a chunk. A router that is called in a schedule but outside
        this context recomputes the oldest micro-batch that it keeps."""
        routes = self._token_routes(micro_batch)
        for choices in self._by_chunk[id(chunk)]:
            choices.current = routes
        try:
            yield
        finally:
            for choices in self._by_chunk[id(chunk)]:
                choices.current = None

    def recorded(self, num_layers: int) -> list[Tensor]:
        """Returns the experts that routers chose in the last schedule, for each micro-batch. All ranks of a model
        replica must call this method.

        Args:
            num_layers: L, number of transformer layers of the whole model.

        Returns:
            For each micro-batch, int16 [T, L, K] on the CPU, the same on every rank; 0 in layers without experts.
        """
        parts = [self._recorded_here(number, part, num_layers) for number, part in enumerate(self._recorded)]
        merged = torch.cat(parts).to(self._device)
        for group in _replica_groups():
            dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group)
        return list(merged.clamp(min=0).to("cpu", torch.int16).split([len(part) for part in parts]))

    def _recorded_here(self, number: int, micro_batch: MicroBatch, num_layers: int) -> Tensor:
        """Returns this rank's recorded choices, int32 [T, L, K]; -1 for tokens and layers of other ranks."""
        routes_TLK = torch.full((micro_batch.num_tokens, num_layers, self._experts_per_token), -1, dtype=torch.int32)
        index_S = torch.from_numpy(self._index(micro_batch))
        is_real_S = index_S >= 0
        for choices in self._all:
            routes_TLK[index_S[is_real_S], choices.layer] = choices.recorded[number].cpu()[is_real_S].int()
        return routes_TLK

    def _index(self, micro_batch: MicroBatch) -> IntArray:
        index_BS = micro_batch.index_P.numpy().reshape(tuple(micro_batch.tokens_BS.shape))
        return router_order(index_BS, self._place.coordinates.tensor, self._place.mesh.tensor)

    def _token_routes(self, micro_batch: MicroBatch) -> TokenRoutes:
        index_S = self._index(micro_batch)
        is_padding_S = index_S < 0
        known_S = experts_SMK = None
        batch = micro_batch.batch
        if batch is not None and "routed_experts" in batch:
            at_S = torch.from_numpy(np.where(is_padding_S, 0, index_S))
            known_S = on_device(batch["routed"][at_S] & torch.from_numpy(~is_padding_S), self._device)
            # Only the tokens and layers that this rank's routers read move to the device.
            experts_SMK = on_device(routes_of(batch, self.layers)[at_S], self._device)
        return TokenRoutes(
            padding_S=on_device(torch.from_numpy(is_padding_S), self._device),
            padding_experts_SK=self._padding_experts(is_padding_S),
            known_S=known_S,
            experts_SMK=experts_SMK,
        )

    def _padding_experts(self, is_padding_S: np.ndarray) -> Tensor | None:
        if not is_padding_S.any():
            return None
        at, mesh = self._place.coordinates, self._place.mesh
        experts_SK = np.zeros((len(is_padding_S), self._experts_per_token), np.int64)
        experts_SK[is_padding_S] = deal_padding(
            int(is_padding_S.sum()),
            first=at.tensor + mesh.tensor * (at.context + mesh.context * at.data),
            num_experts=self._num_experts,
            expert_ranks=mesh.expert,
            experts_per_token=self._experts_per_token,
        )
        return on_device(torch.from_numpy(experts_SK), self._device)


def _replica_groups() -> list[Any]:
    """Returns the groups over which a model replica splits tokens (tensor, context) and layers (pipeline)."""
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]


def _routers(chunk: nn.Module) -> list[TopKRouter]:
    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


def best_experts(
    scores_SE: Tensor, count: int, *, num_groups: int | None, best_groups: int | None, summed_per_group: int
) -> Tensor:
    """Returns the K experts with the highest scores for each token, [S, K]; if there are groups of experts, only
    experts of the best groups.

    A group's score is its best expert's score in DeepSeek-V2 (arXiv 2405.04434), and the sum of its best two experts'
    scores in DeepSeek-V3 (arXiv 2412.19437).
    """
    if num_groups and best_groups:
        scores_SGE = scores_SE.unflatten(1, (num_groups, -1))
        groups_SG = scores_SGE.topk(summed_per_group, dim=2).values.sum(2)
        is_best_SG = torch.zeros_like(groups_SG, dtype=torch.bool).scatter(1, groups_SG.topk(best_groups).indices, True)
        scores_SE = scores_SGE.masked_fill(~is_best_SG[..., None], float("-inf")).flatten(1)
    return scores_SE.topk(count, dim=1).indices


def _attach(router: TopKRouter, summed_per_group: int) -> RouterChoices:
    assert not router.config.moe_router_fusion, "a fused router chooses by itself"
    assert router.layer_number is not None
    choices = RouterChoices(router.layer_number - 1, summed_per_group=summed_per_group)
    router.router_replay = choices

    def mask_padding(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        padding_S = choices.padding_S
        return None if padding_S is None else (args[0], padding_S)

    router.register_forward_pre_hook(mask_padding)
    return choices
