"""The configuration keys of a `WorkerSpec`, for error messages, and checks of the spec. The module imports no torch."""

from __future__ import annotations

from typing import TypeVar

from rl_core.errors import ConfigError, WorkerError
from rl_core.interfaces import LoraConfig, Role, WorkerSpec
from rl_core.rank_kit.learning_rates import require_schedule
from rl_core.rank_kit.trained_parameters import require_expressions

T = TypeVar("T")
SECTIONS: dict[Role, str] = {"policy": "trainer.policy", "reference": "trainer.ref", "critic": "trainer.critic"}
"""Role → its section of the configuration."""
LORA_INIT_METHODS = ("kaiming", "gaussian")
"""Initialisations that do not change the model's own weights."""


def require_model_path(spec: WorkerSpec) -> str:
    """Returns the model's directory or name. Raises ConfigError if the spec has none."""
    if spec.model.path is None:
        raise ConfigError(
            "got no model; expected a Hugging Face model directory or name", key=f"{SECTIONS[spec.role]}.model.path"
        )
    return spec.model.path


def require_training_settings(spec: WorkerSpec, *, only_adamw: str = "") -> None:
    """Raises ConfigError for adapters, a chunk size or a schedule that no backend can train with.

    Args:
        spec: the model and how it is trained.
        only_adamw: why the backend has no other optimizer; empty if it has all (`rank_kit.optimizers`).
    """
    section = SECTIONS[spec.role]
    if spec.model.trainable is not None:
        require_expressions(spec.model.trainable, f"{section}.model.trainable")
    if spec.model.lora.rank > 0:
        _require_lora(spec.model.lora, f"{section}.model.lora")
        if spec.model.trainable is not None:
            raise ConfigError(
                f"with adapters (lora.rank={spec.model.lora.rank}), the model's own parameters are frozen; leave it "
                "out, or set lora.rank=0",
                key=f"{section}.model.trainable",
            )
    if spec.logprobs_chunk_size < 1:
        raise ConfigError(
            f"expected at least 1 token, got {spec.logprobs_chunk_size}", key="trainer.logprobs_chunk_size"
        )
    if spec.optimizer is not None:
        require_schedule(spec.optimizer, spec.total_optimizer_steps, f"{section}.optimizer_config")
        if only_adamw and spec.optimizer.name != "adamw":
            raise ConfigError(
                f"got {spec.optimizer.name!r}, but {only_adamw}; set it to adamw, or train with trainer.strategy=fsdp",
                key=f"{section}.optimizer_config.name",
            )


def _require_lora(lora: LoraConfig, where: str) -> None:
    if lora.dropout > 0:
        raise ConfigError(
            f"got {lora.dropout}; log-probs would differ from the engine's, and results would depend on how the batch "
            "is split: set it to 0",
            key=f"{where}.dropout",
        )
    if lora.init_method not in LORA_INIT_METHODS:
        raise ConfigError(
            f"got {lora.init_method!r}; expected {' or '.join(LORA_INIT_METHODS)}, which leave the model's own weights "
            "unchanged",
            key=f"{where}.init_method",
        )
    if lora.alpha <= 0:
        raise ConfigError(f"expected above 0, got {lora.alpha}; with 0, adapters have no effect", key=f"{where}.alpha")


def require_optimizer(optimizer: T | None, spec: WorkerSpec, call: str) -> T:
    """Returns `optimizer`. Raises WorkerError if it is None, because `call` was made on a model that is not trained."""
    if optimizer is None:
        raise WorkerError(f"{spec.role}: {call} needs an optimizer, but this model was started without one")
    return optimizer
