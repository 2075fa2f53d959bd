"""Which experts the tokens of one model go to: those that are given, the router's own choice, or, for padding, dealt.

A mixture-of-experts router picks K of E experts for each token from scores that rounding can tip over: engine and
trainer, or two passes of the trainer, then train different experts than those that made the token. Replay (R3,
arXiv 2510.11370) gives the router the choice and keeps its scores, so that gradients still reach it.

Megatron-Core 0.16.1 asks `router.router_replay.get_replay_topk` for its choice. Its own class behind that name keeps
one list of routers per process and replaces all of a router's choices or none; `RouterChoices` belongs to one router
and decides by token. Routers see a micro-batch in a forward pass, and with recomputation again in backward, in the
same order: what a forward pass chose is kept until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from rl_core.layout.balancing import IntArray


@attrs.frozen(kw_only=True, eq=False)
class TokenRoutes:
    """Where the S tokens go that a rank's routers see in one micro-batch, in the order in which they see them."""

    index_S: IntArray
    """Each token's place in the stream; -1 for padding."""
    padding_S: Tensor
    """bool, on the routers' device."""
    padding_experts_SK: Tensor | None
    """int64; where padding is, the experts that it is dealt. None: no padding."""
    known_S: Tensor | None = None
    """bool; the token has a route to follow. None: no token has."""
    experts_SLK: Tensor | None = None
    """Experts to follow, of all transformer layers; read where `known_S` is true."""


def token_routes(
    index_S: IntArray,
    *,
    padding_experts: Callable[[int], IntArray],
    device: torch.device,
    routed_experts_TLK: Tensor | None = None,
    routed_T: Tensor | None = None,
) -> TokenRoutes:
    """What one rank's routers need of one micro-batch; only their own tokens' routes move to `device`.

    Args:
        index_S: `layout.index[router_positions(…)]`.
        padding_experts: number of padding tokens → their experts (`deal_padding`).
        device: of the routers.
        routed_experts_TLK: of the micro-batch's stream; None: nothing is replayed.
        routed_T: whether a token's route is known.
    """
    is_padding_S = index_S < 0
    dealt_SK = None
    if is_padding_S.any():
        dealt_PK = padding_experts(int(is_padding_S.sum()))
        dealt_SK = np.zeros((len(index_S), dealt_PK.shape[1]), np.int64)
        dealt_SK[is_padding_S] = dealt_PK
    known_S = experts_SLK = None
    if routed_experts_TLK is not None:
        assert routed_T is not None
        at_S = torch.from_numpy(np.where(is_padding_S, 0, index_S))
        known_S = (routed_T[at_S] & torch.from_numpy(~is_padding_S)).to(device)
        experts_SLK = routed_experts_TLK[at_S].to(device)
    return TokenRoutes(
        index_S=index_S,
        padding_S=torch.from_numpy(is_padding_S).to(device),
        padding_experts_SK=None if dealt_SK is None else torch.from_numpy(dealt_SK).to(device),
        known_S=known_S,
        experts_SLK=experts_SLK,
    )


class RouterChoices(RouterReplay):
    """The choices of one router."""

    # Not calling the base class: it would join a list of all routers of the process.
    def __init__(self, layer: int):  # pyright: ignore[reportMissingSuperCall]
        self.layer = layer
        """Transformer layer of the whole model, from 0."""
        self.in_schedule = False
        self.keeps_for_backward = False
        self.records = False
        self.current: TokenRoutes | None = None
        """Of the micro-batch whose forward pass is running."""
        self.kept: deque[tuple[TokenRoutes, Tensor]] = deque()
        """Micro-batches that may be computed again in backward, and what was chosen for them."""
        self.recorded: list[Tensor] = []
        """int64 [S, K] of each micro-batch's forward pass."""

    @property
    def routes(self) -> TokenRoutes | None:
        """Of the micro-batch that the router is about to see."""
        if self.current is None and self.in_schedule:
            return self.kept[0][0]
        return self.current

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores [S, K] and experts [S, K] of the choice among scores [S, E]."""
        if not self.in_schedule:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if self.current is None:
            chosen_SK = self.kept.popleft()[1]
        else:
            own_SK = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            chosen_SK = self._choose(self.current, own_SK)
            if self.keeps_for_backward:
                self.kept.append((self.current, chosen_SK))
            if self.records:
                self.recorded.append(chosen_SK)
        return scores.gather(1, chosen_SK), chosen_SK

    def _choose(self, routes: TokenRoutes, own_SK: Tensor) -> Tensor:
        assert len(routes.padding_S) == len(own_SK), f"{len(own_SK)} tokens, routes for {len(routes.padding_S)}"
        chosen_SK = own_SK
        if routes.known_S is not None and routes.experts_SLK is not None:
            given_SK = routes.experts_SLK[:, self.layer].to(own_SK.dtype)
            chosen_SK = torch.where(routes.known_S[:, None], given_SK, chosen_SK)
        if routes.padding_experts_SK is not None:
            chosen_SK = torch.where(routes.padding_S[:, None], routes.padding_experts_SK, chosen_SK)
        return chosen_SK

    def end_schedule(self) -> None:
        """Forgets the micro-batches; what was recorded stays until the next schedule."""
        self.in_schedule = False
        self.current = None
        self.kept.clear()


class ModelRoutes:
    """The routers of one model's chunks on this rank. Other models of the process are not touched.

    Around a pipeline schedule stands `schedule()`, around every forward pass of a chunk in it `micro_batch()`.
    Padding is kept out of the routers' statistics (expert bias, auxiliary losses) wherever the chunk stands.
    """

    def __init__(self, chunks: Sequence[nn.Module], *, recomputes: bool):
        """
        Args:
            chunks: of the model on this rank; none of their routers may be fused.
            recomputes: layers may be computed again in backward.
        """
        self._recomputes = recomputes
        self._by_chunk = {id(chunk): [_attach(router) for router in _routers(chunk)] for chunk in chunks}

    @property
    def layers(self) -> list[int]:
        """Transformer layers of the whole model whose routers are on this rank."""
        return sorted(choices.layer for choices in self._all())

    @contextmanager
    def schedule(self, *, has_backward: bool, records: bool = False) -> Iterator[None]:
        """Around one run of Megatron's schedule; nothing of it is left afterwards but what was recorded."""
        for choices in self._all():
            choices.recorded.clear()
            choices.in_schedule = True
            choices.keeps_for_backward = has_backward and self._recomputes
            choices.records = records
        try:
            yield
        finally:
            for choices in self._all():
                choices.end_schedule()

    @contextmanager
    def micro_batch(self, chunk: nn.Module, routes: TokenRoutes) -> Iterator[None]:
        """Around the forward pass of one micro-batch through `chunk` (as given at the start). Outside of it, in a
        schedule, a router computes again what it computed in the oldest forward pass that is kept."""
        for choices in self._by_chunk[id(chunk)]:
            choices.current = routes
        try:
            yield
        finally:
            for choices in self._by_chunk[id(chunk)]:
                choices.current = None

    def recorded(self, indices: Sequence[IntArray], shape: tuple[int, int, int]) -> Tensor:
        """Routes that were taken in the last schedule that recorded, as far as this rank knows them.

        Args:
            indices: `index_S` of each micro-batch, in order.
            shape: (T, L, K) of the stream.

        Returns:
            int32 [T, L, K] on the CPU; -1 where the token or the layer is another rank's, or has no experts.
        """
        routes_TLK = torch.full(shape, -1, dtype=torch.int32)
        for choices in self._all():
            for index_S, chosen_SK in zip(indices, choices.recorded, strict=True):
                is_real_S = torch.from_numpy(index_S >= 0)
                at_R = torch.from_numpy(index_S)[is_real_S]
                routes_TLK[at_R, choices.layer] = chosen_SK.cpu()[is_real_S].int()
        return routes_TLK

    def _all(self) -> Iterator[RouterChoices]:
        for chunk in self._by_chunk.values():
            yield from chunk


def merge_recorded(routes_TLK: Tensor, groups: Sequence[Any], device: torch.device) -> Tensor:
    """`ModelRoutes.recorded` of all ranks of a model replica: every token, every layer; on every rank.

    Args:
        routes_TLK: of this rank; all have the same stream.
        groups: process groups of the tensor, context and pipeline ranks.
        device: on which the groups communicate.
    """
    merged = routes_TLK.to(device)
    for group in groups:
        dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=group)
    return merged.cpu()


def _routers(chunk: nn.Module) -> list[TopKRouter]:
    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


def _attach(router: TopKRouter) -> RouterChoices:
    assert not router.config.moe_router_fusion, "a fused router chooses by itself"
    assert router.layer_number is not None
    choices = RouterChoices(router.layer_number - 1)
    router.router_replay = choices

    def mask_padding(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        routes = choices.routes
        return None if routes is None else (args[0], routes.padding_S)

    router.register_forward_pre_hook(mask_padding)
    return choices
