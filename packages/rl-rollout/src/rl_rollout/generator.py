"""The `environment` generator: plays episodes of an Environment against an InferenceClient, token ids in and out.

What the engine sampled is what the trajectory holds; text is decoded for the environment and never encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError, DataError, GenerationError, PluginError
from rl_core.interfaces import (
    Action,
    Completion,
    EnvironmentFactory,
    GenerateRequest,
    GroupRequest,
    InferenceClient,
    Prompt,
    Row,
    StepResult,
    Trajectory,
    TrajectoryStep,
)
from rl_rollout.chat import TokenCodec, load_tokenizer

if TYPE_CHECKING:
    from rl_core.config import Config


_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_TAKEN_METRICS = {"reward", "response_length", "failed"}


@attrs.frozen(kw_only=True)
class Episodes:
    """What is the same for every episode of a run."""

    environment_of: Callable[[Row], EnvironmentFactory]
    """The environment that judges a row. Raises an RLError for a row that names none."""
    environment_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to every environment."""
    max_concurrency: int = 1024
    """Episodes that run at a time."""
    zero_reward_on_non_stop: bool = False
    """A response that did not end by itself gets reward 0."""


class EnvironmentGenerator:
    """Generator of single-turn episodes: the environment must be done after the first response."""

    def __init__(self, client: InferenceClient, codec: TokenCodec, episodes: Episodes) -> None:
        self._client = client
        self._codec = codec
        self._episodes = episodes
        self._free = asyncio.Semaphore(episodes.max_concurrency)
        self._name = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    def prompt_length(self, row: Row) -> int:
        """See `Generator.prompt_length`."""
        if "prompt" not in row:
            raise DataError(f"the row has no column 'prompt'; it has {', '.join(map(str, row)) or 'none'}")
        return len(self._codec.encode(row["prompt"]))

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """See `Generator.generate`. Samples of a group run side by side."""
        prompts = _GroupPrompts(self._codec)
        episodes = (self._play_or_fail(request, index, prompts) for index in range(request.num_samples))
        return tuple(await asyncio.gather(*episodes))

    async def _play_or_fail(self, request: GroupRequest, index: int, prompts: _GroupPrompts) -> Trajectory:
        async with self._free:
            try:
                return await self._play(request, index, prompts)
            except (ConfigError, PluginError) as error:
                # Wrong for every sample, and not the model's doing: the run ends.
                raise type(error)(f"{request.row_place}: {error}") from error
            except Exception as error:
                # One rollout's failure is data; the loop stops when a whole batch fails.
                return Trajectory(
                    group_id=request.group_id,
                    sample_index=index,
                    steps=(),
                    prompt_text=str(request.row.get("prompt", "")),
                    response_text="",
                    start_version=request.start_version,
                    failure=f"{request.row_place}: {type(error).__name__}: {error}",
                )

    async def _play(self, request: GroupRequest, index: int, prompts: _GroupPrompts) -> Trajectory:
        factory = self._episodes.environment_of(request.row)
        environment = factory(request.row, self._episodes.environment_options)
        try:
            prompt = await environment.reset()
            prompt_tokens, prompt_text = prompts.encode(prompt)
            completion = await self._sample(request, index, prompt_tokens)
            response_text = self._codec.response_text(completion.tokens)
            action = Action(text=response_text, tokens=completion.tokens, stop_reason=completion.stop_reason)
            result = _checked(await environment.step(action))
        finally:
            await environment.close()
        reward = 0.0 if self._episodes.zero_reward_on_non_stop and completion.stop_reason != "stop" else result.reward
        return Trajectory(
            group_id=request.group_id,
            sample_index=index,
            steps=(_trajectory_step(prompt_tokens, completion, reward),),
            prompt_text=prompt_text,
            response_text=response_text,
            start_version=request.start_version,
            metrics=result.metrics,
        )

    async def _sample(self, request: GroupRequest, index: int, prompt_tokens: tuple[int, ...]) -> Completion:
        session_id = f"{self._name}-{next(self._numbers)}"
        (completion,) = await self._client.generate(
            GenerateRequest(
                sample_id=f"{session_id}-0",
                session_id=session_id,
                prompt_tokens=prompt_tokens,
                params=request.params,
                seed=sample_seed(request.seed, request.group_id, index),
            )
        )
        if not completion.tokens:
            raise GenerationError(f"the request ended before its first token (stop reason {completion.stop_reason!r})")
        return completion


class _GroupPrompts:
    """Encodes each distinct prompt of a group once: nearly always all samples start alike."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._known: list[tuple[Prompt, tuple[int, ...], str]] = []

    def encode(self, prompt: Prompt) -> tuple[tuple[int, ...], str]:
        """Token ids, and the text that the policy sees."""
        for known, tokens, text in self._known:
            if known == prompt:
                return tokens, text
        tokens = self._codec.encode(prompt)
        text = self._codec.prompt_text(prompt, tokens)
        self._known.append((prompt, tokens, text))
        return tokens, text


def sample_seed(seed: int, group_id: int, sample_index: int) -> int:
    """63 bits that depend on all three, the same on every machine and in every version of Python."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise DataError(f"the environment's step returned {type(result).__name__}, expected StepResult")
    if not result.done:
        raise DataError(
            "the environment wants another turn (done=False); the `environment` generator plays one turn per episode"
        )
    if not isinstance(result.metrics, Mapping):
        raise DataError(f"the environment's metrics are {type(result.metrics).__name__}, expected a mapping")
    metrics = {name: _number(value, f"metric {name!r}") for name, value in result.metrics.items()}
    if taken := _TAKEN_METRICS & metrics.keys():
        raise DataError(f"the environment's metric {min(taken)!r} has a name that the trainer uses; give it another")
    return attrs.evolve(result, reward=_number(result.reward, "reward"), metrics=metrics)


def _number(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _FLOAT32_MAX:
        raise DataError(f"the environment's {name} is {value!r:.80}, expected a finite number (of float32's range)")
    return number


def _trajectory_step(prompt_tokens: tuple[int, ...], completion: Completion, reward: float) -> TrajectoryStep:
    num_prompt, num_sampled = len(prompt_tokens), len(completion.tokens)
    return TrajectoryStep(
        tokens=prompt_tokens + completion.tokens,
        sampled=(False,) * num_prompt + (True,) * num_sampled,
        rollout_logprobs=(0.0,) * num_prompt + completion.logprobs,
        policy_version=(-1,) * num_prompt + completion.policy_versions,
        reward=reward,
        stop_reason=completion.stop_reason,
        routed_experts=completion.routed_experts,
    )


def create_generator(config: Config, client: InferenceClient) -> EnvironmentGenerator:
    """The entry point `environment`.

    Raises:
        ConfigError: a model without a tokenizer.
        PluginError: an unknown environment.
    """
    return EnvironmentGenerator(
        client,
        TokenCodec(
            load_tokenizer(config.policy_model_path), chat_template_kwargs=config.generator.chat_template_kwargs
        ),
        Episodes(
            environment_of=_environment_of(config.environment.env_class),
            environment_options=config.environment.options,
            max_concurrency=config.generator.max_concurrency,
            zero_reward_on_non_stop=config.generator.zero_reward_on_non_stop,
        ),
    )


def _environment_of(env_class: str | None) -> Callable[[Row], EnvironmentFactory]:
    if env_class is None:
        return _row_environment
    factory: EnvironmentFactory = plugins.load("rl_core.environments", env_class, key="environment.env_class")
    return lambda row: factory


def _row_environment(row: Row) -> EnvironmentFactory:
    if not row.get("env_class"):
        raise ConfigError("environment.env_class is not set and the row has no 'env_class'; give one of the two")
    return plugins.load("rl_core.environments", row["env_class"], key="the row's env_class")
