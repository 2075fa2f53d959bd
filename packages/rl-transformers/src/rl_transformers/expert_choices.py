"""Recording and replaying the routes of Hugging Face models; used by trainers and engines.

A Mixture-of-Experts block scores all experts, takes the best with `topk`, and continues with the result. While a block
runs, the result of this one call can be replaced with specified experts and their scores. Everything else stays the
model's own code (softmax or sigmoid, bias, groups, normalisation, scaling), so no router is reimplemented and gradients
flow through the scores as they do in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_core.errors import ConfigError
from rl_core.rank_kit.route_checks import RouteShape

_TOPK = (torch.topk, Tensor.topk)


class ExpertChoices:
    """The choices of all routers of one model in its latest forward pass. Created with `of`."""

    def __init__(self, blocks: dict[int, _Block], num_layers: int):
        self._blocks = blocks
        first = next(iter(blocks.values()))
        self.shape = RouteShape(
            num_layers=num_layers,
            layers=tuple(blocks),
            num_experts=first.num_experts,
            experts_per_token=first.experts_per_token,
        )

    @classmethod
    def of(cls, model: nn.Module, *, where: str) -> ExpertChoices:
        """Finds the model's mixture-of-experts blocks, and replaces their `forward` permanently.

        Args:
            model: a transformers model, before anything is wrapped around its layers; its device may be `meta`.
            where: configuration key, for messages.

        Raises:
            ConfigError: the model is dense, a layer has several routers, or layers differ in their numbers of experts.
        """
        blocks: dict[int, _Block] = {}
        for name, module in model.named_modules():
            num_experts = getattr(getattr(module, "experts", None), "num_experts", None)
            top_k = next((k for m in module.modules() if isinstance(k := getattr(m, "top_k", None), int)), None)
            layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
            if num_experts is None or top_k is None or layer is None:
                continue
            if layer in blocks:
                raise ConfigError(f"layer {layer} of {type(model).__name__} has more than one router", key=where)
            blocks[layer] = _Block(num_experts, top_k)
            module.forward = partial(_run, blocks[layer], module.forward)
        if len({(block.num_experts, block.experts_per_token) for block in blocks.values()}) != 1:
            fault = "its layers differ in their numbers of experts" if blocks else "it has no routed experts"
            raise ConfigError(f"{type(model).__name__} has no routes to follow or return: {fault}", key=where)
        return cls(blocks, model.config.get_text_config().num_hidden_layers)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]

    def follow(self, routes_CLK: Tensor | None, routed_C: Tensor | None) -> None:
        """Sets the routes of the next forward pass over C cells (rows × positions, row-major). Cells in which
        `routed_C` is True follow `routes_CLK`; in other cells, the routers choose. If `routes_CLK` is None, the routers
        choose in all cells. Recomputation repeats the routes of the forward pass."""
        for layer, block in self._blocks.items():
            block.given = None if routes_CLK is None else (routes_CLK[:, layer], routed_C)
            block.taken_CK = None

    def taken(self) -> Tensor:
        """[C, L, K], int64: the routes of the latest forward pass; 0 in layers without experts."""
        taken = {layer: block.taken_CK for layer, block in self._blocks.items()}
        first_CK = next(iter(taken.values()))
        assert first_CK is not None, "no forward pass has run"
        return torch.stack([taken.get(i, torch.zeros_like(first_CK)) for i in range(self.shape.num_layers)], 1)  # pyright: ignore[reportCallIssue, reportArgumentType]


class _Block:
    """The router of one layer."""

    def __init__(self, num_experts: int, experts_per_token: int):
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.given: tuple[Tensor, Tensor | None] | None = None
        self.taken_CK: Tensor | None = None

    def choose(self, own_CK: Tensor) -> Tensor:
        """Returns the experts to use. Recomputation gets the experts of the first call, because the router might round
        differently when it is computed again."""
        if self.taken_CK is None:
            self.taken_CK = own_CK
            if self.given is not None:
                routes_CK, routed_C = self.given
                assert routed_C is not None
                self.taken_CK = torch.where(routed_C[:, None], routes_CK.long(), own_CK)
        return self.taken_CK


class _AtTheRouter(TorchFunctionMode):
    def __init__(self, block: _Block):
        super().__init__()
        self.block = block
        self.num_choices = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores_CE, own_CK = args[0], result[1]
        # Routers that first choose groups of experts also call topk on other tensors.
        if scores_CE.dim() != 2 or scores_CE.shape[1] != self.block.num_experts:
            return result
        if own_CK.shape[1] != self.block.experts_per_token:
            return result
        self.num_choices += 1
        chosen_CK = self.block.choose(own_CK)
        return torch.return_types.topk((scores_CE.gather(1, chosen_CK), chosen_CK))


def _run(block: _Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _AtTheRouter(block) as router:
        output = forward(*args, **kwargs)
    if router.num_choices != 1:
        raise ConfigError(
            f"a Mixture-of-Experts block took the {block.experts_per_token} best of {block.num_experts} experts "
            f"{router.num_choices} times, expected once: its routes can be neither followed nor returned"
        )
    return output
