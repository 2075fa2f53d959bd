"""The environment `skyrl_gym`: runs environments of skyrl-gym unchanged. Needs the extra `skyrl-gym`.

Row:       as in SkyRL: `prompt` (messages) and the columns that the environment reads, such as `reward_spec`; the whole
           row becomes the environment's `extras`. An empty `extra_info` is added if the row has none. If the option
           `max_turns` is set, it replaces the row's `max_turns`
Options:   `env` (the environment's id in skyrl-gym, e.g. `gsm8k_multi_turn`, or `package.module:Class`
           of your own), `config` (its `env_config`: a mapping, passed as the dataclass that annotates this parameter,
           else as an object with attributes), `max_turns`
Reward:    the environment's reward of each turn
Metrics:   the numbers in its `get_metrics()`; if `accuracy` is not among them, it is the reward of the last turn

The environments gsm8k, gsm8k_multi_turn, aime and search, which look for an answer anywhere in a text, get the response
without its thinking; all others get the whole response, with the thinking that its prompt opened.

Rewards per token (a list) and `postprocessed_action` have no counterpart here: if an environment returns either, its
sample fails. Set `generator.max_turns` to the environment's `max_turns` or more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from rl_core import plugins
from rl_core.errors import ConfigError, DataError, install, nearest
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_environments.options import key_of, own_options, text, whole_number

_OPTIONS = ("env", "config", "max_turns")
_RIGHT = {
    "gsm8k": ("reward_spec", "#### {}"),
    "gsm8k_multi_turn": ("reward_spec", "#### {}"),
    "aime": ("reward_model", "Answer: {}"),
    "search": ("reward_spec", "<answer>{}</answer>"),
}
"""Environments of skyrl-gym that compare an answer with a text of the row: the text's column, and a right response."""


class SkyrlGymEnvironment(Environment):
    """See the module."""

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        options = own_options(options, "skyrl_gym", _OPTIONS)
        self._prompt = row["prompt"]
        self._grades_answers = options.get("env") in _RIGHT
        self.require_row(row)
        extras: dict[str, Any] = {"extra_info": {}, **row}
        if "max_turns" in options:
            extras["max_turns"] = whole_number(options, "max_turns", 1)
        self._environment = _maker(options)(env_config=_env_config(options), extras=extras)
        self._is_closed = False

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        own = own_options(options, "skyrl_gym", _OPTIONS)
        whole_number(own, "max_turns", 1)
        _maker(own)
        _env_config(own)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if isinstance(row["prompt"], str):
            raise DataError(
                f"prompt: got text, {row['prompt']!r:.80}; environments of skyrl-gym start from messages, such as "
                '[{"role": "user", "content": "…"}]'
            )

    @classmethod
    def require_episode(cls, row: Row, options: Mapping[str, Any]) -> None:
        """See `Environment.require_episode`. Plays the row's own answer in environments of skyrl-gym that compare
        texts. It must earn a reward of 1; with a comma between thousands, for example, it does not, and nor does any
        other answer."""
        name = own_options(options, "skyrl_gym", _OPTIONS).get("env")
        if name not in _RIGHT:
            return
        column, response = _RIGHT[name]
        spec = row.get(column)
        truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
        target = truth.get("target") if isinstance(truth, Mapping) else truth
        answers = [target] if isinstance(target, str) else list(target) if isinstance(target, list | tuple) else []
        try:
            reward = max(
                SkyrlGymEnvironment(row, options)._environment.step(response.format(answer))["reward"]
                for answer in answers
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{name} of skyrl-gym needs {column}.ground_truth, text; got {spec!r:.80}") from error
        if reward < 1:
            raise DataError(
                f"{column}.ground_truth: got {truth!r:.80}, but {name} of skyrl-gym gives even this answer the reward "
                f"{reward:g}; write a number without commas and units, as the environment compares texts"
            )

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        prompt, _ = self._environment.init([dict(message) for message in self._prompt])
        return prompt

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`. Raises DataError for an output that has no counterpart here."""
        output = self._environment.step(action.answer if self._grades_answers else action.opening + action.text)
        if output.get("postprocessed_action") is not None:
            raise DataError(
                "the environment's `step` returned a postprocessed_action, but a sampled response cannot be replaced "
                "here; leave it out of the result"
            )
        reward = output["reward"]
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise DataError(
                f"the environment's `step` returned the reward {reward!r:.80}; expected one number for the turn"
            )
        done = bool(output["done"])
        observation = list(output["observations"] or [])
        if not done and not observation:
            raise DataError(
                "the environment's `step` returned done=False and no observation; expected a message for the next turn"
            )
        metrics = {name: float(value) for name, value in self._environment.get_metrics().items() if _is_number(value)}
        return StepResult(
            reward=float(reward),
            done=done,
            observation=None if done else observation,
            metrics={"accuracy": float(reward), **metrics},
        )

    async def close(self) -> None:
        """See `Environment.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._environment.close()


def _maker(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the callable that creates the environment from `env_config` and `extras`."""
    name, key = text(options, "env"), key_of(options, "env")
    if ":" in name:
        return plugins.import_object(name, key)
    try:
        import skyrl_gym
    except ImportError as error:
        raise ConfigError(f"skyrl-gym is not installed: {install('rl-environments[skyrl-gym]')}") from error
    if name not in skyrl_gym.registry:
        known = ", ".join(skyrl_gym.registry)
        remedy = nearest(name, skyrl_gym.registry)
        raise DataError(f"skyrl-gym has no {name!r}; it has {known}.{remedy}", key=key)
    return partial(skyrl_gym.make, name)


def _env_config(options: Mapping[str, Any]) -> Any:
    """Returns the option `config` as an instance of the dataclass that the environment declares for it, else as an
    object with attributes."""
    given, key = options.get("config"), key_of(options, "config")
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"got {given!r:.80}; expected a mapping", key=key)
    values = {str(name): _attributes(value) for name, value in (given or {}).items()}
    declared = _declared(options)
    if declared is None:
        return SimpleNamespace(**values)
    fields = {field.name: field for field in dataclasses.fields(declared) if field.init}
    for name in values:
        if name not in fields:
            raise ConfigError(
                f"{declared.__name__} of the environment has no such field; expected "
                f"{', '.join(fields)}.{nearest(name, fields)}",
                key=f"{key}.{name}",
            )
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"is missing; {declared.__name__} of the environment has no default for it", key=f"{key}.{name}"
            )
    return declared(**values)


def _declared(options: Mapping[str, Any]) -> type | None:
    """The dataclass in the annotation of the environment's parameter `env_config`; None if there is none."""
    name = text(options, "env")
    if ":" not in name:
        import skyrl_gym

        name = skyrl_gym.registry[name].entry_point
    maker = plugins.import_object(name) if isinstance(name, str) else name
    try:
        annotation = get_type_hints(maker.__init__ if isinstance(maker, type) else maker).get("env_config")
    except (NameError, TypeError, AttributeError):  # annotations that only a type checker resolves
        return None
    each = (annotation, *get_args(annotation))
    return next((kind for kind in each if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _attributes(value: Any) -> Any:
    """Converts nested mappings to objects with attributes, because skyrl-gym's environments read attributes."""
    if isinstance(value, Mapping):
        return SimpleNamespace(**{str(key): _attributes(each) for key, each in value.items()})
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
