"""Keys that engine and generator plug-ins declare, written in a section of the core next to the core's own keys.

Only the keys of the selected plug-in have an effect. Changed keys of other installed plug-ins cause a warning if the
user set them; they are checked, kept and written back, so that one file can be used with several engines. A key that
no installed plug-in declares is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config.layers import ConfigWarning, mapping_layer, merge, nested, plain
from rl_core.config.loading import LEFT_OUT, PluginKeys, hints, known_paths, load_class, own_keys, unknown_key
from rl_core.config.tree import Config, GeneratorConfig, InferenceEngineConfig
from rl_core.errors import ConfigError, Mistakes, PluginError, RLError


@attrs.frozen
class Section:
    """A section of the core in which plug-ins may declare keys."""

    path: str
    cls: type
    group: str
    """Entry-point group of the plug-ins."""
    field: str
    """The key of the section that selects the plug-in."""

    def node(self, config: Config) -> Any:
        """This section of `config`."""
        node: Any = config
        for name in self.path.split("."):
            node = getattr(node, name)
        return node

    def chosen(self, config: Config) -> str:
        """The name of the selected plug-in, as in the configuration."""
        return getattr(self.node(config), self.field)


SECTIONS = (
    Section("generator", GeneratorConfig, "rl_core.generators", "type"),
    Section("generator.inference_engine", InferenceEngineConfig, "rl_core.inference", "backend"),
)


def options_class(section: Section, name: str) -> type | None:
    """The options class of a plug-in; None if it declares no keys.

    Raises:
        PluginError: the plug-in is not installed or cannot be imported, or its options class is invalid or repeats a
            key of the section.
    """
    key = f"{section.path}.{section.field}"
    plugin = plugins.load(section.group, name, key=key)
    cls = plugin.options_class
    if cls is not None:
        _require_usable(cls, section, name, key)
    return cls


def options_of(plugin_name: str, values: Mapping[str, Any], section: Section, *, key: str) -> Any:
    """The plug-in's options with `values`, which the user wrote at `key` instead of in the section.

    Raises:
        PluginError: the plug-in or its options class cannot be used (see `options_class`).
        ConfigError: a value has the wrong type, or the plug-in has no such key; ConfigErrors: several of these.
    """
    cls = options_class(section, plugin_name)
    if cls is None:
        if values:
            raise ConfigError(f"got {', '.join(values)}, but {plugin_name!r} has no keys of its own", key=key)
        return None
    mistakes = Mistakes()
    given = nested(merge([mapping_layer(values, "code", mistakes)]))
    options = load_class(cls, given, key, PluginKeys(), mistakes)
    mistakes.raise_found()
    return options


def require_options_class(cls: Any, name: str, key: str) -> list[str]:
    """The keys that a plug-in's options class declares. `key`: the configuration key that names the plug-in.

    Raises:
        PluginError: `cls` is not an attrs class, its type hints cannot be resolved, or a field has no default.
    """
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise PluginError(f"{name!r}: its options_class is {cls!r}; expected an attrs class", key=key)
    try:
        names = own_keys(cls)
    except NameError as error:
        message = f"{name!r}: the type hints of {cls.__name__} cannot be resolved: {error}"
        raise PluginError(message, key=key) from error
    unset = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
    if unset:
        raise PluginError(f"{name!r}: its option {unset[0]!r} has no default; give it one in {cls.__name__}", key=key)
    return list(names)


def _require_usable(cls: Any, section: Section, plugin_name: str, key: str) -> None:
    names = require_options_class(cls, plugin_name, key)
    taken = [name for name in names if name in hints(section.cls)]
    if taken:
        raise PluginError(
            f"{plugin_name!r}: its option {taken[0]!r} is already a key of {section.path}; rename it in {cls.__name__}",
            key=key,
        )


def load_options(node: Any, keys: Mapping[str, Any], path: str, mistakes: Mistakes) -> dict[str, Any]:
    """The options objects of the plug-ins that declare these keys, by plug-in.

    If several plug-ins declare the same key, the selected plug-in gets the value. If the selected one does not declare
    it, the first other installed plug-in whose type fits gets the value. If the selected plug-in cannot be imported,
    the keys are kept unchecked with a warning, and starting the plug-in fails later. If the key that selects the
    plug-in has a mistake, the keys are not checked.

    Args:
        node: the section, with the core's keys loaded.
        keys: the section's other keys, as trees of `Given` leaves.
        mistakes: collects keys that no plug-in declares, and values of the wrong type.
    """
    section = _section_of(node)
    chosen = getattr(node, section.field)
    if mistakes.about(f"{section.path}.{section.field}"):
        return {}
    try:
        options_class(section, chosen)
    except PluginError as error:
        warnings.warn(f"{section.path}: {', '.join(keys)}: kept unchecked: {error}", ConfigWarning, stacklevel=2)
        return {chosen: plain(keys)}
    options: dict[str, Any] = {}
    left = dict(keys)
    refusals: list[Mistakes] = []
    for name, cls in _classes(section, chosen):
        claimed = {key: left[key] for key in left if key in own_keys(cls)}
        found = Mistakes()
        loaded = load_class(cls, claimed, path, PluginKeys(), found)
        if found and name != chosen:
            refusals.append(found)
            continue
        mistakes.add(*found.errors)
        left = {key: left[key] for key in left if key not in claimed}
        if loaded is not LEFT_OUT and (name == chosen or changed_keys(loaded)):
            options[name] = loaded
    mistakes.add(*_unclaimed(section, chosen, left, path, refusals))
    return options


def _unclaimed(
    section: Section, chosen: str, keys: Mapping[str, Any], path: str, refusals: Sequence[Mistakes]
) -> Iterator[RLError]:
    """The errors for keys that were not loaded: either no plug-in declares the key, or all that declare it refuse the
    value. In the second case, yields the error of the first plug-in."""
    owners: dict[str, str] = {}
    for name, cls in _classes(section, chosen):
        owners = dict.fromkeys(own_keys(cls), name) | owners
    if keys.keys() - owners.keys():
        for error in _broken(section):
            warnings.warn(str(error), ConfigWarning, stacklevel=2)  # this plug-in may declare the key
    remarks = {key: "" if name == chosen else f" (of {section.field}={name})" for key, name in owners.items()}
    siblings = dict.fromkeys(own_keys(section.cls), "") | remarks
    for key, node in keys.items():
        where = f"{path}.{key}"
        if key not in owners:
            yield unknown_key(node, where, siblings, installed_paths(), chosen=f"{section.field}={chosen}")
        else:
            yield from next((refusal.about(where) for refusal in refusals if refusal.about(where)), [])


def _classes(section: Section, chosen: str) -> Iterator[tuple[str, type]]:
    """Plug-ins that declare keys in a section, with their options classes: the selected one, then the other installed
    ones."""
    cls = options_class(section, chosen)
    if cls is not None:
        yield chosen, cls
    for name, cls in installed_classes(section):
        if name != chosen:
            yield name, cls


def _section_of(node: Any) -> Section:
    return next(section for section in SECTIONS if isinstance(node, section.cls))


def installed_classes(section: Section) -> list[tuple[str, type]]:
    """Installed plug-ins that declare keys in a section, in the order of their names, without broken ones."""
    return [(name, cls) for name, cls in _examined(section) if isinstance(cls, type)]


def _broken(section: Section) -> list[PluginError]:
    return [error for _, error in _examined(section) if isinstance(error, PluginError)]


def _examined(section: Section) -> Iterator[tuple[str, type | PluginError | None]]:
    for name in dict.fromkeys(plugin.name for plugin in plugins.installed(section.group)):
        try:
            yield name, options_class(section, name)
        except PluginError as error:
            yield name, error


def installed_paths() -> tuple[str, ...]:
    """The path of every key that an installed plug-in declares."""
    classes = ((section, cls) for section in SECTIONS for _, cls in installed_classes(section))
    paths = (path for section, cls in classes for path in known_paths(cls, f"{section.path}."))
    return tuple(dict.fromkeys(paths))


def is_known(path: str, given: Mapping[str, Any]) -> bool:
    """Whether a plug-in declares the key or a section above it. Considers installed plug-ins and those that `given`
    (values by path) selects."""
    paths = {*installed_paths(), *_chosen_paths(given)}
    return any(f"{path}.".startswith(f"{known}.") for known in paths)


def _chosen_paths(given: Mapping[str, Any]) -> set[str]:
    paths: set[str] = set()
    for section in SECTIONS:
        name = given.get(f"{section.path}.{section.field}", attrs.fields_dict(section.cls)[section.field].default)
        try:
            cls = options_class(section, name) if isinstance(name, str) else None
        except PluginError:
            continue  # raised again when the plug-in is used
        if cls is not None:
            paths |= set(known_paths(cls, f"{section.path}."))
    return paths


def with_defaults(section: Section, node: Any) -> Any:
    """The section with the options of the selected plug-in added. The section is unchanged if the plug-in declares no
    keys or cannot be loaded."""
    name = getattr(node, section.field)
    try:
        cls = options_class(section, name)
    except PluginError:
        return node  # raised again when the plug-in is used
    if cls is None or name in node.plugin_options:
        return node
    return attrs.evolve(node, plugin_options={**node.plugin_options, name: cls()})


def written(node: Any) -> dict[str, Any]:
    """The options of a section as keys: all keys of the selected plug-in, and the changed keys of the others."""
    keys = dict(node.options if isinstance(node.options, Mapping) else _values(node.options))
    for _, options in _of_others(node):
        keys = changed_keys(options) | keys
    return keys


def changed_keys(options: Any) -> dict[str, Any]:
    """The fields of an options object whose value is not the default."""
    defaults = _values(type(options)())
    return {name: value for name, value in _values(options).items() if value != defaults[name]}


def unread_keys(config: Config) -> dict[str, str]:
    """Changed keys of plug-ins that are not selected → why they have no effect."""
    unread: dict[str, str] = {}
    for section in SECTIONS:
        for owner, options in _of_others(section.node(config)):
            reason = f"only {section.field}={owner} reads it; this run has {section.field}={section.chosen(config)}"
            unread |= {f"{section.path}.{name}": reason for name in changed_keys(options)}
    return unread


def _of_others(node: Any) -> list[tuple[str, Any]]:
    chosen = getattr(node, _section_of(node).field)
    return [
        (name, options)
        for name, options in node.plugin_options.items()
        if name != chosen and not isinstance(options, Mapping)
    ]


def _values(options: Any) -> dict[str, Any]:
    return {} if options is None else {name: getattr(options, name) for name in own_keys(type(options))}
