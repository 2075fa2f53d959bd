"""Builds DeepSpeed's own configuration from a `WorkerSpec`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec

_DECIDED = {
    "train_batch_size": "set by trainer.train_batch_size and the mini-batch sizes",
    "train_micro_batch_size_per_gpu": "set by trainer.max_tokens_per_microbatch or micro_train_batch_size_per_gpu",
    "gradient_accumulation_steps": "the number of micro-batches in a mini-batch depends on the data",
    "managed_gradient_accumulation": "the number of micro-batches in a mini-batch depends on the data",
    "gradient_clipping": "set by optimizer_config.max_grad_norm",
    "optimizer": "set by optimizer_config",
    "scheduler": "set by optimizer_config.scheduler",
    "bf16": "set by trainer.bf16",
    "fp16": "set by trainer.bf16; training in float16 is not supported",
    "torch_autocast": "set by trainer.bf16",
    "data_types": "gradients are always summed over micro-batches in float32",
    "activation_checkpointing": "set by trainer.gradient_checkpointing",
    "sequence_parallel_size": "set by deepspeed_config.sequence_parallel_size",
}
"""DeepSpeed keys that users cannot set, each with the reason."""


def engine_config(spec: WorkerSpec) -> dict[str, Any]:
    """Returns DeepSpeed's configuration for one model."""
    zero = spec.options.zero_optimization
    config: dict[str, Any] = {
        # DeepSpeed gets no real batch size, because the worker decides when to step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": _zero_config(spec),
    }
    if spec.bf16:
        config["bf16"] = {"enabled": True}
        if spec.optimizer is not None:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            # Without this key, DeepSpeed sums over the ranks in bfloat16.
            config["communication_data_type"] = "fp32"
            # With stage 1 and float32 sums DeepSpeed uses another optimizer class, which cannot offload. Stage 2
            # computes the same numbers with less memory.
            config["zero_optimization"]["stage"] = max(2, zero.stage)
    return _merged(config, spec.options.extra)


def _zero_config(spec: WorkerSpec) -> dict[str, Any]:
    zero = attrs.asdict(spec.options.zero_optimization)
    if zero["overlap_comm"] is None:
        zero["overlap_comm"] = zero["stage"] != 1 and spec.optimizer is not None
    for name in ("offload_param", "offload_optimizer"):
        if zero[name]["device"] == "none":
            del zero[name]
    if spec.optimizer is None:
        zero.pop("offload_optimizer", None)
    return zero


def require_free_keys(extra: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if `extra` has a key that users cannot set, or that belongs in another section."""
    for name, reason in _DECIDED.items():
        if name in extra:
            raise ConfigError(f"{reason}; leave it out here", key=f"{where}.{name}")
    own = {field.name for field in attrs.fields(_zero_class())}
    of_zero = extra.get("zero_optimization", {})
    if not isinstance(of_zero, Mapping):
        raise ConfigError(f"got {of_zero!r}; expected keys with their values", key=f"{where}.zero_optimization")
    for name in of_zero:
        if name in own:
            raise ConfigError(
                f"set deepspeed_config.zero_optimization.{name} instead", key=f"{where}.zero_optimization.{name}"
            )
        if name == "zero_hpz_partition_size":
            raise ConfigError(
                "not supported, because the ranks would not update the second copy of the parameters when they load "
                "weights; leave it out",
                key=f"{where}.zero_optimization.{name}",
            )


def _zero_class() -> type:
    from rl_deepspeed.options import ZeroOptimization

    return ZeroOptimization


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_merged_items(base, more))


def _merged_items(base: Mapping[str, Any], more: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in {**base, **more}:
        below = base.get(name), more.get(name)
        if all(isinstance(value, Mapping) for value in below):
            yield name, _merged(below[0], below[1])  # pyright: ignore[reportArgumentType]
        else:
            yield name, more[name] if name in more else base[name]
