"""The entry point of the `environment` generator, and the keys of `generator` that only it reads. Imports neither torch
nor transformers until a generator is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rl_core.interfaces import GENERATOR_CONTRACT_VERSION, Generator, GeneratorSpec, Sampler, at_least


@attrs.frozen(kw_only=True)
class EnvironmentGeneratorOptions:
    """The generator that plays episodes of environments."""

    max_concurrency: int = attrs.field(default=1024, validator=at_least(1))
    """Episodes that run at a time."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to the tokenizer's chat template, e.g. `enable_thinking`."""
    zero_reward_on_non_stop: bool = False
    """A response that did not end by itself gets reward 0."""


@attrs.frozen
class EnvironmentGeneratorPlugin:
    """GeneratorPlugin of `EnvironmentGenerator`."""

    contract_version: int = GENERATOR_CONTRACT_VERSION
    name: str = "environment"
    options_class: type = EnvironmentGeneratorOptions

    def validate(self, spec: GeneratorSpec) -> None:
        """Nothing that it is told is impossible together."""

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        """See `create_generator`."""
        from rl_rollout.generator import create_generator

        return create_generator(spec, client)


environment = EnvironmentGeneratorPlugin()
