"""Reads values from files, recipes and the command line, key by key, each with its source.

A layer is a list of (key path, `Given`) in the order of appearance, so that repeated keys can be detected. Layers are
merged key by key; a later value replaces earlier ones at the same key, at a section above it and at keys below it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rl_core.config.yaml12 import Yaml12Loader
from rl_core.errors import ConfigError, Mistakes

COMMAND_LINE = "command line"
"""Source of values that were set on the command line."""


class ConfigWarning(UserWarning):
    """A configuration can run, but contains something that its author should check."""


@attrs.frozen
class Given:
    """A value that was set explicitly."""

    value: Any
    source: str
    """Where it was set: `recipe quickstart`, `run.yaml:12`, `command line`, `code`."""
    text: str | None = None
    """The value as typed on the command line. String keys use it, so `trainer.run_name=007` stays `007`."""


Layer = list[tuple[str, Given]]


VALUE_ALIASES: Mapping[tuple[str, Any], Any] = {
    ("trainer.strategy", "fsdp2"): "fsdp",
    ("trainer.resume_mode", None): "none",
    ("trainer.tags", None): (),
    ("data.val_data", None): (),
    ("generator.sampling_params.stop", None): (),
    ("generator.inference_engine.weight_sync_backend", "nccl"): "broadcast",
    ("generator.inference_engine.weight_sync_backend", "gloo"): "broadcast",
}
"""(key here, alternative spelling of its value) → value. Accepted without a warning."""


def own_spelling(path: str, given: Given) -> Given:
    """The value in this project's spelling, if it has another one in `VALUE_ALIASES`."""
    is_hashable = given.value is None or isinstance(given.value, str)
    if is_hashable and (path, given.value) in VALUE_ALIASES:
        return attrs.evolve(given, value=VALUE_ALIASES[path, given.value], text=None)
    return given


def file_layer(path: Path, mistakes: Mistakes) -> Layer:
    """The keys of a YAML file, nested or dotted, each with its line. Invalid keys are added to `mistakes`.

    Raises ConfigError if the file cannot be read, or is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        loader = Yaml12Loader(text)
        loader.name = str(path)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected a file that holds `key: value` lines")
        return list(_leaves_of_node(loader, node, "", str(path), mistakes))
    except (yaml.YAMLError, RecursionError) as error:  # RecursionError: a mapping that contains itself
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def mapping_layer(mapping: Mapping[str, Any], source: str, mistakes: Mistakes) -> Layer:
    """The keys of a dict, nested or dotted. Invalid keys are added to `mistakes`."""
    return list(_leaves_of_mapping(mapping, "", source, mistakes))


def override_layer(overrides: Iterable[str], mistakes: Mistakes) -> Layer:
    """The `key.path=value` arguments of a command line; values are YAML (`[a, b]`, `{a: 1}`, `true`, `null`, text),
    without comments. For any other argument, an error is added to `mistakes`."""
    layer: Layer = []
    for override in overrides:
        with mistakes.gathered():
            layer += _override(override, mistakes)
    return layer


def _override(override: str, mistakes: Mistakes) -> Layer:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"{override!r}: an override is key.path=value without spaces, e.g. trainer.epochs=2")
    if not re.fullmatch(r"[\w.-]+", key):
        raise ConfigError(f"{override!r}: {key!r} is not a key; an override is key.path=value, without a prefix")
    try:
        loader = Yaml12Loader(text)
        node = loader.get_single_node()
        rest = "" if node is None else text[node.end_mark.index :].strip()
        if rest.startswith("#"):
            raise ConfigError(f"{rest!r} would be a comment; put text in quotes: '{key}=\"…\"'", key=key)
        if isinstance(node, yaml.MappingNode) and node.value:
            leaves = _leaves_of_node(loader, node, key, "", mistakes)
            return [(path, attrs.evolve(given, source=COMMAND_LINE)) for path, given in leaves]
        # Without a node, the text is empty or, as in stop=####, YAML takes all of it for a comment.
        value = (text.strip() or None) if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        message = f"{text!r} is not valid YAML ({reason}); put text in quotes: '{key}=\"…\"'"
        raise ConfigError(message, key=key) from error
    is_plain = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None)
    return [(key, Given(value, COMMAND_LINE, text.strip() if is_plain else None))]


def _leaves_of_node(
    loader: Yaml12Loader, node: yaml.MappingNode, above: str, name: str, mistakes: Mistakes
) -> Iterator[tuple[str, Given]]:
    for key_node, value_node in node.value:
        source = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            mistakes.add(ConfigError(f"{source}: a key must be text, not a list or a mapping"))
            continue
        name_there, colon, value_there = key_node.value.partition(":")
        is_empty = isinstance(value_node, yaml.ScalarNode) and value_node.style is None and not value_node.value
        if colon and key_node.style is None and is_empty:
            remedy = f"write {{{name_there}: {value_there}}}"
            mistakes.add(ConfigError(f"{key_node.value!r} is a key without a value; {remedy}", key=above or source))
            continue
        path = f"{above}.{key_node.value}" if above else key_node.value
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves_of_node(loader, value_node, path, name, mistakes)
        else:
            yield path, Given(loader.construct_object(value_node, deep=True), source)


def _leaves_of_mapping(
    mapping: Mapping[Any, Any], above: str, source: str, mistakes: Mistakes
) -> Iterator[tuple[str, Given]]:
    for key, value in mapping.items():
        if not isinstance(key, str):
            mistakes.add(ConfigError(f"a key must be text, not {key!r}", key=above or source))
            continue
        path = f"{above}.{key}" if above else key
        if isinstance(value, Mapping) and value:
            yield from _leaves_of_mapping(value, path, source, mistakes)
        else:
            yield path, Given(value, source)


def merge(layers: Sequence[Layer]) -> dict[str, Given]:
    """One value per key: later layers win. A key that is repeated within a layer causes a warning; its last value wins.

    An empty section (`{}` or `null`) clears the keys that earlier layers set below it.
    """
    merged: dict[str, Given] = {}
    for layer in layers:
        seen: dict[str, Given] = {}
        for path, given in layer:
            if path in seen:
                _warn_of_repetition(path, seen[path], given)
            seen[path] = given
            for other in [other for other in merged if other.startswith(f"{path}.") or path.startswith(f"{other}.")]:
                del merged[other]
            merged[path] = given
    return merged


def _warn_of_repetition(path: str, first: Given, last: Given) -> None:
    places = first.source if first.source == last.source else f"{first.source} and {last.source}"
    message = f"{path}: set twice ({places}): {first.value!r}, then {last.value!r}; the last one is used"
    warnings.warn(message, ConfigWarning, stacklevel=3)


def nested(merged: Mapping[str, Given]) -> dict[str, Any]:
    """The merged keys as a tree of dicts whose leaves are `Given`."""
    tree: dict[str, Any] = {}
    for path, given in merged.items():
        *sections, last = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = given
    return tree


def plain(node: Any) -> Any:
    """A tree of `nested` with plain values, without their sources."""
    if isinstance(node, Given):
        return node.value
    return {key: plain(child) for key, child in node.items()}
