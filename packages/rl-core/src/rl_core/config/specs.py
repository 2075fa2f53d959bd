"""Builds the specs of the selected engine and generator from a resolved configuration. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rl_core import plugins
from rl_core.config import plugin_options
from rl_core.config.tree import Config, EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.interfaces import (
    EnginePlugin,
    EngineSpec,
    GeneratorPlugin,
    GeneratorSpec,
    LoraConfig,
    SamplingParams,
)

_GENERATOR, _ENGINE = plugin_options.SECTIONS


def engine_spec(config: Config) -> tuple[EnginePlugin, EngineSpec]:
    """The engine plug-in and its spec.

    Raises:
        PluginError: the plug-in is not installed.
        ConfigError: the configuration is not resolved, or names no model; or it sets sampling parameters that the
            engine does not have.
    """
    engine, trainer = config.generator.inference_engine, config.trainer
    plugin = plugins.load(_ENGINE.group, engine.backend, key=f"{_ENGINE.path}.{_ENGINE.field}")
    _require_accepted_arguments(plugin, config)
    spec = EngineSpec(
        options=_options(_ENGINE, config),
        model_path=config.policy_model_path,
        dtype=config.engine_dtype,
        num_engines=engine.num_engines,
        max_num_seqs=engine.max_num_seqs,
        return_routed_experts=engine.enable_return_routed_experts,
        return_kept_tokens=config.generator.sampling_params.is_truncated and plugin.returns_kept_tokens,
        lora=trainer.policy.model.lora,
        sampling=config.generator.sampling_params.to_params(),
        eval_sampling=config.generator.eval_sampling_params.to_params(),
        init_kwargs=engine.engine_init_kwargs,
        shares_devices=trainer.placement.colocate_all,
        seed=trainer.seed,
        num_threads=trainer.num_threads,
        weight_transport=config.weight_transport,
        request_timeout_s=trainer.generation_timeout_s,
        run_dir=config.run_dir,
    )
    return plugin, spec


def reference_engine_spec(config: Config) -> tuple[EnginePlugin, EngineSpec] | None:
    """The engine plug-in that computes the reference's log-probs, and its spec; None if ranks compute them.

    Raises:
        PluginError: the plug-in is not installed.
        ConfigError: an option is unknown or has the wrong type.
    """
    reference = config.trainer.ref
    if reference.inference_backend is None:
        return None
    name, key = reference.inference_backend, "trainer.ref.inference_backend"
    plugin = plugins.load(_ENGINE.group, name, key=key)
    _, policy = engine_spec(config)
    spec = attrs.evolve(
        policy,
        options=plugin_options.options_of(
            name, reference.inference_options, _ENGINE, key="trainer.ref.inference_options"
        ),
        model_path=reference.model.path,
        sampling=SamplingParams(),
        eval_sampling=SamplingParams(),
        num_engines=1,
        return_routed_experts=False,
        return_kept_tokens=False,
        lora=LoraConfig(),
        init_kwargs={},
        shares_devices=False,
        run_dir=policy.run_dir / "reference",
    )
    return plugin, spec


def generator_spec(config: Config) -> tuple[GeneratorPlugin, GeneratorSpec]:
    """The generator plug-in and its spec.

    Raises:
        PluginError: the plug-in is not installed.
        ConfigError: the configuration is not resolved, or names no model.
    """
    generator, environment = config.generator, config.environment
    plugin = plugins.load(_GENERATOR.group, generator.type, key=f"{_GENERATOR.path}.{_GENERATOR.field}")
    spec = GeneratorSpec(
        options=_options(_GENERATOR, config),
        model_path=config.policy_model_path,
        max_turns=generator.max_turns,
        max_input_length=generator.max_input_length,
        step_wise=generator.step_wise_trajectories,
        engine_init_kwargs=generator.inference_engine.engine_init_kwargs,
        env_class=environment.env_class,
        environment_options=environment_options(environment),
        environment_timeout_s=environment.timeout_s,
        environment_placement=environment.placement,
        environment_workers=environment.num_workers,
        num_samples=generator.n_samples_per_prompt,
        eval_num_samples=generator.eval_n_samples_per_prompt,
        add_special_tokens=config.data.add_special_tokens,
    )
    return plugin, spec


def needs_engine(config: Config) -> bool:
    """Whether the generator needs an engine. Raises PluginError if the generator is not installed."""
    plugin = plugins.load(_GENERATOR.group, config.generator.type, key=f"{_GENERATOR.path}.{_GENERATOR.field}")
    return plugin.needs_engine


def environment_options(environment: EnvironmentConfig) -> Mapping[str, Any]:
    """The environment's options, including the reward functions if these replace an environment."""
    if not environment.reward_functions:
        return environment.options
    functions = {
        "reward_functions": list(environment.reward_functions),
        "reward_weights": list(environment.reward_weights),
    }
    return {**environment.options, **functions}


def _require_accepted_arguments(plugin: EnginePlugin, config: Config) -> None:
    generator = config.generator
    for name, sampling in (("sampling", generator.sampling_params), ("eval_sampling", generator.eval_sampling_params)):
        if sampling.extra_args and not plugin.accepts_extra_args:
            raise ConfigError(
                f"got {', '.join(map(str, sampling.extra_args))}, but the engine "
                f"{generator.inference_engine.backend!r} has no further sampling parameters; remove this key, or "
                "choose an engine that has them, such as generator.inference_engine.backend=vllm",
                key=f"generator.{name}_params.extra_args",
            )


def _options(section: plugin_options.Section, config: Config) -> Any:
    options, name = section.node(config).options, section.chosen(config)
    cls = plugin_options.options_class(section, name)
    if cls is not None and not isinstance(options, cls):
        raise ConfigError(
            f"the options of {section.field}={name} ({cls.__name__}) are missing; call rl_core.config.resolve first",
            key=section.path,
        )
    return options
