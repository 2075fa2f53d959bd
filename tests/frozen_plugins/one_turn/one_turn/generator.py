"""Asks the engine once per sample and lets the environment judge the answer."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rl_core import plugins
from rl_core.errors import DataError, GenerationError
from rl_core.interfaces import (
    Action,
    Completion,
    EnvironmentFactory,
    GenerateRequest,
    GroupRequest,
    Row,
    Sampler,
    Trajectory,
    TrajectoryStep,
)

if TYPE_CHECKING:
    from rl_core.config import Config


class OneTurnGenerator:
    """Generator. Prompts are text; samples of a group are played one after the other, groups side by side."""

    def __init__(
        self,
        client: Sampler,
        tokenizer: Any,
        environment_of: Callable[[Row], EnvironmentFactory],
        environment_options: Mapping[str, Any],
    ) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._environment_of, self._options = environment_of, environment_options
        self._numbers = itertools.count()

    def prompt_length(self, row: Row) -> int:
        if not isinstance(row.get("prompt"), str):
            raise DataError("the row has no text in a column 'prompt'")
        return len(self._encode(row["prompt"]))

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        return tuple([await self._play(request, index) for index in range(request.num_samples)])

    async def _play(self, request: GroupRequest, index: int) -> Trajectory:
        whole = Trajectory(
            group_id=request.group_id,
            sample_index=index,
            steps=(),
            prompt_text=str(request.row.get("prompt", "")),
            response_text="",
            start_version=request.start_version,
        )
        try:
            return await self._played(request, index, whole)
        except Exception as error:
            return attrs.evolve(whole, failure=f"{request.row_place}: {type(error).__name__}: {error}")

    async def _played(self, request: GroupRequest, index: int, whole: Trajectory) -> Trajectory:
        environment = self._environment_of(request.row)(request.row, self._options)
        try:
            prompt = await environment.reset()
            if not isinstance(prompt, str):
                raise DataError("this generator knows prompts of text only")
            tokens = self._encode(prompt)
            completion = await self._response(request, index, tokens)
            said = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
            action = Action(text=said, tokens=completion.tokens, stop_reason=completion.stop_reason)
            result = await environment.step(action)
        finally:
            await environment.close()
        step = TrajectoryStep(
            tokens=[*tokens, *completion.tokens],
            sampled=[False] * len(tokens) + [True] * len(completion.tokens),
            rollout_logprobs=[0.0] * len(tokens) + list(completion.logprobs),
            policy_version=[-1] * len(tokens) + list(completion.policy_versions),
            reward=result.reward,
            stop_reason=completion.stop_reason,
        )
        return attrs.evolve(whole, steps=(step,), response_text=said, metrics=result.metrics)

    async def _response(self, request: GroupRequest, index: int, prompt: tuple[int, ...]) -> Completion:
        """What the engine gives back unfinished is asked for again, behind what is there."""
        parts: list[Completion] = []
        tokens: tuple[int, ...] = ()
        while not parts or parts[-1].stop_reason == "abort":
            params = attrs.evolve(request.params, max_tokens=request.params.max_tokens - len(tokens))
            name = f"{request.seed}/{request.group_id}/{index}/{len(parts)}"
            digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
            asked = GenerateRequest(
                sample_id=f"one-turn-{id(self)}-{next(self._numbers)}",
                prompt_tokens=prompt + tokens,
                params=params,
                seed=int.from_bytes(digest, "big"),
            )
            (part,) = await self._client.generate(asked)
            parts.append(part)
            tokens += part.tokens
        if not tokens:
            raise GenerationError("the engine answered without a token")
        return Completion(
            tokens=tokens,
            logprobs=tuple(value for part in parts for value in part.logprobs),
            policy_versions=tuple(version for part in parts for version in part.policy_versions),
            stop_reason=parts[-1].stop_reason,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def create_generator(config: Config, client: Sampler) -> OneTurnGenerator:
    """The entry point."""
    from transformers import AutoTokenizer

    name = config.environment.env_class

    def environment_of(row: Row) -> EnvironmentFactory:
        return plugins.load("rl_core.environments", name or row["env_class"], key="environment.env_class")

    tokenizer = AutoTokenizer.from_pretrained(config.policy_model_path)
    return OneTurnGenerator(client, tokenizer, environment_of, config.environment.options)
