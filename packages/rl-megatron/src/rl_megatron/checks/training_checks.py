"""Refuses settings of optimizer, adapters and gradient sums that training here does not support. Imports no torch."""

from __future__ import annotations

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS, require_training_settings
from rl_megatron.checks.lora_targets import bridge_layers
from rl_megatron.options import MegatronOptions, optimizer_fields

_CHOSEN_ELSEWHERE = {
    "lr": "optimizer_config.lr",
    "min_lr": "optimizer_config.scheduler",
    "adam_beta1": "optimizer_config.adam_betas",
    "adam_beta2": "optimizer_config.adam_betas",
    "adam_eps": "optimizer_config.eps",
    "weight_decay": "optimizer_config.weight_decay",
    "clip_grad": "optimizer_config.max_grad_norm",
}
_FIXED = {
    "optimizer": ("adam", "training here uses AdamW"),
    "decoupled_weight_decay": (True, "training here uses AdamW"),
    "use_distributed_optimizer": (True, "the optimizer's state is always split over data-parallel ranks"),
    "overlap_param_gather": (False, "weights must be whole when they are scored, saved or published"),
    "overlap_param_gather_with_optimizer_step": (False, "weights must be whole when they are scored or published"),
    "fp16": (False, "there is no loss scaling here; use trainer.bf16"),
    "loss_scale": (None, "there is no loss scaling here; use trainer.bf16"),
    "optimizer_cpu_offload": (
        False,
        "checkpoints and offloading here support only an optimizer on the ranks' devices. To save memory, split its "
        "state over more data-parallel ranks, or use trainer.strategy=fsdp with fsdp_config.cpu_offload=true",
    ),
    "use_precision_aware_optimizer": (
        False,
        "clipping, checkpoints and offloading here support only float32 parameters and moments. To save memory, split "
        "the optimizer's state over more data-parallel ranks",
    ),
}


def require_trainable(spec: WorkerSpec) -> None:
    """Raises ConfigError for the first setting that training here does not support."""
    section = SECTIONS[spec.role]
    where = f"{section}.megatron_config"
    _require_sums(spec.options, where)
    _require_optimizer_fields(spec.options, where, section)
    require_training_settings(spec, only_adamw="Megatron's distributed optimizer steps pieces of matrices with AdamW")
    if spec.options.freeze_moe_router and spec.model.trainable is not None:
        raise ConfigError(
            f"got true, but {section}.model.trainable decides what is trained; leave one of them out",
            key=f"{where}.freeze_moe_router",
        )
    if spec.model.lora.rank > 0:
        bridge_layers(spec.model.lora, spec.options.lora_config.lora_type, section)


def _require_sums(options: MegatronOptions, where: str) -> None:
    reasons = {
        "overlap_grad_reduce": "gradients accumulate over calls, so no micro-batch is known to be the last",
        "overlap_param_gather": "weights must be whole when they are scored, saved or published",
    }
    for name, reason in reasons.items():
        if getattr(options.ddp_config, name):
            raise ConfigError(f"got true; {reason}: set it to false", key=f"{where}.ddp_config.{name}")


def _require_optimizer_fields(options: MegatronOptions, where: str, section: str) -> None:
    """Refuses every field of `optimizer_config_kwargs` that is not in `_FIXED`, or whose value differs from the value
    there."""
    for name, value in optimizer_fields(options, where).items():
        key = f"{where}.optimizer_config_kwargs.{name}"
        if name in _CHOSEN_ELSEWHERE:
            raise ConfigError(f"this key is not read; set {section}.{_CHOSEN_ELSEWHERE[name]} instead", key=key)
        if name in _FIXED and value != _FIXED[name][0]:
            raise ConfigError(f"got {value!r}, expected {_FIXED[name][0]!r}: {_FIXED[name][1]}", key=key)
        if name not in _FIXED:
            raise ConfigError(f"got {value!r}, but this field cannot be set here; leave it out", key=key)
