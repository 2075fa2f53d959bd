"""Finds plug-ins by entry point. Listing plug-ins does not import them. A selected plug-in is imported and checked.

Any plug-in except a command may also be named as `package.module:object`, so a user's own loss or environment needs no
package. In both cases, this module checks that it is the right kind of object (`rl_core.seams`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import PluginError, install, nearest, raised_at
from rl_core.function_settings import require_settings
from rl_core.interfaces import as_environment
from rl_core.seams import PREPARATION, RECEIVER, SEAMS, Seam
from rl_core.stored_files import is_found

__all__ = [
    "GROUPS",
    "Plugin",
    "import_object",
    "installed",
    "load",
    "load_function",
    "load_preparation",
    "load_receiver",
    "require_plugin",
]
GROUPS = {group: seam.plural for group, seam in SEAMS.items()} | {"rl_core.commands": "commands"}
_NAMES = {
    ("rl-fsdp", "rl_core.backends"): "fsdp fsdp1",
    ("rl-deepspeed", "rl_core.backends"): "deepspeed",
    ("rl-megatron", "rl_core.backends"): "megatron",
    ("rl-rollout", "rl_core.inference"): "local vllm",
    ("rl-rollout", "rl_core.generators"): "environment dataset",
    ("rl-rollout", "rl_core.weight_transports"): "files broadcast shared_memory cuda_ipc",
    ("rl-rollout", "rl_core.environments"): "reward_functions",
    ("rl-environments", "rl_core.environments"): (
        "code mathematics calculator gsm8k_turns judge reasoning_gym search skyrl_gym verifiers"
    ),
    ("rl-examples", "rl_core.environments"): (
        "arithmetic gsm8k capitals guess pocket_calculator broken_pocket_calculator look_up mixed_up_look_up "
        "second_try smollm2_calculator shaped_arithmetic"
    ),
    ("rl-examples", "rl_core.recipes"): (
        "quickstart sft sft_grpo dpo distill dapo gspo ppo async_r3 lora_two_servers smollm2_calculator gsm8k guess "
        "calculator look_up second_try mathematics code reasoning_gym gsm8k_turns judge skyrl_gym smollm2 "
        "qwen2_5_1_5b qwen2_5_3b qwen2_5_7b qwen3_30b_a3b qwen3_30b_a3b_one_node qwen3_30b_a3b_lora moonlight_16b_a3b "
        "glm_4_7_flash qwen3_235b_a22b"
    ),
}
_PACKAGES = {(group, name): package for (package, group), names in _NAMES.items() for name in names.split()}
"""(group, name) → the package of this project that has the plug-in."""


_CHECKED: dict[tuple[str, str], Any] = {}
"""(group, name) → the plug-in that was checked. A cache, because environments are loaded for every row."""


@attrs.frozen(kw_only=True)
class Plugin:
    """An installed entry point. Its object has not been imported."""

    group: str
    name: str
    value: str
    """`package.module:object`"""
    distribution: str
    """Name and version of the package that declares the entry point; `?` if unknown."""


@cache
def _installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Name → entry points with different objects. A name has several entry points if several packages use it."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        others = found.get(entry.name, ())
        if entry.value not in [other.value for other in others]:
            found[entry.name] = (*others, entry)
    return found


def installed(group: str) -> list[Plugin]:
    """The installed plug-ins of a group, sorted by name. Imports none of them."""
    return [
        Plugin(
            group=group,
            name=name,
            value=entry.value,
            distribution=_package_of(entry),
        )
        for name, entries in sorted(_installed(group).items())
        for entry in entries
    ]


def load(group: str, name: str, *, key: str | None = None) -> Any:
    """Imports a plug-in and checks it.

    Args:
        group: one of `GROUPS`, except `rl_core.commands`.
        name: an entry point's name, or an import path with a colon.
        key: the configuration key that names the plug-in, for messages.

    Raises:
        PluginError: no plug-in or several plug-ins of that name are installed, its import failed (the import error is
            the cause), or it is not the right kind of object.
    """
    found = import_object(name, key) if ":" in name else _entry_point_object(group, name, key)
    if _CHECKED.get((group, name)) is not found:
        require_plugin(group, found, name, key)
        _CHECKED[group, name] = found
    return as_environment(found) if group == "rl_core.environments" else found


def _import_problem(error: BaseException, module: str) -> str:
    """The error of an import as text. If the module exists and the message names no file, adds the file and line that
    raised the error."""
    names_file = isinstance(error, SyntaxError) or ".py:" in str(error)
    place = "" if names_file or _is_absent(error, module) else raised_at(error)
    problem = f"{type(error).__name__}: {error} {place}".strip()
    if isinstance(error, SystemExit):
        problem += '; the module is a program: put what only the program does under `if __name__ == "__main__":`'
    return problem


def _is_absent(error: BaseException, module: str) -> bool:
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _how_to_import(module: str) -> str:
    """Says how to make a missing module importable."""
    if module.endswith(".py"):
        folder = f", with {Path(module).parent} as current directory or on PYTHONPATH" if "/" in module else ""
        return f"; write the module's name without .py: {Path(module).stem}{folder}"
    file = f"{module.replace('.', '/')}.py"
    return f"; expected an installed module, or {file} in the current directory or on PYTHONPATH"


def _of_own_file(name: str) -> str:
    """Returns a sentence that explains how to name an object in a Python file. Empty if `name` is neither a Python file
    of the current directory (`mine`, `mine.py`) nor an object in one (`mine.loss`)."""
    module, _, attribute = name.removesuffix(".py").partition(".")
    is_file = module.isidentifier() and is_found(f"{module}.py")
    return f" To use an object in your {module}.py, write {module}:{attribute or 'NAME'}" if is_file else ""


def _entry_point_object(group: str, name: str, key: str | None) -> Any:
    found = _installed(group)
    if name not in found:
        package = _PACKAGES.get((group, name))
        remedy = _how_to_get(package) if package else _of_own_file(name) or nearest(name, found)
        names = ", ".join(sorted(found)) or "none"
        raise PluginError(f"{name!r} is not among the installed {GROUPS[group]} ({names}).{remedy}", key=key)
    entry, *others = found[name]
    if others:
        packages = " and ".join(f"{_package_of(one)} ({one.value})" for one in (entry, *others))
        raise PluginError(
            f"{name!r} is provided by {packages}; expected one package. Write the path of the one that you mean "
            f"instead, e.g. {entry.value}, or uninstall the other package",
            key=key,
        )
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        reason = _import_problem(error, entry.module)
        raise PluginError(f"the plug-in {name!r} ({entry.value}) could not be imported: {reason}", key=key) from error


def require_plugin(group: str, plugin: Any, name: str, key: str | None = None) -> None:
    """Checks that a plug-in is the right kind of object.

    Args:
        name: an entry point's name or an import path, for messages.
        key: as in `load`.

    Raises:
        PluginError: it is not.
    """
    _require(SEAMS[group], plugin, name, key)


def _require(seam: Seam, plugin: Any, name: str, key: str | None) -> None:
    problem = seam.problem(plugin)
    if problem is not None:
        raise PluginError(f"{name!r} is not {seam.singular}: {problem}. Expected {seam.expected}", key=key)


def _package_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "?"


def load_receiver(path: str) -> Any:
    """Imports the class or function at `path` (`Rendezvous.receiver`), which creates an engine's receiver for a weight
    sync.

    Raises:
        PluginError: the object does not exist, or cannot be called with a rendezvous.
    """
    found = import_object(path)
    _require(RECEIVER, found, path, None)
    return found


def load_preparation(path: str) -> Callable[[Any], object]:
    """Imports the function at `path` (`Recipe.prepare`).

    Raises:
        PluginError: the function does not exist, or cannot be called with a configuration.
    """
    key = "the recipe's `prepare`"
    found = import_object(path, key)
    _require(PREPARATION, found, path, key)
    return found


def _how_to_get(package: str) -> str:
    try:
        return f" The installed {package} {version(package)} does not have it; install a newer version"
    except PackageNotFoundError:
        return f" It is part of {package}: {install(package)}"


def load_function(
    group: str, name: str, params: Mapping[str, Any], *, key: str | None = None, remedy: str = ""
) -> Callable[..., Any]:
    """Loads a function plug-in that accepts the keyword arguments `params`. Raises ConfigError for an unknown or
    missing parameter, and the errors of `load`. `remedy` is passed to `require_settings`."""
    function = load(group, name, key=key)
    require_settings(function, params, repr(name), key=key, remedy=remedy)
    return function


def import_object(path: str, key: str | None = None) -> Any:
    """Imports the object at `package.module:object`. If the import fails or the object does not exist, raises
    PluginError about `key`."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = _import_problem(error, module_name)
        remedy = _how_to_import(module_name) if _is_absent(error, module_name) else ""
        raise PluginError(f"{path!r}: importing {module_name} failed: {reason}{remedy}", key=key) from error
    if not attribute:
        raise PluginError(f"{path!r}: write the object's name after the colon, as in {module_name}:NAME", key=key)
    if not hasattr(module, attribute):
        # The module may be a different one with the same name, for example from the standard library.
        source = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "Python itself")
        remedy = nearest(attribute, dir(module)) or f" It was imported from {source}"
        raise PluginError(f"{path!r}: {module_name} has no {attribute!r}.{remedy}", key=key)
    return getattr(module, attribute)
