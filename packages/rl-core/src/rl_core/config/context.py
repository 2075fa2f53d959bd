"""The maximum number of tokens of a sequence: the model's context, or the engine's if that is smaller. If the model is
not a local directory, its configuration is looked for in the hub's cache."""

from __future__ import annotations

from collections.abc import Mapping

from rl_core.config.resolving import value_at
from rl_core.config.tree import Config
from rl_core.errors import ConfigError
from rl_core.rank_kit.shipped_configs import known_config

TRAINING, EVALUATION = "generator.sampling_params", "generator.eval_sampling_params"
"""Configuration sections with the maximum response length."""


def context_of(config: Config) -> tuple[int, str] | None:
    """The model's maximum context (prompt and response together) and the setting that limits it. None if it is unknown,
    for example because the model has not been downloaded or created yet.

    Raises ConfigError if the model's configuration cannot be read.
    """
    limits: list[tuple[int, str]] = []
    given = config.generator.inference_engine.engine_init_kwargs.get("max_model_len")
    if isinstance(given, int) and given > 0:
        limits.append((given, "generator.inference_engine.engine_init_kwargs.max_model_len"))
    model = known_config(config.policy_model_path) or {}
    for section in (model, model.get("text_config")):
        positions = section.get("max_position_embeddings") if isinstance(section, Mapping) else None
        if isinstance(positions, int) and positions > 0:
            limits.append((positions, f"max_position_embeddings of {config.policy_model_path}"))
    return min(limits, default=None)


def require_room_for_responses(config: Config, sampling: str) -> None:
    """Checks that a response of maximum length fits into the context after a prompt of one token.

    Args:
        sampling: `TRAINING` or `EVALUATION`, the section with the maximum response length.

    Raises ConfigError if it does not fit, or if the model's configuration cannot be read.
    """
    context, key = context_of(config), f"{sampling}.max_generate_length"
    response = value_at(config, key)
    if context is not None and response is not None and response >= context[0]:
        raise ConfigError(
            f"got {response}, but the model takes {context[0]} tokens, including the prompt ({context[1]}); set it to "
            f"at most {context[0] - 1}",
            key=key,
        )
