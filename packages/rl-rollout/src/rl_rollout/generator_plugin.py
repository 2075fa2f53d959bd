"""The entry point of the `environment` generator. Imports neither torch nor transformers until a generator is
created."""

from __future__ import annotations

import attrs

from rl_core.interfaces import GENERATOR_CONTRACT_VERSION, Generator, GeneratorSpec, Sampler
from rl_rollout.generator_options import EnvironmentGeneratorOptions


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
