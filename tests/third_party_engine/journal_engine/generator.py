"""The generator's entry point: the environment generator with shorter answers."""

from __future__ import annotations

import attrs

from rl_core.interfaces import (
    Generator,
    GeneratorPlugin,
    GeneratorSpec,
    GroupRequest,
    Row,
    Sampler,
    Trajectory,
    at_least,
)


@attrs.frozen(kw_only=True)
class ShortOptions:
    """The environment generator, limited to short answers."""

    answer_tokens: int = attrs.field(default=2, validator=at_least(1))
    """Maximum tokens of an answer, even if the sampling parameters allow more."""


@attrs.frozen
class ShortGenerator(Generator):
    """Limits the answers of the environment generator."""

    inner: Generator
    answer_tokens: int

    def prompt_length(self, row: Row) -> int:
        return self.inner.prompt_length(row)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        params = attrs.evolve(request.params, max_tokens=min(request.params.max_tokens, self.answer_tokens))
        return await self.inner.generate(attrs.evolve(request, params=params))


class ShortPlugin(GeneratorPlugin):
    """The plug-in of this generator."""

    name = "short"
    options_class = ShortOptions

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        from rl_rollout import EnvironmentGeneratorOptions, create_generator

        inner = create_generator(attrs.evolve(spec, options=EnvironmentGeneratorOptions()), client)
        return ShortGenerator(inner, spec.options.answer_tokens)


short = ShortPlugin()
