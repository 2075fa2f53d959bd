"""Compatibility with engines and generators of contract version 1, which receive the whole configuration.

Contract 1 defined the keys below for every engine and generator. If a plug-in of contract 1 is selected, these keys are
its options, and the configuration that it receives has them in their version-1 locations. Remove this module when
version 1 is no longer accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from rl_core.config.tree import Config, GeneratorConfig, InferenceEngineConfig
from rl_core.interfaces import (
    EngineSpec,
    Generator,
    GeneratorPlugin,
    GeneratorSpec,
    InferenceClient,
    InferencePlugin,
    Sampler,
    above,
    at_least,
    between,
)


@attrs.frozen(kw_only=True, slots=False)  # `_EngineSection` has two bases, of which only one may have slots
class EngineKeys:
    """Keys that contract 1 defined for every engine. An engine's documentation says which of them it reads."""

    tensor_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    pipeline_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    data_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    expert_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    max_num_batched_tokens: int = attrs.field(default=8192, validator=at_least(1))
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool | None = None
    gpu_memory_utilization: float = attrs.field(default=0.8, validator=between(0, 1))
    served_model_name: str | None = None
    fully_sharded_loras: bool = False
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = None
    external_server_urls: tuple[str, ...] | None = None
    host: str | None = None
    router_port: int | None = None
    start_timeout_s: float = attrs.field(default=600.0, validator=above(0))
    heartbeat_interval_s: float = attrs.field(default=5.0, validator=above(0))
    hung_after_s: float = attrs.field(default=60.0, validator=above(0))


@attrs.frozen(kw_only=True, slots=False)  # as for EngineKeys
class GeneratorKeys:
    """Keys that contract 1 defined for every generator. A generator's documentation says which of them it reads."""

    max_concurrency: int = attrs.field(default=1024, validator=at_least(1))
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    zero_reward_on_non_stop: bool = False


KEYS: Mapping[str, type] = {"rl_core.inference": EngineKeys, "rl_core.generators": GeneratorKeys}
"""Entry-point group → options class of the group's plug-ins of contract 1."""


def is_of_contract_one(plugin: Any) -> bool:
    """Whether the plug-in follows contract 1. Generators of contract 1 are functions, which state no version."""
    return getattr(plugin, "contract_version", 1) < 2


def adapted_engine(plugin: Any, config: Config) -> InferencePlugin:
    """The engine with the interface of the current contract. An engine of contract 1 gets `config` instead of specs."""
    return _EngineOfContractOne(plugin, contract_one_config(config)) if is_of_contract_one(plugin) else plugin


def adapted_generator(plugin: Any, config: Config) -> GeneratorPlugin:
    """The generator with the interface of the current contract. A generator of contract 1 gets `config` instead of
    specs."""
    return _GeneratorOfContractOne(plugin, contract_one_config(config)) if is_of_contract_one(plugin) else plugin


@attrs.frozen
class _EngineOfContractOne:
    """Adapts a version-1 engine to InferencePlugin."""

    engine: Any
    config: Config
    contract_version: int = 2

    @property
    def name(self) -> str:
        return self.engine.name

    def validate(self, spec: EngineSpec) -> None:
        self.engine.validate(self.config)

    async def create(self, spec: EngineSpec) -> InferenceClient:
        return await self.engine.create(self.config)


@attrs.frozen
class _GeneratorOfContractOne:
    """Adapts a version-1 generator to GeneratorPlugin."""

    function: Callable[[Config, Sampler], Generator]
    config: Config
    contract_version: int = 2

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def validate(self, spec: GeneratorSpec) -> None:
        """Does nothing: version 1 had no validation."""

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        return self.function(self.config, client)


@attrs.frozen(kw_only=True)
class _EngineSection(InferenceEngineConfig, EngineKeys):
    """`generator.inference_engine` of contract 1."""


@attrs.frozen(kw_only=True)
class _GeneratorSection(GeneratorConfig, GeneratorKeys):
    """`generator` of contract 1."""


def contract_one_config(config: Config) -> Config:
    """The configuration with every key in its version-1 location. If only the engine or only the generator follows
    version 1, the configuration also has those options of the other plug-in that existed in version 1."""
    engine = config.generator.inference_engine
    engine = _EngineSection(**_fields(engine), **_keys(EngineKeys, engine.options))
    fields = _fields(config.generator) | {"inference_engine": engine}
    return attrs.evolve(config, generator=_GeneratorSection(**fields, **_keys(GeneratorKeys, config.generator.options)))


def _fields(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in attrs.fields(type(section))}


def _keys(keys: type, options: Any) -> dict[str, Any]:
    names = [field.name for field in attrs.fields(keys)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
