"""Loads a configuration from a recipe, a YAML file or a dict, with overrides on top."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config import plugin_options
from rl_core.config.function_params import function_defaults
from rl_core.config.layers import (
    COMMAND_LINE,
    ConfigWarning,
    Given,
    Layer,
    file_layer,
    mapping_layer,
    merge,
    nested,
    override_layer,
    own_spelling,
)
from rl_core.config.loading import PluginKeys, known_paths, load_class
from rl_core.config.named_plugins import gather_missing
from rl_core.config.resolving import RULES, as_mapping, expanded, leaves, resolve, section_class, unread_sections
from rl_core.config.tree import Config
from rl_core.config.value_checks import gather_out_of_bounds
from rl_core.errors import ConfigError, Mistakes, RLError
from rl_core.interfaces import Recipe
from rl_core.stored_files import is_found

RECIPE = "recipe "
"""Prefix of the source names of recipes."""


@attrs.frozen(kw_only=True)
class Loaded:
    """A resolved configuration, and the sources of its values."""

    config: Config
    given: Mapping[str, Given]
    """Values that were set explicitly, by key path."""
    recipe: Recipe | None = None
    """The recipe, if one was named."""
    makes: frozenset[str] = frozenset()
    """Paths that the recipe creates if they are missing."""

    @property
    def chosen_keys(self) -> frozenset[str]:
        """Keys that the user set, in a file or on the command line."""
        return frozenset(key for key, given in self.given.items() if not given.source.startswith(RECIPE))

    @property
    def needs(self) -> str:
        """Explains how to get the recipe's data files; empty if the recipe needs none or the user set other files."""
        is_own = self.chosen_keys.isdisjoint(("data.train_data", "data.val_data"))
        return (self.recipe.needs or "") if self.recipe is not None and is_own else ""


@attrs.frozen
class Origin:
    """One key of a resolved configuration."""

    key: str
    value: Any
    source: str
    """Where the value was set, the rule that derives it, or `default`."""


def load(source: str, overrides: Sequence[str] = (), *, tiny: bool = False) -> Loaded:
    """Loads the configuration that `source` describes, with `key.path=value` overrides on top.

    Args:
        source: a recipe's name, `package.module:recipe`, or the path of a `.yaml` file.
        overrides: as on the command line; if a key is set twice, the last value is used.
        tiny: use the recipe's tiny variant.

    Raises:
        ConfigError: an unknown key, a wrong type, an unreadable file, no tiny variant.
        PluginError: no such recipe, or the selected training backend is not installed.
        ConfigErrors: several of these. Values out of bounds and plug-ins that are not installed are then reported too.
    """
    mistakes = Mistakes()
    _require_no_path(source)
    if source.endswith((".yaml", ".yml")):
        if tiny:
            raise ConfigError(f"--tiny: {source} is a file; only a recipe has a tiny variant; remove --tiny")
        layers = [file_layer(Path(source), mistakes)]
        return _loaded([*layers, override_layer(overrides, mistakes)], mistakes)
    recipe = _recipe(source)
    layers = [mapping_layer(recipe.config, f"{RECIPE}{source}", mistakes)]
    if tiny:
        if recipe.tiny is None:
            raise ConfigError(
                f"--tiny: the recipe {source!r} has no tiny variant; remove --tiny. Recipes with one: {_tiny()}"
            )
        layers.append(mapping_layer(recipe.tiny, f"{RECIPE}{source} --tiny", mistakes))
    loaded = _loaded([*layers, override_layer(overrides, mistakes)], mistakes)
    makes = frozenset(expanded(loaded.config, f"{RECIPE}{source}", path) for path in recipe.makes)
    return attrs.evolve(loaded, recipe=recipe, makes=makes)


def from_mapping(mapping: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Builds a resolved configuration from a dict, nested or with dotted keys. Raises the same errors as `load`."""
    mistakes = Mistakes()
    layers = [mapping_layer(mapping, "code", mistakes), override_layer(overrides, mistakes)]
    return _loaded(layers, mistakes).config


def origins(loaded: Loaded) -> Iterator[Origin]:
    """Every key of the resolved configuration with its source, in the order of the classes. For keys whose default
    comes from the loss or the estimator, yields that default, which requires importing these functions."""
    rules = {rule.key: rule.text for rule in RULES}
    unread = plugin_options.unread_keys(loaded.config) | _unread_of_backends(loaded)
    of_functions = function_defaults(loaded.config)
    for key, value in leaves(as_mapping(loaded.config)):
        given = loaded.given.get(key)
        reason = next((unread[name] for name in unread if f"{key}.".startswith(f"{name}.")), None)
        if reason is not None:
            yield Origin(key, value, f"{given.source if given else 'default'}; without effect: {reason}")
        elif given is not None and (given.value is not None or key not in {*rules, *of_functions}):
            yield Origin(key, value, given.source)
        elif key in of_functions:
            yield Origin(key, *of_functions[key])
        else:
            yield Origin(key, value, f"derived: {rules[key]}" if key in rules else "default")


def _loaded(layers: Sequence[Layer], mistakes: Mistakes) -> Loaded:
    """Merges and resolves the layers. Raises all mistakes, including those that `mistakes` already contains."""
    values = {path: given.value for layer in layers for path, given in layer}
    given = merge([_under_own_names(layer, values, mistakes) for layer in layers])
    keys = PluginKeys(
        section_class=section_class(_strategy(given, mistakes)),
        load_options=plugin_options.load_options,
        paths=plugin_options.installed_paths,
    )
    config = load_class(Config, nested(given), "", keys, mistakes)
    if mistakes:
        gather_missing(config, given, mistakes)
        gather_out_of_bounds(config, mistakes)
    if not mistakes.about("trainer.strategy"):
        with mistakes.gathered():
            config = resolve(config)
    mistakes.raise_found()
    loaded = Loaded(config=config, given=given)
    _warn_of_unread_options(loaded)
    return loaded


def _under_own_names(layer: Layer, values: Mapping[str, Any], mistakes: Mistakes) -> Layer:
    """The layer with this project's spellings of values, and of keys that the core does not declare."""
    own: Layer = []
    for path, given in layer:
        if path in known_paths(Config):
            own.append((path, own_spelling(path, given)))
        else:
            from rl_core.config.keys import translated  # the names of other trainers are asked only here

            own += translated([(path, given)], mistakes, lambda key: plugin_options.is_known(key, values), values)
    return own


def _strategy(given: dict[str, Given], mistakes: Mistakes) -> str:
    """The name of the selected backend. If the value is not a string, records a mistake, removes the value from `given`
    and returns the default."""
    default = Config().trainer.strategy
    strategy = given["trainer.strategy"].value if "trainer.strategy" in given else default
    if isinstance(strategy, str):
        return strategy
    mistakes.add(ConfigError(f"got {strategy!r}; expected a backend's name", key="trainer.strategy"))
    del given["trainer.strategy"]
    return default


def _warn_of_unread_options(loaded: Loaded) -> None:
    """Warns once per plug-in that is not selected but whose keys the user set. For backends, considers only keys on the
    command line: a file may have sections of several backends, among which `trainer.strategy` chooses."""
    keys: dict[str, list[str]] = {}
    for key, reason in plugin_options.unread_keys(loaded.config).items():
        if any(f"{given}.".startswith(f"{key}.") for given in loaded.chosen_keys):
            keys.setdefault(reason, []).append(key)
    for key, reason in _unread_of_backends(loaded).items():
        if loaded.given[key].source == COMMAND_LINE:
            keys.setdefault(reason, []).append(key)
    for reason, unread in keys.items():
        warnings.warn(f"{', '.join(unread)}: without effect: {reason}", ConfigWarning, stacklevel=3)


def _unread_of_backends(loaded: Loaded) -> dict[str, str]:
    """Explicit keys in sections of backends that are not selected → why they have no effect."""
    sections = unread_sections(loaded.config).items()
    return {key: reason for section, reason in sections for key in loaded.given if key.startswith(f"{section}.")}


def _require_no_path(source: str) -> None:
    """Rejects directories, and files whose names do not end in .yaml or .yml. A recipe of the same name has
    precedence."""
    path = Path(source)
    names = {plugin.name for plugin in plugins.installed("rl_core.recipes")}
    if not is_found(path) or (path.is_file() and path.suffix in (".yaml", ".yml")) or source in names:
        return
    kind = "a directory" if path.is_dir() else "a file whose name does not end in .yaml"
    file = path / "config.yaml"
    remedy = f"use {file}" if file.is_file() else "use a recipe's name, a .yaml file or package.module:recipe"
    if path.suffix == ".sh":
        remedy = f"rl import-config {path} --output run.yaml (rl-examples) translates a launch script of SkyRL or verl"
    raise ConfigError(f"{source}: is {kind}; {remedy}")


def _tiny() -> str:
    """Names of the installed recipes that have a tiny variant, without recipes that are functions."""
    names = []
    for plugin in plugins.installed("rl_core.recipes"):
        with contextlib.suppress(RLError):
            recipe = plugins.load("rl_core.recipes", plugin.name)
            names += [plugin.name] if isinstance(recipe, Recipe) and recipe.tiny is not None else []
    return ", ".join(names) or "none"


def _recipe(source: str) -> Recipe:
    found = plugins.load("rl_core.recipes", source)
    recipe = found if isinstance(found, Recipe) else found()
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{source}: the function returned {type(recipe).__name__}; expected a Recipe")
    return recipe
