"""Which part of each parameter, of its float32 copy, its moments and its gradient lies on this rank.

DeepSpeed has no public name for most of this; what is read here is that of 0.19.8.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@attrs.frozen(eq=False)
class Part:
    """A run of one parameter's elements; both may have none."""

    start: int
    """In the parameter."""
    weights: Tensor
    """float32 where it is trained; what the optimizer steps."""
    moments: dict[str, Tensor]
    """By `MOMENTS`; empty where there is no optimizer."""


class Partitions(Protocol):
    """How one stage divides a model."""

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> Part:
        """What lies on this rank."""
        ...

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Whole, float32, before the step that would use it. Collective."""
        ...

    def clear(self) -> None:
        """There is no gradient any more."""
        ...

    def push(self) -> None:
        """The parameters that are computed with become those that the optimizer steps. Collective."""
        ...

    def move(self, device: torch.device) -> None:
        """Of a model that is not trained: its parameters to `device`."""
        ...


class WholeParameters:
    """A model that is not trained, whole on every rank."""

    def __init__(self, scorer: nn.Module):
        self._scorer = scorer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> Part:
        """All of it; ranks hold the same."""
        return Part(0, weight.data.view(-1), {})

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """There is none."""
        return torch.zeros(weight.shape)

    def clear(self) -> None:
        """There is none."""

    def push(self) -> None:
        """They are the same tensors."""

    def move(self, device: torch.device) -> None:
        """All."""
        self._scorer.to(device)


class FlatPartitions:
    """Stages 1 and 2: all parameters end to end, cut into one even partition for each rank."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._zero = engine.optimizer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> Part:
        """The overlap with this rank's partition."""
        mapping = self._mapping(weight)
        if mapping is None:
            nothing = self._zero.single_partition_of_fp32_groups[0].data[:0]
            return Part(0, nothing, dict.fromkeys(MOMENTS, nothing) if with_optimizer else {})
        at = mapping.hp_fragment_address
        flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
        moments = {}
        if with_optimizer:
            state = moments_of(self._zero.optimizer, flat)
            moments = {kind: state[kind].narrow(0, at.start, at.numel) for kind in MOMENTS}
        return Part(mapping.lp_fragment_address.start, flat.data.narrow(0, at.start, at.numel), moments)

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Stage 1 keeps each rank's own sum until the step; stage 2 has summed the rank's part."""
        if not self._engine.zero_optimization_partition_gradients():
            total = torch.zeros_like(weight, dtype=torch.float32)
            if weight.grad is not None:
                total.copy_(weight.grad)
            dist.all_reduce(total)
            return total / dist.get_world_size()
        total, mapping = torch.zeros(weight.numel(), device=weight.device), self._mapping(weight)
        if mapping is not None:
            at, to = mapping.hp_fragment_address, mapping.lp_fragment_address
            own = self._own_gradient(weight, mapping.param_group_index, at.start, at.numel)
            total.narrow(0, to.start, to.numel).copy_(own)
        dist.all_reduce(total)
        return total.view(weight.shape)

    def clear(self) -> None:
        """Also what DeepSpeed adds up outside of the parameters' own gradients."""
        zero = self._zero
        zero.zero_grad()
        zero._release_preflattened_grad_buffers()
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()

    def push(self) -> None:
        """See `Partitions`."""
        self._zero.update_lp_params()

    def move(self, device: torch.device) -> None:
        """These stages have no engine for a model that is not trained."""
        raise AssertionError("a model that is not trained is whole")

    def _mapping(self, weight: nn.Parameter) -> Any:
        return getattr(weight, "_hp_mapping", None)

    def _own_gradient(self, weight: nn.Parameter, group: int, start: int, numel: int) -> Tensor:
        zero = self._zero
        if zero._use_compact_grad_partition_buffer(group):
            return zero._get_compact_grad_partition_buffer(group).flat_partition.narrow(0, start, numel)
        if zero.cpu_offload:
            _, source, _, count = zero.grad_position[zero.get_param_id(weight)]
            return zero.accumulated_grads_in_cpu[zero.get_param_id(weight)].view(-1).narrow(0, source, count)
        flat = zero.get_flat_partition(
            zero.params_in_partition[group],
            zero.first_offset[group],
            zero.partition_size[group],
            dtype=torch.float32,
            device=weight.device,
            param_group_idx=group,
        )
        return flat.narrow(0, start, numel)


class EvenPartitions:
    """Stage 3: each parameter is cut into one even part for each rank, the last ones padded."""

    def __init__(self, engine: Any):
        self._module: nn.Module = engine.module
        self._zero = engine.optimizer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> Part:
        """Of the float32 copy where it is trained, else of the parameter."""
        size = int(weight.ds_tensor.ds_numel)  # pyright: ignore[reportAttributeAccessIssue]
        start = min(size * dist.get_rank(), self._numel(weight))
        count = min(size, self._numel(weight) - start)
        if not self._is_trained(weight):
            return Part(start, weight.ds_tensor.data.view(-1).narrow(0, 0, count), {})  # pyright: ignore[reportAttributeAccessIssue]
        group, at, _ = self._zero.grad_position[self._zero.get_param_id(weight)]
        flat = self._zero.fp32_partitioned_groups_flat[group]
        moments = {}
        if with_optimizer:
            state = moments_of(self._zero.optimizer, flat)
            moments = {kind: state[kind].narrow(0, at, count) for kind in MOMENTS}
        return Part(start, flat.data.narrow(0, at, count), moments)

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Put together of all ranks' parts."""
        own = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[weight.ds_id]  # pyright: ignore[reportAttributeAccessIssue]
        total = torch.zeros(own.numel() * dist.get_world_size())
        total.narrow(0, own.numel() * dist.get_rank(), own.numel()).copy_(own)
        dist.all_reduce(total)
        return total[: self._numel(weight)].view(weight.ds_shape)  # pyright: ignore[reportAttributeAccessIssue]

    def clear(self) -> None:
        """The next backward overwrites what was added up."""
        self._zero.zero_grad()

    def move(self, device: torch.device) -> None:
        """The parts of all parameters."""
        self._zero.empty_partition_cache()
        for weight in self._module.parameters():
            part = weight.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
            part.data = part.data.to(device)

    def push(self) -> None:
        """See `Partitions`."""
        zero = self._zero
        zero.empty_partition_cache()
        if not hasattr(zero, "fp16_groups"):
            return
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _is_trained(self, weight: nn.Parameter) -> bool:
        return weight.requires_grad and hasattr(self._zero, "fp16_groups")

    def _numel(self, weight: nn.Parameter) -> int:
        return int(weight.ds_numel)  # pyright: ignore[reportAttributeAccessIssue]


def moments_of(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps for a partition: made in its first step, as zeros; here it is made if it is missing."""
    moments = optimizer.state[flat]
    if not moments:
        moments["step"] = torch.zeros((), device=flat.device)
        moments.update({kind: torch.zeros_like(flat).detach() for kind in MOMENTS})
    return moments
