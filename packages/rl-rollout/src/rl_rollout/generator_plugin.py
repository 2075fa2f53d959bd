"""Entry points of the generators. This module imports neither torch nor transformers until a generator is created."""

from __future__ import annotations

from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import Generator, GeneratorPlugin, GeneratorSpec, Sampler
from rl_rollout.environment_pool import placement_of
from rl_rollout.generator_options import DatasetGeneratorOptions, EnvironmentGeneratorOptions
from rl_rollout.reward_functions import RewardFunctionsEnvironment, require_functions


class EnvironmentGeneratorPlugin(GeneratorPlugin):
    """Creates an `EnvironmentGenerator`."""

    name = "environment"
    options_class = EnvironmentGeneratorOptions

    def validate(self, spec: GeneratorSpec) -> None:
        """Checks the environment that the configuration names, but not the environments that rows name.

        Raises:
            PluginError: the environment is unknown, or a reward function cannot be imported.
            ConfigError: the environment cannot run in its placement, or the reward functions are configured wrongly.
        """
        if spec.env_class is not None:
            key = "environment.env_class"
            factory = plugins.load("rl_core.environments", spec.env_class, key=key)
            placement_of(factory, spec.environment_placement, key)
            if factory is RewardFunctionsEnvironment:
                require_functions(spec.environment_options)

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        """See `create_generator`."""
        from rl_rollout.generator import create_generator

        return create_generator(spec, client)


environment = EnvironmentGeneratorPlugin()


class DatasetGeneratorPlugin(GeneratorPlugin):
    """Creates a `DatasetGenerator`."""

    name = "dataset"
    options_class = DatasetGeneratorOptions
    needs_engine = False

    def validate(self, spec: GeneratorSpec) -> None:
        """Raises ConfigError if the configured number of samples per prompt differs from the number of responses per
        row."""
        responses = spec.options.responses
        expected = 2 if responses == "pair" else 1
        asked = {"n_samples_per_prompt": spec.num_samples, "eval_n_samples_per_prompt": spec.eval_num_samples}
        for key, number in asked.items():
            if number != expected:
                raise ConfigError(
                    f"got {number}, expected {expected}: the number of responses in a row with generator.type=dataset "
                    f"and generator.responses={responses}",
                    key=f"generator.{key}",
                )

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        """Creates the generator, which does not use `client`."""
        from rl_rollout.dataset_generator import create_generator

        return create_generator(spec)


dataset = DatasetGeneratorPlugin()
