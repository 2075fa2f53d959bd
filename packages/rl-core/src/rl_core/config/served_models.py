"""Models besides the policy that environments query on the run's own engines, for example as a judge.

In the options of an environment, `url: inference_engine` is replaced by a `ServedModel`. The option `model` selects it:
`base` (the policy's model without its adapter), or the directory of another adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core import plugins
from rl_core.config.specs import engine_spec
from rl_core.config.tree import Config
from rl_core.errors import ConfigError
from rl_core.interfaces import ModelServing, ServedModel

_ENGINE, _BASE = "inference_engine", "base"
_PLACE = "environment.options"


def asked_models(options: Mapping[str, Any]) -> dict[str, Path | None]:
    """Place of the options that ask for a model → the directory of the model's adapter; None for the base model.

    Args:
        options: `environment.options`; a section with an environment's name holds this environment's options.

    Raises:
        ConfigError: `model` is missing, or not text.
    """
    sections = {f"{_PLACE}.{name}": section for name, section in options.items() if isinstance(section, Mapping)}
    asked: dict[str, Path | None] = {}
    for place, section in {_PLACE: options, **sections}.items():
        if section.get("url") != _ENGINE:
            continue
        model = section.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(
                f"{place}.model: got {model!r} with url={_ENGINE}; set it to {_BASE} for the policy's model without "
                "its adapter, or to the directory of another adapter"
            )
        asked[place] = None if model == _BASE else Path(model)
    return asked


def with_served_models(options: Mapping[str, Any], served: Mapping[str, ServedModel]) -> dict[str, Any]:
    """Returns the options with each served model as the `url` at the place that `asked_models` named."""
    given = {
        name: {**section, "url": served[place]} if (place := f"{_PLACE}.{name}") in served else section
        for name, section in options.items()
    }
    return {**given, "url": served[_PLACE]} if _PLACE in served else given


def serving_plugin(config: Config) -> ModelServing:
    """Returns the engine plug-in. Raises ConfigError if it cannot serve models besides the policy, PluginError if it is
    not installed."""
    name = config.generator.inference_engine.backend
    plugin = plugins.load("rl_core.inference", name, key="generator.inference_engine.backend")
    if isinstance(plugin, ModelServing):
        return plugin
    raise ConfigError(
        f"{next(iter(asked_models(config.environment.options)))}.url: got {_ENGINE}, but the engine {name!r} serves "
        "only the policy; set generator.inference_engine.backend=vllm, or give the URL of another server"
    )


def require_servable_models(config: Config) -> None:
    """Raises ConfigError if the run's engine cannot serve a model that the environments' options ask for."""
    asked = asked_models(config.environment.options)
    if not asked:
        return
    plugin, (_, spec) = serving_plugin(config), engine_spec(config)
    for place, adapter in asked.items():
        try:
            plugin.require_servable(spec, adapter)
        except ConfigError as error:
            raise ConfigError(f"{place}.model: got {str(adapter or _BASE)!r} with url={_ENGINE}: {error}") from error
