"""What trainers and engines share about Hugging Face models: the experts that their routers choose, and silence.

A Mixture-of-Experts block scores all experts, takes the best with `topk`, and goes on with what it took. While a block
runs, this one call can be answered with the scores of given experts. All before and after it stays the model's own code
(softmax or sigmoid, bias, groups, normalisation, scaling), so no router is written anew here and gradients flow through
the scores as they do in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_core.errors import ConfigError
from rl_core.rank_kit.route_checks import RouteShape

_TOPK = (torch.topk, Tensor.topk)


class ExpertChoices:
    """The choices of all routers of one model, in its latest forward. Made by `of`; belongs to that model alone."""

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
        """Finds the model's blocks and stands at their routers from now on.

        Args:
            model: a transformers model, before anything is wrapped around its layers; its device may be `meta`.
            where: configuration key, for messages.

        Raises:
            ConfigError: the model is dense, or its blocks differ.
        """
        blocks: dict[int, _Block] = {}
        for name, module in model.named_modules():
            num_experts = getattr(getattr(module, "experts", None), "num_experts", None)
            top_k = next((k for m in module.modules() if isinstance(k := getattr(m, "top_k", None), int)), None)
            layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
            if num_experts is None or top_k is None or layer is None:
                continue
            if layer in blocks:
                raise ConfigError(f"{where}: layer {layer} of {type(model).__name__} has more than one router")
            blocks[layer] = _Block(num_experts, top_k)
            module.forward = partial(_run, blocks[layer], module.forward)
        if len({(block.num_experts, block.experts_per_token) for block in blocks.values()}) != 1:
            fault = "its layers differ in their numbers of experts" if blocks else "it has no routed experts"
            raise ConfigError(f"{where}: {type(model).__name__} has no routes to follow or return: {fault}")
        return cls(blocks, model.config.get_text_config().num_hidden_layers)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]

    def follow(self, routes_CLK: Tensor | None, routed_C: Tensor | None) -> None:
        """Before a forward of C input cells (rows × positions, row by row): it goes the given ways where they are
        known, and where they are not (`routed` False, or None for all) its own. Recomputation repeats either."""
        for layer, block in self._blocks.items():
            block.given = None if routes_CLK is None else (routes_CLK[:, layer], routed_C)
            block.taken_CK = None

    def taken(self) -> Tensor:
        """[C, L, K], int64: the ways of the latest forward; 0 in layers without experts."""
        taken = {layer: block.taken_CK for layer, block in self._blocks.items()}
        first_CK = next(iter(taken.values()))
        assert first_CK is not None, "there was no forward"
        return torch.stack([taken.get(i, torch.zeros_like(first_CK)) for i in range(self.shape.num_layers)], 1)  # pyright: ignore[reportCallIssue, reportArgumentType]


class _Block:
    """The router of one layer."""

    def __init__(self, num_experts: int, experts_per_token: int):
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.given: tuple[Tensor, Tensor | None] | None = None
        self.taken_CK: Tensor | None = None

    def choose(self, own_CK: Tensor) -> Tensor:
        """Also what a recomputation, in which the router may round otherwise, must choose again."""
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
        # Routers that choose groups first take the best of other axes, too.
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


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every model it reads or writes, across the run's own display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
