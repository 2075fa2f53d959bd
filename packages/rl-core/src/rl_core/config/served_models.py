"""Models that the run's own engines serve to environments, as judges for example.

In the options of an environment, `url: inference_engine` becomes a `ServedModel`. The option `model` says which one:
`base` (the policy's model without its adapter), or the directory of another adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.config.specs import engine_spec
from rl_core.config.tree import Config
from rl_core.errors import ConfigError
from rl_core.interfaces import ServedModel

_ENGINE, _BASE = "inference_engine", "base"
_PLACE = "environment.options"


def asked_models(options: Mapping[str, Any]) -> dict[str, Path | None]:
    """Key path of each section that requests a model → the directory of an adapter, or None for the base model.

    Args:
        options: `environment.options`; a section named after an environment contains the options of this environment.

    Raises:
        ConfigError: `model` is missing, or not text; or `key_variable` is set.
    """
    sections = {f"{_PLACE}.{name}": section for name, section in options.items() if isinstance(section, Mapping)}
    asked: dict[str, Path | None] = {}
    for place, section in {_PLACE: options, **sections}.items():
        if section.get("url") != _ENGINE:
            continue
        model = section.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(
                f"got {model!r} with url={_ENGINE}; set it to {_BASE} for the policy's model without its adapter, or "
                "to the directory of another adapter",
                key=f"{place}.model",
            )
        if (variable := section.get("key_variable")) is not None:
            raise ConfigError(
                f"got {variable!r} with url={_ENGINE}, whose servers accept only the run's own key; remove "
                "key_variable, or set url to the address of the server that the key is for",
                key=f"{place}.key_variable",
            )
        asked[place] = None if model == _BASE else Path(model)
    return asked


def with_served_models(options: Mapping[str, Any], served: Mapping[str, ServedModel]) -> dict[str, Any]:
    """Returns the options. In each section whose key path is in `served`, the served model replaces the `url`."""
    given = {
        name: {**section, "url": served[place]} if (place := f"{_PLACE}.{name}") in served else section
        for name, section in options.items()
    }
    return {**given, "url": served[_PLACE]} if _PLACE in served else given


def require_servable_models(config: Config) -> None:
    """Raises ConfigError if the run's engine cannot serve a model that environments request, or if one batch cannot
    use the policy's adapter together with all adapters that environments request."""
    asked = asked_models(config.environment.options)
    if not asked:
        return
    plugin, spec = engine_spec(config)
    for place, adapter in asked.items():
        try:
            plugin.require_servable(spec, adapter)
        except ConfigError as error:
            raise ConfigError(
                f"got {str(adapter or _BASE)!r} with url={_ENGINE}: {error}", key=f"{place}.model"
            ) from error
    adapters = {place: adapter.absolute() for place, adapter in asked.items() if adapter is not None}
    num_adapters, max_loras = 1 + len(set(adapters.values())), spec.lora.max_loras
    if adapters and max_loras < num_adapters:
        places = ", ".join(f"{place}.model" for place in adapters)
        raise ConfigError(
            f"{places}: with url={_ENGINE}, the engines serve {num_adapters} adapters, including the policy's, but "
            f"trainer.policy.model.lora.max_loras={max_loras} limits how many one batch can use: some requests "
            f"would wait until other requests have finished; set max_loras to at least {num_adapters}"
        )
