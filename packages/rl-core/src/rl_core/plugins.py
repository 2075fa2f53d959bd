"""Plug-ins by entry point: listed without importing them, imported when chosen.

A function may also be named as `package.module:function`, so a user's own loss or estimator needs no package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

import attrs

from rl_core.errors import PluginError, nearest
from rl_core.function_settings import require_settings
from rl_core.interfaces import CONTRACT_VERSION, ENGINE_CONTRACT_VERSION, GENERATOR_CONTRACT_VERSION

GROUPS = {
    "rl_core.backends": "training backends",
    "rl_core.inference": "inference engines",
    "rl_core.weight_transports": "weight transports",
    "rl_core.generators": "generators",
    "rl_core.environments": "environments",
    "rl_core.advantage_estimators": "advantage estimators",
    "rl_core.policy_losses": "policy losses",
    "rl_core.trackers": "trackers",
    "rl_core.recipes": "recipes",
    "rl_core.commands": "commands",
}
_ACCEPTED_CONTRACTS = {
    "rl_core.inference": (1, ENGINE_CONTRACT_VERSION),
    "rl_core.generators": (1, GENERATOR_CONTRACT_VERSION),
}
"""Where others than CONTRACT_VERSION are: 1 goes on through `rl_core.config.contract_one`."""
_PACKAGES = {
    ("rl_core.backends", "fsdp"): "rl-fsdp",
    ("rl_core.backends", "fsdp1"): "rl-fsdp",
    ("rl_core.backends", "megatron"): "rl-megatron",
    ("rl_core.inference", "local"): "rl-rollout",
    ("rl_core.inference", "vllm"): "rl-rollout",
    ("rl_core.generators", "environment"): "rl-rollout",
    ("rl_core.weight_transports", "files"): "rl-rollout",
    ("rl_core.recipes", "quickstart"): "rl-examples",
    ("rl_core.recipes", "gsm8k"): "rl-examples",
}


@attrs.frozen(kw_only=True)
class Plugin:
    """An installed entry point, not imported."""

    group: str
    name: str
    value: str
    """`package.module:object`"""
    distribution: str
    """The package that installed it, with its version."""


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    return {entry_point.name: entry_point for entry_point in entry_points(group=group)}


def installed(group: str) -> list[Plugin]:
    """The plug-ins of a group by name, without importing any."""
    return [
        Plugin(
            group=group,
            name=name,
            value=entry.value,
            distribution=f"{entry.dist.name} {entry.dist.version}" if entry.dist else "?",
        )
        for name, entry in sorted(_installed(group).items())
    ]


def load(group: str, name: str, *, key: str | None = None) -> Any:
    """The object behind an entry point, or behind `package.module:object`.

    Args:
        group: one of `GROUPS`.
        name: an entry point's name, or an import path with a colon.
        key: the configuration key that chose it, for the message.

    Raises:
        PluginError: nothing of that name is installed, its import failed (the import's own error is the cause), or it
            was written for another contract version.
    """
    where = f"{key}: " if key else ""
    if ":" in name:
        return import_object(name, where)
    found = _installed(group)
    if name not in found:
        package = _PACKAGES.get((group, name))
        remedy = _how_to_get(package) if package else nearest(name, found)
        names = ", ".join(sorted(found)) or "none"
        raise PluginError(f"{where}{name!r} is not among the installed {GROUPS[group]} ({names}).{remedy}")
    try:
        plugin = found[name].load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"{where}the plug-in {name!r} ({found[name].value}) could not be imported: {reason}"
        ) from error
    contract, accepted = getattr(plugin, "contract_version", 1), _ACCEPTED_CONTRACTS.get(group, (CONTRACT_VERSION,))
    if contract not in accepted:
        raise PluginError(
            f"{where}the plug-in {name!r} was written for contract version {contract}, rl-core has "
            f"{' and '.join(map(str, accepted))}: install matching versions of both"
        )
    return plugin


def _how_to_get(package: str) -> str:
    try:
        return f" The installed {package} {version(package)} does not have it yet"
    except PackageNotFoundError:
        return f" It comes with {package}: pip install {package}"


def load_function(
    group: str, name: str, params: Mapping[str, Any], *, key: str | None = None, remedy: str = ""
) -> Callable[..., Any]:
    """A function plug-in with its keyword parameters checked: an unknown or missing one is a ConfigError, which ends
    with `remedy` as `require_settings` says."""
    function = load(group, name, key=key)
    where = f"{key}: " if key else ""
    if not callable(function):
        raise PluginError(f"{where}{name!r} is a {type(function).__name__}, not a function")
    require_settings(function, params, repr(name), where=where, remedy=remedy)
    return function


def import_object(path: str, where: str = "") -> Any:
    """The object at `package.module:object`; `where` opens the message of the PluginError when it is not there."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PluginError(
            f"{where}{path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise PluginError(f"{where}{path!r}: {module_name} has no {attribute!r}.{nearest(attribute, dir(module))}")
    return getattr(module, attribute)
