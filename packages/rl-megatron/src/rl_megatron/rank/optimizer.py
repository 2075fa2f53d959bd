"""Sums gradients over all ranks and steps Megatron's distributed optimizer as the `Worker` contract requires."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,  # pyright: ignore[reportPrivateUsage]
    finalize_model_grads,
    reset_model_temporary_tensors,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from rl_core.interfaces import OptimizerConfig, WorkerSpec
from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.options import MegatronOptions, optimizer_fields


def wrap_for_training(chunks: Sequence[Any], options: MegatronOptions) -> list[Any]:
    """Wraps each chunk in Megatron's DDP, which keeps its gradients in contiguous buffers. Gradients are summed over
    data and context ranks, never averaged."""
    config = ddp_config(options)
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def ddp_config(options: MegatronOptions) -> DistributedDataParallelConfig:
    """Returns Megatron's DDP configuration, made from the user's options and the values fixed here."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.ddp_config.grad_reduce_in_fp32,
        pad_buckets_for_high_nccl_busbw=options.ddp_config.pad_buckets_for_high_nccl_busbw,
        overlap_grad_reduce=False,
        use_distributed_optimizer=True,
        average_in_collective=False,
    )


class Optimizer:
    """AdamW whose state is sharded over data-parallel ranks."""

    def __init__(self, chunks: Sequence[Any], spec: WorkerSpec):
        assert spec.optimizer is not None
        self.config: OptimizerConfig = spec.optimizer
        self.chunks = list(chunks)
        fields = {
            "optimizer": "adam",
            "lr": self.config.lr,
            "adam_beta1": self.config.adam_betas[0],
            "adam_beta2": self.config.adam_betas[1],
            "adam_eps": self.config.eps,
            "weight_decay": self.config.weight_decay,
            # `_clip` does the clipping: Megatron clips only in its own `step`, which is not called.
            "clip_grad": 0.0,
            "decoupled_weight_decay": True,
            "use_distributed_optimizer": True,
            "bf16": spec.bf16,
            "params_dtype": torch.bfloat16 if spec.bf16 else torch.float32,
            **optimizer_fields(spec.options, f"{SECTIONS[spec.role]}.megatron_config"),
        }
        # No overrides: weight decay applies to norms and biases too.
        self.megatron: Any = get_megatron_optimizer(MegatronOptimizerConfig(**fields), self.chunks, config_overrides={})
        self._make_states()
        self.zero_grad()

    @property
    def buffers(self) -> list[Any]:
        """Megatron's gradient buffers, of dense and expert parameters."""
        return [buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def state_tensors(self) -> list[Tensor]:
        """Returns the main parameters and the moments of this rank's shards."""
        optimizers = self._optimizers()
        found = [parameter for opt in optimizers for group in opt.param_groups for parameter in group["params"]]
        states = [state for opt in optimizers for state in opt.state.values()]
        return found + [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers that Megatron steps: torch's AdamW, or FusedAdam if Transformer Engine or Apex is
        installed. A rank may have no optimizer for its experts, or none for its other parameters."""
        return [chained.optimizer for chained in self.megatron.chained_optimizers if chained.optimizer is not None]

    def _make_states(self) -> None:
        """Creates the moments now instead of in the first step, so that a state that is saved or loaded before the
        first step has them too."""
        for chained in self.megatron.chained_optimizers:
            if chained.optimizer is not None:
                chained.init_state_fn(chained.optimizer, chained.config)
        for optimizer in self._optimizers():
            if isinstance(optimizer, torch.optim.AdamW) and not optimizer.state:
                # Megatron 0.16.1 saves the number of steps that it finds in the state of a parameter
                # (`DistributedOptimizer.state_dict`), and raises on a rank whose parameters are all frozen.
                cast(Any, optimizer).state["no parameter"] = {}
        self.set_steps(0)

    def set_steps(self, steps_done: int) -> None:
        """Sets the number of steps that the moments have accumulated.

        torch's AdamW keeps a step tensor per parameter. Each parameter gets its own tensor here, because Megatron loads
        one tensor that all parameters share, and a step would increment it once per parameter. FusedAdam keeps one
        number per parameter group.
        """
        for optimizer in self._optimizers():
            if isinstance(optimizer, torch.optim.AdamW):
                for state in optimizer.state.values():
                    state["step"] = torch.tensor(float(steps_done))
            else:
                for group in optimizer.param_groups:
                    group["step"] = steps_done

    def step(self, settings: StepSettings) -> float:
        """Sums the gradients over the ranks, scales and clips them, takes a step and clears them; returns the gradient
        norm before clipping.

        If the norm is not finite, the gradients are cleared without a step.
        """
        with self._expert_bias_kept() as model_config:
            finalize_model_grads(self.chunks, None)
        if settings.gradient_scale != 1.0:
            for buffer in self.buffers:
                buffer.grad_data.mul_(settings.gradient_scale)
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if math.isfinite(grad_norm):
            settings.put_into(self.megatron.param_groups)
            self._clip(grad_norm, settings.max_grad_norm)
            self.megatron.step_with_ready_grads()
            if model_config.moe_router_enable_expert_bias:
                _update_router_expert_bias(self.chunks, model_config)
        reset_model_temporary_tensors(model_config, self.chunks)
        self.zero_grad()
        return grad_norm

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @contextmanager
    def whole_gradients(self):
        """Within the context, every rank's main gradients are the sums over all ranks; afterwards they have their
        previous values again."""
        kept = [buffer.grad_data.clone() for buffer in self.buffers]
        try:
            with self._expert_bias_kept():
                finalize_model_grads(self.chunks, None, force_all_reduce=True)
            yield
        finally:
            for buffer, gradient in zip(self.buffers, kept, strict=True):
                buffer.grad_data.copy_(gradient)

    @contextmanager
    def _expert_bias_kept(self) -> Iterator[Any]:
        """Within the context, `finalize_model_grads` neither updates the bias of experts, which a skipped step must not
        change, nor clears the load that the update reads. Yields the model's configuration."""
        model_config = self.chunks[0].config
        updates_bias = model_config.moe_router_enable_expert_bias
        model_config.moe_router_enable_expert_bias = False
        try:
            yield model_config
        finally:
            model_config.moe_router_enable_expert_bias = updates_bias

    def _clip(self, grad_norm: float, max_norm: float) -> None:
        if max_norm <= 0:
            return
        for optimizer in self.megatron.chained_optimizers:
            if not optimizer.is_stub_optimizer and (parameters := optimizer.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
