"""What a `WorkerSpec` says in the words of the configuration, for the messages of training backends. No torch."""

from __future__ import annotations

from typing import TypeVar

from rl_core.errors import ConfigError, WorkerError
from rl_core.interfaces import Role, WorkerSpec

T = TypeVar("T")
SECTIONS: dict[Role, str] = {"policy": "trainer.policy", "reference": "trainer.ref", "critic": "trainer.critic"}
"""Where each role's configuration stands."""


def require_model_path(spec: WorkerSpec) -> str:
    """The model's directory or name. Raises ConfigError without one."""
    if spec.model.path is None:
        raise ConfigError(
            f"{SECTIONS[spec.role]}.model.path: no model was given; expected a Hugging Face model directory or name"
        )
    return spec.model.path


def require_optimizer(optimizer: T | None, spec: WorkerSpec, call: str) -> T:
    """The optimizer of a model that is trained. Raises WorkerError where `call` came to one that is not."""
    if optimizer is None:
        raise WorkerError(f"{spec.role}: {call} needs an optimizer, and this model was started without one")
    return optimizer
