"""A stand-in for Transformer Engine's FusedAdam, which runs on GPUs only.

It behaves like FusedAdam towards Megatron and the worker: it is not a `torch.optim.AdamW`; the first step creates
the moments if they are missing; the number of steps is in the parameter group, and is not counted in a group without
parameters; loading a state copies it into new memory.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW in float32, with the interface of Transformer Engine's FusedAdam."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adam_w_mode: bool
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, state in state_dict["state"].items():
            parameter = [parameter for group in self.param_groups for parameter in group["params"]][number]
            self.state[parameter] = {name: value.float().clone() for name, value in state.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert self.adam_w_mode
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        scale = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, scale, value=-group["lr"])
