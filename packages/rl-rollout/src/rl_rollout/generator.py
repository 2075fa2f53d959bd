"""Implements the `environment` generator: an engine and an environment play episodes turn by turn.

The engine receives and returns token ids, and the trajectory keeps the sampled ids unchanged. The environment receives
them decoded to text. This text is encoded again only for the prompt of a new sequence (`RenderedHistory`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError, DataError, GenerationError, PluginError
from rl_core.interfaces import (
    Completion,
    Environment,
    GenerateRequest,
    Generator,
    GeneratorSpec,
    GroupRequest,
    PlacementKind,
    Prompt,
    Row,
    Sampler,
    SamplingParams,
    ToolSchema,
    Trajectory,
    require_messages,
)
from rl_core.seeds import seed_of
from rl_core.tasks import all_of, code_of
from rl_rollout.chat import TokenCodec, codec_of
from rl_rollout.conversation import Tokens, require_unchanged, start_history
from rl_rollout.environment_calls import EnvironmentFailure
from rl_rollout.environment_pool import EnvironmentPool, HangingThreads
from rl_rollout.episode import Episode, Limits, one_sequence, one_sequence_per_turn, play
from rl_rollout.generator_options import EnvironmentGeneratorOptions
from rl_rollout.resuming import whole_response
from rl_rollout.row_settings import tools_of
from rl_rollout.turn_ends import stop_tokens, template_ends
from rl_rollout.turn_tokens import TurnTokens

_MOST_TOOL_SETS = 256
"""Maximum number of tool sets whose rendered turns are cached; an environment may offer each row its own tools."""


@attrs.frozen(kw_only=True)
class Episodes:
    """Settings shared by all episodes of a run."""

    environment_of: Callable[[Row], type[Environment]]
    """Returns the class of a row's environment. Raises an RLError for a row that names no known environment."""
    environment_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options that every environment receives."""
    limits: Limits = attrs.field(factory=Limits)
    """Maximum numbers of turns and tokens, and the deadline of calls to the environment."""
    step_wise: bool = False
    """True: a trajectory has one sequence per turn. False: it is one sequence, and the template must not change earlier
    turns."""
    max_concurrency: int = 1024
    """Maximum number of episodes that run at a time."""
    environment_placement: PlacementKind | None = None
    """Placement of all environments; None: `Environment.placement`."""
    environment_workers: int | None = None
    """Maximum number of environment threads or processes; None: the default of `EnvironmentPool`."""
    zero_reward_on_non_stop: bool = False
    """Whether an episode gets reward 0 if its last response did not end by itself, or if there was no room for another
    response."""


class EnvironmentGenerator(Generator):
    """Plays one episode, of one or several turns, for each sample.

    Responses in conversations end at the tokens with which the chat template ends a turn, in addition to those of the
    model's configuration and tokenizer. `stop_tokens` is written into the exported generation configuration.
    """

    def __init__(self, client: Sampler, codec: TokenCodec, episodes: Episodes) -> None:
        self._client = client
        self._codec = codec
        self._turns_with = lru_cache(_MOST_TOOL_SETS)(self._turns_with_tools)
        self._ends = template_ends(codec)
        self.stop_tokens = stop_tokens(codec)
        self._episodes = episodes
        self._free = asyncio.Semaphore(episodes.max_concurrency)
        self._environments = EnvironmentPool(
            placement=episodes.environment_placement,
            num_workers=episodes.environment_workers,
            max_episodes=episodes.max_concurrency,
        )
        self._name = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    def prompt_length(self, row: Row) -> int:
        """See `Generator.prompt_length`."""
        if "prompt" not in row:
            raise DataError(f"the row has no column 'prompt'; it has {', '.join(map(str, row)) or 'none'}")
        if isinstance(tokens := row.get("input_ids"), list) and row["prompt"] == f"{len(tokens)} token ids":
            raise DataError(
                "the row has token ids ('input_ids'), but no prompt that an environment could begin with; add a column "
                "'prompt', or train on the tokens with generator.type=dataset"
            )
        return len(self._turns(row, self._known_tools(row)).codec.encode(row["prompt"]))

    def may_have_unknown_tokens(self, row: Row) -> bool:
        """See `Generator.may_have_unknown_tokens`."""
        return self._codec.may_be_unknown(row.get("prompt"))

    def prove(self, row: Row, *, anew: bool) -> int:
        """Requires that the template renders the row's prompt, the tools of its environment and an observation
        completely, as far as `Environment.preview` knows the two. Without them, episodes of several turns in one
        sequence still require that all turns end alike. See `Generator`."""
        prompt = row.get("prompt")
        if isinstance(prompt, str) or self._codec.tokenizer.chat_template is None:
            return 0
        environment, options = self._episodes.environment_of(row), self._episodes.environment_options
        shown = environment.preview(row, options, lambda tools: self._turns(row, tools).example_call)
        tools, turn = shown or (self._known_tools(row), ())
        turns, messages = self._turns(row, tools), require_messages(prompt, "a prompt")
        self._codec.proofs.anew = anew
        turns.codec.prove(messages)
        self._codec.proofs.anew = False
        said, *observation = turn or ({},)
        if turn and self._episodes.limits.max_turns > 1 and not turns.placeholders.knows(observation):
            end = turns.ends.call if "tool_calls" in said else turns.ends.text
            history = start_history(turns, messages, step_wise=self._episodes.step_wise)
            history.next_prompt((), () if end is None else (end,), observation)
        elif self._episodes.limits.max_turns > 1 and not self._episodes.step_wise:
            require_unchanged(turns.other_ends)
        return len(self._codec.proofs.kinds)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """See `Generator.generate`. Samples of a group run concurrently."""
        prompts = _GroupPrompts()
        episodes = (self._play_or_fail(request, index, prompts) for index in range(request.num_samples))
        return tuple(await all_of(episodes))

    async def aclose(self) -> None:
        """See `Generator.aclose`."""
        await self._environments.aclose()

    async def _play_or_fail(self, request: GroupRequest, index: int, prompts: _GroupPrompts) -> Trajectory:
        async with self._free:
            try:
                return await self._play(request, index, prompts)
            except (ConfigError, PluginError, HangingThreads) as error:
                # Such an error is not the model's fault and may affect other samples too, so the run ends.
                raise type(error)(f"{request.row_place}: {error}") from error
            except EnvironmentFailure as error:
                return _failed(request, index, error.kind, str(error))
            except Exception as error:
                return _failed(request, index, type(error).__name__, f"{type(error).__name__}: {error}")

    async def _play(self, request: GroupRequest, index: int, prompts: _GroupPrompts) -> Trajectory:
        factory, limits = self._episodes.environment_of(request.row), self._episodes.limits
        session_id = f"{self._name}-{next(self._numbers)}"

        async def respond(turn: int, prompt: Tokens, room: float, structural_tag: str | None) -> Completion:
            params = attrs.evolve(request.params, structural_tag=structural_tag)
            if room < params.max_tokens:
                params = attrs.evolve(params, max_tokens=int(room))
            if is_chat and not params.ignore_eos:
                params = attrs.evolve(params, stop_token_ids=(*params.stop_token_ids, *self._ends))
            return await self._response(request, index, session_id, turn, prompt, params)

        async with self._environments.opened(
            factory, request.row, self._episodes.environment_options, limits.environment_timeout_s
        ) as environment:
            prompt = await environment.reset()
            is_chat = not isinstance(prompt, str)
            if not isinstance(prompt, str):
                prompt = require_messages(prompt, "the environment's first prompt")
            tools = _shown_tools(request.row, await environment.tools())
            turns = self._turns(request.row, tools)
            tokens, prompt_text = prompts.encode(prompt, turns.codec)
            history = start_history(turns, prompt, step_wise=self._episodes.step_wise)
            episode = await play(
                environment,
                history,
                tokens,
                respond=respond,
                text_of=turns.text_of,
                limits=limits,
                example_call=turns.example_call if tools else None,
            )
        return self._trajectory(request, index, episode, prompt_text)

    def _known_tools(self, row: Row) -> Sequence[ToolSchema]:
        """The tools of the row's column, unless its environment may read the column and offer tools in an episode."""
        if row.get("tools") is None or self._episodes.environment_of(row).offers_tools:
            return ()
        return tools_of(row)

    def _turns(self, row: Row, tools: Sequence[ToolSchema]) -> TurnTokens:
        # Serialized, because a cache key must be hashable and must not change later.
        return self._turns_with(json.dumps([list(tools), self._codec.settings_of(row)]))

    def _turns_with_tools(self, key: str) -> TurnTokens:
        tools, settings = json.loads(key)
        return TurnTokens(self._codec.with_tools(tools).with_settings(settings))

    async def _response(
        self, request: GroupRequest, index: int, session_id: str, turn: int, prompt: Tokens, params: SamplingParams
    ) -> Completion:
        asked = GenerateRequest(
            sample_id=f"{session_id}-{turn}",
            session_id=session_id,
            prompt_tokens=prompt,
            params=params,
            seed=sample_seed(request.seed, request.group_id, index, turn),
        )
        with code_of(f"the engine client {type(self._client).__name__}"):
            completion = await whole_response(self._client, asked, self._codec.tokenizer)
        if not completion.tokens:
            raise GenerationError(f"the request ended before its first token (stop reason {completion.stop_reason!r})")
        return completion

    def _trajectory(self, request: GroupRequest, index: int, episode: Episode, prompt_text: str) -> Trajectory:
        to_steps = one_sequence_per_turn if self._episodes.step_wise else one_sequence
        trajectory = Trajectory(
            group_id=request.group_id,
            sample_index=index,
            steps=to_steps(episode.turns),
            prompt_text=prompt_text,
            response_text=_transcript(episode),
            start_version=request.start_version,
            turns=tuple(turn.text for turn in episode.turns),
            end=episode.end,
            metrics=episode.metrics,
        )
        stopped = trajectory.steps[-1].stop_reason == "stop" and not trajectory.is_cut
        return trajectory if stopped or not self._episodes.zero_reward_on_non_stop else _without_reward(trajectory)


def _shown_tools(row: Row, offered: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
    """Returns the functions that the template shows: the environment's, else the row's. Raises DataError if the row has
    others than the environment, which could not answer their calls."""
    if not offered:
        return tools_of(row)
    try:
        named = [tool["function"]["name"] for tool in tools_of(row)]
    except DataError:
        return offered  # the column has another meaning for the environment
    names = [tool["function"]["name"] for tool in offered]
    if others := [name for name in named if name not in names]:
        raise DataError(
            f"the row's 'tools' have {others[0]!r}, which its environment does not offer ({', '.join(names)}); remove "
            "or rename the column, or choose an environment that offers the row's tools"
        )
    return offered


def _transcript(episode: Episode) -> str:
    lines = []
    for turn in episode.turns:
        lines.append(turn.text.response)
        if turn.text.observation is not None:
            lines.append(f"→ {turn.text.observation}")
    return "\n".join(lines)


def _failed(request: GroupRequest, index: int, kind: str, text: str) -> Trajectory:
    """Returns the trajectory of a failed sample, which has no tokens; the training loop stops if too many fail."""
    return Trajectory(
        group_id=request.group_id,
        sample_index=index,
        steps=(),
        prompt_text=str(request.row.get("prompt", "")),
        response_text="",
        start_version=request.start_version,
        failure=f"{request.row_place}: {text}",
        failure_kind=kind,
    )


def _without_reward(trajectory: Trajectory) -> Trajectory:
    steps = (attrs.evolve(step, reward=0.0, token_rewards=None) for step in trajectory.steps)
    return attrs.evolve(trajectory, steps=tuple(steps))


def sample_seed(seed: int, group_id: int, sample_index: int, turn: int = 0) -> int:
    """Returns the random seed of one turn of one sample."""
    return seed_of(seed, group_id, sample_index, *([turn] if turn else []))


class _GroupPrompts:
    """Encodes each distinct prompt of a group only once, because nearly always all samples have the same prompt."""

    def __init__(self) -> None:
        self._known: list[tuple[Prompt, TokenCodec, Tokens, str]] = []

    def encode(self, prompt: Prompt, codec: TokenCodec) -> tuple[Tokens, str]:
        """Returns the prompt's token ids, and its text as the policy sees it."""
        for known, its_codec, tokens, text in self._known:
            if its_codec is codec and known == prompt:
                return tokens, text
        tokens, text = codec.encode_with_text(prompt)
        self._known.append((prompt, codec, tokens, text))
        return tokens, text


def create_generator(spec: GeneratorSpec, client: Sampler) -> EnvironmentGenerator:
    """Creates the generator of a run; `spec.options` must be `EnvironmentGeneratorOptions`.

    Raises:
        ConfigError: the model has no usable tokenizer.
        PluginError: `spec.env_class` names an unknown environment.
    """
    options: EnvironmentGeneratorOptions = spec.options
    return EnvironmentGenerator(
        client,
        codec_of(
            spec.model_path,
            chat_template_kwargs=options.chat_template_kwargs,
            add_special_tokens=spec.add_special_tokens,
        ),
        Episodes(
            environment_of=_environment_of(spec.env_class),
            environment_options=spec.environment_options,
            limits=Limits(
                max_turns=spec.max_turns,
                max_input_length=spec.max_input_length,
                context_window=context_window(spec),
                environment_timeout_s=spec.environment_timeout_s,
            ),
            step_wise=spec.step_wise,
            max_concurrency=options.max_concurrency,
            environment_placement=spec.environment_placement,
            environment_workers=spec.environment_workers,
            zero_reward_on_non_stop=options.zero_reward_on_non_stop,
        ),
    )


def context_window(spec: GeneratorSpec) -> int | None:
    """Returns the engine's maximum sequence length: its `max_model_len` if that is configured, else the model's number
    of positions; None if neither is known. A value of -1 counts as not configured, because vLLM then chooses the
    length."""
    from transformers import AutoConfig

    limit = spec.engine_init_kwargs.get("max_model_len")
    if isinstance(limit, int) and limit > 0:
        return limit
    text_config: Any = AutoConfig.from_pretrained(spec.model_path).get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None)


def _environment_of(env_class: str | None) -> Callable[[Row], type[Environment]]:
    if env_class is None:
        return _row_environment
    environment: type[Environment] = plugins.load("rl_core.environments", env_class, key="environment.env_class")
    return lambda row: environment


def _row_environment(row: Row) -> type[Environment]:
    if not row.get("env_class"):
        raise ConfigError("environment.env_class is not set and the row has no 'env_class'; set one of the two")
    return plugins.load("rl_core.environments", row["env_class"], key="the row's env_class")
