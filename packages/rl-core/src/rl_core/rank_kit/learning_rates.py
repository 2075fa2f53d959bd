"""The learning rate of each optimizer step, and checks of the schedule."""

from __future__ import annotations

import math

from rl_core.errors import ConfigError
from rl_core.interfaces import OptimizerConfig


def require_schedule(config: OptimizerConfig, total_steps: int | None, where: str) -> None:
    """Raises ConfigError if `learning_rate` cannot compute the schedule.

    Args:
        config: the optimizer's configuration, with warm-up and the shape of the schedule.
        total_steps: optimizer steps of the run; None: unknown.
        where: the section's key, for the message.
    """
    if config.num_warmup_steps < 0:
        raise ConfigError(f"expected 0 or more, got {config.num_warmup_steps}", key=f"{where}.num_warmup_steps")
    if config.scheduler != "constant_with_warmup" and total_steps is None:
        raise ConfigError(
            f"{config.scheduler!r} needs the length of the run; use constant_with_warmup", key=f"{where}.scheduler"
        )


def learning_rate(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up over W steps: lr · (step + 1) / W, so the first step already has a rate above 0 and step W − 1 has the full
    rate. Afterwards, with x = (step − W) / (total − W): constant lr; linear lr · (1 − x); cosine lr · (1 + cos πx) / 2.
    Linear and cosine reach 0 right after the last step. A run of W steps or fewer ends during warm-up.

    Args:
        step: >= 0; skipped steps do not count.
        config: the optimizer's configuration, with the peak rate, warm-up and the shape of the schedule.
        total_steps: optimizer steps of the run; None only for the constant shape.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.scheduler == "constant_with_warmup":
        return config.lr
    assert total_steps is not None
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.scheduler == "linear":
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
