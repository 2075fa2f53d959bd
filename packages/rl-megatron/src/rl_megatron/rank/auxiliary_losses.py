"""Gives the auxiliary losses of a mixture of experts (load balancing, z-loss) their weight relative to the policy loss,
and reports them.

An auxiliary loss is a statistic of a micro-batch, so it depends on how a mini-batch is split into micro-batches.
Megatron multiplies the loss of each micro-batch by its number of tokens and expects a later division by the number of
all tokens. There is no later division here, so `weighted` divides at once. The result is the gradient of Σ (tokens ·
loss) over the micro-batches, divided by the number of tokens in the call of `forward_backward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
)

from rl_core.interfaces import Metrics
from rl_megatron.place import Place

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of load-balancing loss → the name under which Megatron records it."""


class AuxiliaryLosses:
    """The auxiliary losses of one model's routers, during one call of `forward_backward`."""

    def __init__(self, config: Any, place: Place):
        self._place = place
        self._names = _recorded_names(config) if config.num_moe_experts else []
        self._is_on = bool(self._names)
        self._per_layer: bool = config.moe_per_layer_logging
        self._num_layers: int = config.num_layers
        self._layers = _layers_with_experts(config) if self._is_on else []

    @contextmanager
    def weighted(self, num_tokens: int) -> Iterator[None]:
        """Within the context, gradients of the auxiliary losses are divided by the number of tokens on all
        data-parallel ranks.

        Args:
            num_tokens: number of tokens in this rank's part of the call's batch.
        """
        if not self._is_on:
            yield
            return
        total = torch.tensor(float(num_tokens), device=self._place.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        set_scale = MoEAuxLossAutoScaler.set_loss_scale
        MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda scale: set_scale(scale / total))
        clear_aux_losses_tracker()
        try:
            yield
        finally:
            MoEAuxLossAutoScaler.set_loss_scale = staticmethod(set_scale)

    def metrics(self, num_micro_batches: int) -> Metrics:
        """Returns each loss averaged over the call's micro-batches: as a mean over the layers with experts and, if
        `moe_per_layer_logging` is set, also per layer.

        All ranks must call this method. An empty micro-batch has a loss of 0 in the average.
        """
        if not self._is_on:
            return {}
        records = get_moe_layer_wise_logging_tracker()
        for name in self._names:
            # A stage without experts records nothing, but the other stages wait for it in the sums.
            records.setdefault(name, {"values": torch.zeros(self._num_layers, device=self._place.device), **_sum(name)})
        reduce_aux_losses_tracker_across_ranks(self._names)
        found = {}
        for name in self._names:
            values_L = (records[name]["values"] / num_micro_batches).tolist()
            found[f"moe_{name}"] = (sum(values_L[layer] for layer in self._layers), float(len(self._layers)))
            if self._per_layer:
                found |= {f"moe_{name}_layer_{layer}": (values_L[layer], 1.0) for layer in self._layers}
        return found


def _recorded_names(config: Any) -> list[str]:
    """Returns the names of the losses that the routers of this model record."""
    given = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds, coefficients = (value if isinstance(value, list | tuple) else [value] for value in given)
    weighted = [kind for kind, coefficient in zip(kinds, coefficients, strict=True) if kind in _NAMES and coefficient]
    return (["z_loss"] if config.moe_z_loss_coeff else []) + [_NAMES[kind] for kind in weighted]


def _sum(name: str) -> dict[str, Any]:
    """Returns the fields in which Megatron records the group of ranks over which the routers sum a loss."""
    group = None
    if name == "global_load_balancing_loss":
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    elif name != "z_loss":
        group = parallel_state.get_tensor_and_context_parallel_group()
    return {"reduce_group": group, "avg_group": None, "reduce_group_has_dp": name == "global_load_balancing_loss"}


def _layers_with_experts(config: Any) -> list[int]:
    """Indices (from 0, in the whole model) of the layers with experts."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return list(range(0, config.num_layers, frequency))
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]
