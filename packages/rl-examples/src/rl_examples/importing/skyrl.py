"""Translates what a script of SkyRL means beyond its keys: its module, its environment and its asynchronous trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError, install

_ASYNC = "trainer.fully_async."
_STALENESS = "trainer.max_staleness"
_WORKERS = f"{_ASYNC}num_parallel_generation_workers"
_SAMPLES = "generator.n_samples_per_prompt"
_ENV_CLASS = "environment.env_class"
_MAX_TURNS = "generator.max_turns"
_DEFAULTS: Mapping[str, Any] = {f"{_ASYNC}max_staleness_steps": 4, _SAMPLES: 5, _MAX_TURNS: 1}
"""Defaults of SkyRL that a translated value depends on."""
_TRANSLATED_MODULES = ("main_async", "async_main", "main_fully_async", "main_base", "main_generate")
"""Modules of SkyRL and of its examples that only choose a trainer."""


@attrs.define
class Meaning:
    """The values of a script, and the remarks on those that changed."""

    values: dict[str, Any]
    changed: list[str] = attrs.field(factory=list)
    added: list[str] = attrs.field(factory=list)
    left: list[str] = attrs.field(factory=list)


def meaning(module: str | None, given: Mapping[str, Any]) -> Meaning:
    """Translates what depends on the script's module or on several keys. `module` is None for a YAML file.

    Raises ConfigError for the module of another kind of trainer.
    """
    found = Meaning(dict(given))
    if module is not None:
        _read_module(module, found)
    _read_asynchronous(found)
    _read_environment(found, is_whole=module is not None)
    return found


def _read_module(module: str, found: Meaning) -> None:
    package, name = module.partition(".")[0], module.rpartition(".")[2]
    if "main_sft" in name:
        raise ConfigError(
            f"{module}: is SkyRL's supervised trainer, whose keys are not translated; expected a script of its RL "
            "trainer. docs/supervised.md shows the same run here"
        )
    if name == "main_generate":
        found.changed.append(f"{module}: only evaluates; the command here is rl eval instead of rl train")
    elif name in ("main_async", "async_main") and _STALENESS not in found.values:
        found.values[_STALENESS] = 1
        found.added.append(f"{_STALENESS}=1: {name} generates one step ahead")
    elif "fully_async" in name:
        found.values.setdefault(f"{_ASYNC}enabled", True)
    if package in ("examples", "integrations") and name not in _TRANSLATED_MODULES:
        found.left.append(
            f"{module}: the code of this module is not translated; what it registers or replaces (an environment, a "
            "loss, a reward) has to be written as a plug-in (docs/plugins.md)"
        )


def _read_asynchronous(found: Meaning) -> None:
    if found.values.get(f"{_ASYNC}enabled") is not True:
        return
    if f"{_ASYNC}max_staleness_steps" not in found.values:
        found.values[f"{_ASYNC}max_staleness_steps"] = steps = _DEFAULTS[f"{_ASYNC}max_staleness_steps"]
        found.added.append(f"{_STALENESS}={steps}: the script does not set it; this is SkyRL's default")
    workers, samples = found.values.get(_WORKERS), found.values.get(_SAMPLES, _DEFAULTS[_SAMPLES])
    if isinstance(workers, int) and isinstance(samples, int):
        del found.values[_WORKERS]
        found.values["generator.max_concurrency"] = workers * samples
        found.changed.append(
            f"{_WORKERS}={workers}: was read as generator.max_concurrency={workers * samples}, which counts episodes"
        )


def _read_environment(found: Meaning, *, is_whole: bool) -> None:
    """Selects skyrl-gym's environment if none of this name is installed, or if the script sets options of
    skyrl-gym's."""
    name = found.values.get(_ENV_CLASS)
    section = f"environment.skyrl_gym.{name}."
    here = [plugin.name for plugin in plugins.installed("rl_core.environments")]
    has_options = any(key.startswith(section) for key in found.values)
    if not isinstance(name, str) or ":" in name or (name in here and not has_options):
        return
    found.values = {key.replace(section, "environment.options.config.", 1): each for key, each in found.values.items()}
    found.values |= {_ENV_CLASS: "skyrl_gym", "environment.options.env": name}
    # SkyRL passes this number to the environment, in place of the environment's own default.
    turns = found.values.get(_MAX_TURNS, _DEFAULTS[_MAX_TURNS] if is_whole else None)
    if isinstance(turns, int):
        found.values["environment.options.max_turns"] = turns
    remark = f"{_ENV_CLASS}: {name} is taken from skyrl-gym ({install('rl-environments[skyrl-gym]')})"
    if name in here:
        found.changed.append(f"{remark}, because the script sets its options; the {name!r} of this project has others")
    else:
        found.changed.append(f"{remark}; if it is your own, set environment.options.env=package.module:Class")
