"""Translates SkyRL or verl keys to this project's keys, and lists what changed and what could not be translated."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import yaml

from rl_core.config import ConfigWarning, Given, from_mapping
from rl_core.config.keys import translated
from rl_core.config.plugin_options import is_known
from rl_core.config.yaml12 import Yaml12Dumper
from rl_core.errors import ConfigErrors, Mistakes, RLError
from rl_examples.importing.reading import Read
from rl_examples.importing.skyrl import meaning
from rl_examples.importing.verl_keys import KEYS, NO_EFFECT

Dialect = Literal["skyrl", "verl"]


@attrs.frozen(kw_only=True)
class Translation:
    """A translated configuration, with the keys that changed or could not be translated."""

    dialect: Dialect
    values: Mapping[str, Any]
    """The values, under this project's keys."""
    changed: tuple[str, ...] = ()
    """Keys that were renamed, have no effect here, or are still to be set."""
    added: tuple[str, ...] = ()
    """Defaults of the other trainer that differ here, which were added to the values."""
    left: tuple[str, ...] = ()
    """Keys that could not be translated, each with the reason."""

    def as_yaml(self) -> str:
        """Returns the configuration as YAML for `rl train`; comments at the top list the keys that could not be
        translated."""
        lines = [f"# Not translated: {' '.join(reason.split())}" for reason in self.left]
        content = yaml.dump(_nested(self.values), Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=120)
        return "\n".join([f"# From {_NAMES[self.dialect]}, by rl import-config.", *lines, content])


_CLIP = "actor_rollout_ref.actor.clip_ratio"
_KL_PENALTY = "algorithm.kl_penalty"
_CORRECTION = "algorithm.rollout_correction.rollout_is"
_OF_A_MODEL = re.compile(r"^megatron_config\.(policy|ref)\.")
_RUN_NAME = "trainer.run_name"
_NAMES = {"skyrl": "SkyRL", "verl": "verl"}
_TEMPLATE = "data.apply_chat_template_kwargs."
_ADDED = "the script does not set it; this is SkyRL's default, which differs from the default here"
SKYRL_DEFAULTS: Mapping[str, Any] = {
    "trainer.algorithm.use_kl_loss": True,
    "generator.inference_engine.backend": "vllm",
}
"""Defaults of SkyRL that differ here and that change the objective or the engine."""


def dialect_of(found: Read) -> Dialect:
    """Returns whether the keys are SkyRL's or verl's."""
    is_verl = (found.module or "").startswith("verl.") or any(
        key.startswith(("actor_rollout_ref.", "algorithm.", "data.train_files")) for key in found.values
    )
    return "verl" if is_verl else "skyrl"


def translate(found: Read) -> Translation:
    """Translates the keys of a file. Keys that load here are kept; all others are listed."""
    dialect = dialect_of(found)
    # SkyRL's separate Megatron file has keys such as `megatron_config.policy.…`, with section and model swapped.
    values = {_OF_A_MODEL.sub(r"trainer.\1.megatron_config.", key): value for key, value in found.values.items()}
    changed, added, left = [], [], []
    if dialect == "verl":
        values, changed, left = _from_verl(values)
    else:
        script = meaning(found.module, values)
        values, changed, added, left = script.values, script.changed, script.added, script.left
    values, more, refused = _loadable(values)
    changed += _without_slash(values)
    # A YAML file may be only a part of a configuration, so nothing is added to it.
    is_whole = dialect == "skyrl" and found.module is not None
    defaults = {key: value for key, value in SKYRL_DEFAULTS.items() if is_whole and key not in values}
    return Translation(
        dialect=dialect,
        values={**values, **defaults},
        changed=(*changed, *more),
        added=(*added, *(f"{key}={json.dumps(value)}: {_ADDED}" for key, value in defaults.items())),
        left=(*found.remarks, *left, *refused),
    )


def _from_verl(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    values: dict[str, Any] = {}
    changed, left = [], []
    for key, value in given.items():
        if key == _KL_PENALTY and given.get("algorithm.use_kl_in_reward") is not True:
            changed.append(f"{key}: has no effect without algorithm.use_kl_in_reward")
        elif key in KEYS:
            try:
                here, value_here = _key_here(key, given), KEYS[key].value(value)
                if values.setdefault(here, value_here) != value_here:
                    raise ValueError(f"{here} is already {values[here]}, from another key of verl")
            except (ValueError, TypeError) as error:
                left.append(f"{key}={value}: {error}")
        elif key.startswith(_TEMPLATE):
            values[f"generator.chat_template_kwargs.{key.removeprefix(_TEMPLATE)}"] = value
        elif key == _CLIP:
            continue  # handled below, as the default of both bounds
        elif key in NO_EFFECT:
            changed.append(f"{key}: has no effect here: {NO_EFFECT[key]}")
        else:
            left.append(f"{key}={value}: no equivalent key is known; rl config RECIPE lists all keys")
    if _CLIP in given:
        for bound in ("low", "high"):
            values.setdefault(f"trainer.algorithm.eps_clip_{bound}", given[_CLIP])
    _set_engines(given, values)
    # verl's rows have `reward_model`, and verl chooses the reward function by data source.
    left += [
        "reward: verl chooses a function by data_source; set environment.env_class or environment.reward_functions"
    ]
    return values, changed, left


def _key_here(key: str, given: Mapping[str, Any]) -> str:
    """Returns this project's key for a verl key in `KEYS`. verl has one threshold of ratios; `given` says
    whether the ratios are of tokens or of sequences, which have separate keys here."""
    here = KEYS[key].key
    is_of_sequences = key == f"{_CORRECTION}_threshold" and given.get(_CORRECTION) == "sequence"
    return here.replace(".token_", ".sequence_") if is_of_sequences else here


def _without_slash(values: dict[str, Any]) -> list[str]:
    """Replaces slashes in the run's name, which scripts often build from the model's name. If there were any, returns
    a remark about this."""
    name = values.get(_RUN_NAME)
    if not isinstance(name, str) or "/" not in name:
        return []
    values[_RUN_NAME] = name.replace("/", "_")
    return [f"{_RUN_NAME}: each / became _; here the name is also that of a directory"]


def _set_engines(given: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Sets the number of engines, for which verl has no key: all GPUs divided by the GPUs of one engine."""
    gpus = given.get("trainer.n_gpus_per_node"), given.get("trainer.nnodes", 1)
    axes = ("tensor_model", "pipeline_model", "data")
    sizes = [given.get(f"actor_rollout_ref.rollout.{axis}_parallel_size", 1) for axis in axes]
    if all(isinstance(number, int) and number > 0 for number in (*gpus, *sizes)):
        values["generator.inference_engine.num_engines"] = max(1, gpus[0] * gpus[1] // math.prod(sizes))


def _loadable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Returns the values that load, under this project's keys; the changes; and the keys that do not load, each with
    the reason."""
    layer, mistakes = [(key, Given(value, "")) for key, value in values.items()], Mistakes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = dict(translated(layer, mistakes, lambda path: is_known(path, values), values))
    changed = [_plain(str(one.message)) for one in caught if one.category is ConfigWarning]
    refused = [_plain(str(error)) for error in mistakes.errors]
    found = {key: given.value for key, given in kept.items()}
    for error in _mistakes_in(found):
        mistaken = [name for name in found if f"{name}.".startswith(f"{error.key}.")]
        for name in mistaken:
            del found[name]
        if mistaken:
            refused.append(_plain(str(error)))
        else:
            changed.append(f"to be fixed: {_plain(str(error))}")
    return found, changed, refused


def _mistakes_in(values: Mapping[str, Any]) -> list[RLError]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            from_mapping(values)
        except ConfigErrors as errors:
            return list(errors.errors)
        except RLError as error:
            return [error]
    return []


def _plain(text: str) -> str:
    """Removes the sources of values from a message, because a source is not a place in the user's file."""
    return text.replace(" ()", "").replace(" (code)", "").replace("(code, ", "(").replace(", code)", ")")


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, last = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value != {} or last not in node:  # `a={}` after `a.b=1` removes nothing
            node[last] = value
    return tree
