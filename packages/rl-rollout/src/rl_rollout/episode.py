"""Plays one episode: the policy and an environment take turns until the environment or a limit ends the episode."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import attrs
import numpy as np

from rl_core.errors import DataError
from rl_core.interfaces import (
    Action,
    Completion,
    KeptTokens,
    StepResult,
    TrajectoryEnd,
    TrajectoryStep,
    Turn,
    require_observed_messages,
    require_step_result,
)
from rl_rollout.conversation import History, Tokens
from rl_rollout.environment_pool import EnvironmentCalls

_TAKEN_METRICS = {"reward", "response_length", "failed"}


@attrs.frozen(kw_only=True)
class Limits:
    """Limits that end an episode before its environment does."""

    max_turns: int = 1
    """Maximum number of responses of an episode. With 1, an environment that wants another turn is an error."""
    max_input_length: int | None = None
    """Maximum number of tokens of a later turn's prompt; None: no separate limit."""
    context_window: int | None = None
    """Maximum number of tokens of prompt and response together; None: unknown, so only the engine enforces it."""
    environment_timeout_s: float = 300.0
    """Deadline of each call to the environment."""

    def room(self, prompt: Tokens) -> float:
        """Returns how many tokens the response to a later turn's prompt may have; if below 1, the turn cannot be
        played."""
        if self.max_input_length is not None and len(prompt) > self.max_input_length:
            return 0
        return math.inf if self.context_window is None else self.context_window - len(prompt)


@attrs.frozen(kw_only=True, eq=False)
class PlayedTurn:
    """One turn: the prompt, the policy's response, and the environment's result."""

    prompt: Tokens
    completion: Completion
    result: StepResult
    text: Turn
    is_forced: bool
    """Whether a grammar constrained the response."""


@attrs.frozen(kw_only=True, eq=False)
class Episode:
    """An episode that was played to its end."""

    turns: tuple[PlayedTurn, ...]
    """All turns; there is at least one."""
    end: TrajectoryEnd

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's metrics of all turns; a later turn's value replaces an earlier one of the same name."""
        return {name: value for turn in self.turns for name, value in turn.result.metrics.items()}


Respond = Callable[[int, Tokens, float, str | None], Awaitable[Completion]]
"""(turn, prompt, room, structural tag) → the policy's response, of at most `room` tokens."""


async def play(
    environment: EnvironmentCalls,
    history: History,
    prompt: Tokens,
    *,
    respond: Respond,
    text_of: Callable[[Tokens], str],
    limits: Limits,
    example_call: str | None = None,
) -> Episode:
    """Plays an episode.

    Args:
        environment: the environment, after its `reset`.
        history: builds the prompts of later turns.
        prompt: the first prompt.
        respond: samples the policy's responses.
        text_of: decodes a response for the environment.
        limits: limits that may end the episode early.
        example_call: see `Action`.

    Raises:
        DataError: the environment's answer violates its contract, the chat template refuses it, or the environment
            wants another turn although `max_turns` is 1.
        ConfigError: the chat template cannot be used for several turns in one sequence.
        EnvironmentFailure: the environment raised, or its process or thread ended.
        DeadlineError: the environment did not answer in time.
        Exception: any error of `respond`.
    """
    turns: list[PlayedTurn] = []
    room: float = math.inf
    opening = history.opening(prompt, "")
    while True:
        structural_tag = await environment.structural_tag(example_call)
        completion = await respond(len(turns), prompt, room, structural_tag)
        said = text_of(completion.tokens)
        action = Action(
            text=said,
            tokens=completion.tokens,
            stop_reason=completion.stop_reason,
            example_call=example_call,
            opening=opening,
        )
        result = _checked(await environment.step(action))
        following, end = _what_follows(result, history, prompt, completion, len(turns) + 1, limits)
        shown = None if end else _shown(result)
        text = Turn(response=said, observation=shown, reward=result.reward, stop_reason=completion.stop_reason)
        is_forced = structural_tag is not None
        turns.append(PlayedTurn(prompt=prompt, completion=completion, result=result, text=text, is_forced=is_forced))
        if end:
            return Episode(turns=tuple(turns), end=end)
        played = prompt + completion.tokens
        added = following[len(played) :] if following[: len(played)] == played else following
        opening = history.opening(added, opening + said)
        prompt, room = following, limits.room(following)


def _what_follows(
    result: StepResult, history: History, prompt: Tokens, completion: Completion, num_turns: int, limits: Limits
) -> tuple[Tokens, TrajectoryEnd | None]:
    """Returns the next turn's prompt and None. If the episode ends, returns an unused prompt and the reason."""
    if result.done:
        return (), "done"
    if limits.max_turns == 1:
        raise DataError(
            "the environment wants another turn (done=False), but generator.max_turns is 1; raise it to the number of "
            "turns that an episode may have"
        )
    if num_turns == limits.max_turns:
        return (), "max_turns"
    following = history.next_prompt(prompt, completion.tokens, result.observation)
    return following, ("context" if limits.room(following) < 1 else None)


# --- checks of an environment's answer ------------------------------------------------------------------------------


def _checked(result: object) -> StepResult:
    checked = require_step_result(result)
    if taken := _TAKEN_METRICS & checked.metrics.keys():
        raise DataError(f"the environment's metric {min(taken)!r} has a name that the trainer uses; rename it")
    return checked


def _shown(result: StepResult) -> str | None:
    if result.observation is None or isinstance(result.observation, str):
        return result.observation
    return "\n".join(message["content"] for message in require_observed_messages(result.observation))


# --- turns as sequences ---------------------------------------------------------------------------------------------


def one_sequence_per_turn(turns: tuple[PlayedTurn, ...]) -> tuple[TrajectoryStep, ...]:
    """Makes one sequence of each turn: its prompt and its response, as the engine saw them."""
    return tuple(_sequence((turn,)) for turn in turns)


def one_sequence(turns: tuple[PlayedTurn, ...]) -> tuple[TrajectoryStep, ...]:
    """Makes one sequence of the whole episode. Each turn's prompt must begin with the previous prompt and response."""
    return (_sequence(turns),)


def _sequence(turns: tuple[PlayedTurn, ...]) -> TrajectoryStep:
    tokens: list[int] = []
    sampled: list[bool] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    rewards: list[float] = []
    routes: np.ndarray | None = None
    kept: list[KeptTokens] = []
    for turn in turns:
        assert list(turn.prompt[: len(tokens)]) == tokens, "a turn's prompt must begin with the tokens before it"
        given, completion = turn.prompt[len(tokens) :], turn.completion
        tokens += given + completion.tokens
        sampled += [False] * len(given) + [True] * len(completion.tokens)
        trained += [False] * len(given) + [not turn.is_forced] * len(completion.tokens)
        # An engine's log-probs of a forced response belong to the constrained distribution, not to the policy.
        unknown = [math.nan] * len(completion.tokens)
        logprobs += [0.0] * len(given) + (unknown if turn.is_forced else list(completion.logprobs))
        versions += [-1] * len(given) + list(completion.policy_versions)
        rewards += [0.0] * (len(given) + len(completion.tokens) - 1) + [turn.result.reward]
        routes = _newest_routes(routes, completion.routed_experts)
        if completion.kept_tokens is not None:
            of_turn = KeptTokens.none(len(completion.tokens)) if turn.is_forced else completion.kept_tokens
            kept += [KeptTokens.none(len(given)), of_turn]
    return TrajectoryStep(
        tokens=tokens,
        sampled=sampled,
        rollout_logprobs=logprobs,
        policy_version=versions,
        reward=sum(turn.result.reward for turn in turns),
        stop_reason=turns[-1].completion.stop_reason,
        routed_experts=routes,
        kept_tokens=KeptTokens.joined(kept) if kept else None,
        token_rewards=rewards if len(turns) > 1 else None,
        loss_mask=trained if any(turn.is_forced for turn in turns) else None,
    )


def _newest_routes(known: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """Returns the routes of the sequence so far. `new`, the routes of a later turn, also covers the tokens of earlier
    turns, and replaces the `known` routes of those tokens."""
    if known is None or new is None:
        return known if new is None else new
    return new if len(new) >= len(known) else np.concatenate([new, known[len(new) :]])
