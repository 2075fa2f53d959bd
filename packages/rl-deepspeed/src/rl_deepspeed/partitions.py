"""Finds this rank's part of each parameter, of its float32 copy and of its moments, and assembles whole gradients.

Most of what this module uses is not public API of DeepSpeed; the attributes are those of version 0.19.8.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@attrs.frozen(eq=False)
class ZeroPart:
    """A contiguous range of a parameter's elements; may be empty."""

    start: int
    """Index of the first element in the parameter."""
    weights: Tensor
    """The range in the optimizer's float32 copy if the parameter is trained, else in the parameter itself."""
    moments: dict[str, Tensor]
    """Moment → its range; the keys are `MOMENTS`. Empty for an untrained parameter, or if moments were not asked
    for."""


class Partitions(Protocol):
    """How one ZeRO stage partitions a model."""

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> ZeroPart:
        """Returns this rank's part of `weight`; moments only with `with_optimizer`."""
        ...

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Returns the full float32 gradient; call before the optimizer step. Collective."""
        ...

    def clear(self) -> None:
        """Clears all gradients."""
        ...

    def push(self) -> None:
        """Copies the optimizer's float32 weights into the parameters used for computation. Collective."""
        ...

    def move(self, device: torch.device) -> None:
        """Moves the parameters of an untrained model to `device`."""
        ...


class WholeParameters:
    """An untrained model, which is whole on every rank."""

    def __init__(self, scorer: nn.Module):
        self._scorer = scorer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> ZeroPart:
        """Returns the whole parameter; all ranks hold it."""
        return ZeroPart(0, weight.data.view(-1), {})

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Returns zeros: there is no gradient."""
        return torch.zeros(weight.shape)

    def clear(self) -> None:
        """Does nothing: there are no gradients."""

    def push(self) -> None:
        """Does nothing: parameters have no copy."""

    def move(self, device: torch.device) -> None:
        """Moves the whole model."""
        self._scorer.to(device)


class FlatPartitions:
    """Stages 1 and 2: all trained parameters concatenated and split into one equal partition per rank."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._zero = engine.optimizer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> ZeroPart:
        """Returns the range of the parameter that lies in this rank's partition; it may be empty."""
        mapping = self._mapping(weight)
        if mapping is None:
            nothing = self._zero.single_partition_of_fp32_groups[0].data[:0]
            return ZeroPart(0, nothing, dict.fromkeys(MOMENTS, nothing) if with_optimizer else {})
        at = mapping.hp_fragment_address
        flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
        moments = {}
        if with_optimizer:
            state = moments_of(self._zero.optimizer, flat)
            moments = {kind: state[kind].narrow(0, at.start, at.numel) for kind in MOMENTS}
        return ZeroPart(mapping.lp_fragment_address.start, flat.data.narrow(0, at.start, at.numel), moments)

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Returns the full gradient. With stage 1, this method reduces the gradients over the ranks, because DeepSpeed
        does so only in the step. With stage 2, it puts together the parts that DeepSpeed has already reduced."""
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
        """Clears the parameters' `.grad` and DeepSpeed's own accumulation buffers."""
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
        """Never called: untrained models use `WholeParameters`."""
        raise AssertionError("FlatPartitions.move: untrained models use WholeParameters")

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
    """Stage 3: each parameter is cut into equal parts, one per rank; the last parts are padded."""

    def __init__(self, engine: Any):
        self._module: nn.Module = engine.module
        self._zero = engine.optimizer

    def part(self, weight: nn.Parameter, *, with_optimizer: bool) -> ZeroPart:
        """Returns the part of the float32 copy if the parameter is trained, else of the parameter."""
        size = int(weight.ds_tensor.ds_numel)  # pyright: ignore[reportAttributeAccessIssue]
        start = min(size * dist.get_rank(), self._numel(weight))
        count = min(size, self._numel(weight) - start)
        if not self._is_trained(weight):
            return ZeroPart(start, weight.ds_tensor.data.view(-1).narrow(0, 0, count), {})  # pyright: ignore[reportAttributeAccessIssue]
        group, at, _ = self._zero.grad_position[self._zero.get_param_id(weight)]
        flat = self._zero.fp32_partitioned_groups_flat[group]
        moments = {}
        if with_optimizer:
            state = moments_of(self._zero.optimizer, flat)
            moments = {kind: state[kind].narrow(0, at, count) for kind in MOMENTS}
        return ZeroPart(start, flat.data.narrow(0, at, count), moments)

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """Returns the full gradient, put together from the parts of all ranks."""
        own = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[weight.ds_id]  # pyright: ignore[reportAttributeAccessIssue]
        total = torch.zeros(own.numel() * dist.get_world_size())
        total.narrow(0, own.numel() * dist.get_rank(), own.numel()).copy_(own)
        dist.all_reduce(total)
        return total[: self._numel(weight)].view(weight.ds_shape)  # pyright: ignore[reportAttributeAccessIssue]

    def clear(self) -> None:
        """Clears only the parameters' `.grad`: the next backward overwrites the accumulated gradients."""
        self._zero.zero_grad()

    def move(self, device: torch.device) -> None:
        """Moves this rank's part of every parameter."""
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
    """Returns AdamW's state of a partition. Creates it if it is missing, with the zeros that AdamW would create in its
    first step."""
    moments = optimizer.state[flat]
    if not moments:
        moments["step"] = torch.zeros((), device=flat.device)
        moments.update({kind: torch.zeros_like(flat).detach() for kind in MOMENTS})
    return moments
