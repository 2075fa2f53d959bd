"""Derives the values of keys that are not set. `dump_yaml` writes null for derived values, so that loading the file
derives them again."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import yaml

from rl_core import plugins
from rl_core.config import plugin_options
from rl_core.config.layers import ConfigWarning
from rl_core.config.loading import known_paths
from rl_core.config.tree import Config
from rl_core.config.yaml12 import Yaml12Dumper
from rl_core.errors import ConfigError, Mistakes, PluginError, nearest
from rl_core.interfaces import Backend, EnginePlugin

_T = TypeVar("_T")


@attrs.frozen
class Rule:
    """A rule that derives the value of a key that is not set."""

    key: str
    text: str
    value: Callable[[Config], Any]


RULES = (
    Rule("trainer.run_dir", "runs/<trainer.run_name>", lambda c: str(Path("runs") / c.trainer.run_name)),
    Rule("trainer.ckpt_path", "<trainer.run_dir>/checkpoints", lambda c: str(c.run_dir / "checkpoints")),
    Rule("trainer.export_path", "<trainer.run_dir>/model", lambda c: str(c.run_dir / "model")),
    Rule("trainer.ref.model.path", "trainer.policy.model.path", lambda c: c.trainer.policy.model.path),
    Rule(
        "trainer.placement.ref_num_nodes",
        "trainer.placement.policy_num_nodes",
        lambda c: c.trainer.placement.policy_num_nodes,
    ),
    Rule(
        "trainer.placement.ref_num_gpus_per_node",
        "trainer.placement.policy_num_gpus_per_node",
        lambda c: c.trainer.placement.policy_num_gpus_per_node,
    ),
    Rule(
        "trainer.placement.critic_num_nodes",
        "trainer.placement.policy_num_nodes",
        lambda c: c.trainer.placement.policy_num_nodes,
    ),
    Rule(
        "trainer.placement.critic_num_gpus_per_node",
        "trainer.placement.policy_num_gpus_per_node",
        lambda c: c.trainer.placement.policy_num_gpus_per_node,
    ),
    Rule("trainer.critic.model.path", "trainer.policy.model.path", lambda c: c.trainer.policy.model.path),
    Rule(
        "trainer.algorithm.temperature",
        "generator.sampling_params.temperature",
        lambda c: c.generator.sampling_params.temperature,
    ),
    Rule(
        "generator.eval_sampling_params.max_generate_length",
        "generator.sampling_params.max_generate_length",
        lambda c: c.generator.sampling_params.max_generate_length,
    ),
    Rule(
        "generator.eval_sampling_params.stop",
        "generator.sampling_params.stop",
        lambda c: c.generator.sampling_params.stop,
    ),
    Rule(
        "environment.env_class",
        "reward_functions if environment.reward_functions is set",
        lambda c: "reward_functions" if c.environment.reward_functions else None,
    ),
    Rule("trainer.pipeline_depth", "min(1, trainer.max_staleness)", lambda c: min(1, c.trainer.max_staleness)),
    Rule("generator.max_input_length", "trainer.max_prompt_length", lambda c: c.trainer.max_prompt_length),
    Rule(
        "generator.inference_engine.model_dtype",
        "bfloat16 if trainer.bf16, else float32",
        lambda c: "bfloat16" if c.trainer.bf16 else "float32",
    ),
    Rule(
        "generator.inference_engine.weight_sync_backend",
        "shared_memory if policy and engines are on one Linux machine, else files",
        lambda c: "shared_memory" if _are_on_one_host(c) else "files",
    ),
)
"""The rules are in an order in which each rule needs only the results of earlier ones. Rules of keys that are not in
`PATHS` need no path."""

PATHS = (
    "trainer.run_name",
    "trainer.policy.model.path",
    "trainer.ref.model.path",
    "trainer.critic.model.path",
    "trainer.resume_path",
    "trainer.run_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "data.train_data",
    "data.val_data",
)
"""In the values of these keys, a leading `~` means the home directory, and `${key.path}` means the value of another
key. If that value is a derived one, its key must be earlier in this list, or not in the list."""

_SECTION_PACKAGES = {"fsdp_config": "rl-fsdp", "megatron_config": "rl-megatron", "deepspeed_config": "rl-deepspeed"}


def _are_on_one_host(config: Config) -> bool:
    """Whether the policy's ranks and the engines run on one host that has shared memory, according to the configuration
    and the engine plug-in."""
    if config.trainer.placement.policy_num_nodes != 1 or not hasattr(os, "memfd_create"):
        return False
    engine = config.generator.inference_engine
    try:
        plugin: EnginePlugin = plugins.load("rl_core.inference", engine.backend)
    except PluginError:  # raised again when the plug-in is used
        return False
    return plugin.is_on_this_host(engine.options)


def resolve(config: Config) -> Config:
    """Adds missing options of the selected engine and generator, applies each rule if its key is None, replaces `~` and
    `${key.path}` at the keys in `PATHS`, and adds missing sections of the selected backend.

    Resolving twice changes nothing. Raises PluginError if the selected backend is not installed, ConfigError for a
    `${key.path}` that cannot be replaced, ConfigErrors for several of these. A missing engine or generator is an error
    only where it is used, because planning needs neither.
    """
    mistakes = Mistakes()
    for section in plugin_options.SECTIONS:
        config = with_value(config, section.path, plugin_options.with_defaults(section, section.node(config)))
    for rule in RULES:
        if rule.key not in PATHS:
            config = _derived(config, rule)
    rules = {rule.key: rule for rule in RULES}
    for key in PATHS:
        if not mistakes.about(*re.findall(r"\$\{([^}]*)\}", str(value_at(config, key)))):
            with mistakes.gathered():
                config = with_value(config, key, expanded(config, key, value_at(config, key)))
        if key in rules:
            config = _derived(config, rules[key])
    backend = None
    with mistakes.gathered():
        backend = _load_backend(config.trainer.strategy)
    mistakes.raise_found()
    assert backend is not None
    for key in (f"trainer.{model}.backend_sections" for model in ("policy", "ref", "critic")):
        sections = value_at(config, key)
        if backend.config_section not in sections:
            config = with_value(config, key, {**sections, backend.config_section: backend.options_class()})
    return config


def _derived(config: Config, rule: Rule) -> Config:
    """The configuration with the rule's value, if its key is None."""
    return config if value_at(config, rule.key) is not None else with_value(config, rule.key, rule.value(config))


def expanded(config: Config, key: str, text: Any) -> Any:
    """Replaces `~` and `${key.path}` in `text` (a string, a tuple of strings or None). Raises a ConfigError that names
    `key` if a `${key.path}` cannot be replaced."""
    if isinstance(text, tuple):
        return tuple(expanded(config, key, one) for one in text)
    if text is None:
        return None

    def other(found: re.Match[str]) -> str:
        if found[1] not in known_paths(Config) and not _is_option(config, found[1]):
            raise ConfigError(f"{found[0]} in {text!r} is not a key.{nearest(found[1], known_paths(Config))}", key=key)
        value = value_at(config, found[1])
        if not isinstance(value, str | int | float) or "${" in str(value):
            raise ConfigError(
                f"{found[0]} in {text!r} has the value {value!r}; expected plain text or a number", key=key
            )
        return str(value)

    text = re.sub(r"\$\{([^}]*)\}", other, text)
    return os.path.expanduser(text) if text.startswith("~") else text  # noqa: PTH111 - keeps `org/model`


def unresolved(config: Config) -> Config:
    """The configuration with None for every value that equals the result of its rule. Such values are derived again
    when another key changes."""
    for rule in reversed(RULES):  # a rule reads keys of earlier rules, which must still have their values
        without = with_value(config, rule.key, None)
        if rule.value(without) == value_at(config, rule.key):
            config = without
    return config


def _load_backend(name: str) -> Backend:
    """Loads a backend. Raises PluginError if this fails or if the backend's options class is invalid."""
    backend = plugins.load("rl_core.backends", name, key="trainer.strategy")
    plugin_options.require_options_class(backend.options_class, name, "trainer.strategy")
    return backend


def unread_sections(config: Config) -> dict[str, str]:
    """Sections of backends that are not selected → why they have no effect. `config` is resolved."""
    strategy = config.trainer.strategy
    own = _load_backend(strategy).config_section
    return {
        f"trainer.{model}.{section}": f"trainer.strategy={strategy} reads only {own}"
        for model in ("policy", "ref", "critic")
        for section in getattr(config.trainer, model).backend_sections
        if section != own
    }


def section_class(strategy: str) -> Callable[[str], type | None]:
    """Returns a function that finds the options class of a `<backend>_config` section by its name. This function
    returns None if there is no such section. It returns `dict` if the section's backend is known but not installed. It
    also returns `dict` if the section may belong to a selected backend that cannot be loaded."""

    def find(section: str) -> type | None:
        if not section.endswith("_config"):
            return None
        is_selected_missing = False
        for name in dict.fromkeys([strategy, *(plugin.name for plugin in plugins.installed("rl_core.backends"))]):
            try:
                backend = _load_backend(name)
            except PluginError as error:
                if name == strategy:
                    is_selected_missing = True  # `resolve` raises the error
                else:
                    warnings.warn(str(error), ConfigWarning, stacklevel=2)
                continue
            if backend.config_section == section:
                return backend.options_class
        if section not in _SECTION_PACKAGES:
            return dict if is_selected_missing else None
        reason = (
            f"{section}: kept unchecked; its backend comes with {_SECTION_PACKAGES[section]}, which is not installed"
        )
        warnings.warn(reason, ConfigWarning, stacklevel=2)
        return dict

    return find


# --- reading and writing the tree by key ----------------------------------------------------------------------------


def value_at(config: Any, key: str) -> Any:
    """The value at a key path, which may also be an option of the selected plug-in."""
    for name in key.split("."):
        is_option = not hasattr(config, name) and hasattr(config, "plugin_options")
        config = getattr(config.options if is_option else config, name)
    return config


def _is_option(config: Config, key: str) -> bool:
    """Whether the selected engine or generator declares the key."""
    return any(
        key in known_paths(type(section.node(config).options), f"{section.path}.")
        for section in plugin_options.SECTIONS
        if attrs.has(type(section.node(config).options))
    )


def with_value(config: _T, key: str, value: Any) -> _T:
    """A copy of the tree with `value` at a key path."""
    name, _, below = key.partition(".")
    changed = with_value(getattr(config, name), below, value) if below else value
    return attrs.evolve(config, **{name: changed})  # pyright: ignore[reportArgumentType]


def as_mapping(node: Any) -> Any:
    """The tree as plain dicts and lists, as written to a file."""
    if attrs.has(type(node)):
        fields = {field.name: getattr(node, field.name) for field in attrs.fields(type(node))}
        fields |= fields.pop("backend_sections", {})
        if fields.pop("plugin_options", None):
            fields |= plugin_options.written(node)
        return {name: as_mapping(value) for name, value in fields.items()}
    if isinstance(node, Mapping):
        return {name: as_mapping(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [as_mapping(value) for value in node]
    return node


def leaves(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key path of a tree from `as_mapping`, with its value; an empty section counts as a value."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def dump_yaml(config: Config) -> str:
    """The complete configuration as YAML. Loading it gives the same resolved configuration.

    Derived values are written as null, so that `rl train config.yaml trainer.run_dir=elsewhere` moves the checkpoints.
    Raises ConfigError for a value that YAML cannot represent.
    """
    try:
        mapping = as_mapping(unresolved(resolve(config)))
        return yaml.dump(mapping, Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration cannot be written: {error}") from error
