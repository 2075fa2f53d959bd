"""Builds the prompt of a later turn from the conversation so far.

`TextHistory` and `ChatHistory` only append: each prompt begins with the previous prompt and the response that was
sampled for it, so a whole episode is one sequence. `RenderedHistory` serves templates that change earlier turns: most
templates of thinking models drop the thinking. `RenderedHistory` appends if the template leaves the earlier turns
unchanged and the response ends as the template ends a turn. Otherwise the next prompt is a new rendering of the
conversation and begins a new sequence. In every case,
training uses the tokens that the engine sampled, and rendered tokens are used only in prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import Message, Prompt, opened_thought, require_observed_messages, require_observed_text
from rl_rollout.observations import require_shown
from rl_rollout.turn_tokens import TurnTokens

Tokens = tuple[int, ...]


class History(Protocol):
    """Builds the prompts of one episode."""

    def next_prompt(self, prompt: Tokens, response: Tokens, observation: Prompt | None) -> Tokens:
        """Returns the engine's next prompt, after the engine answered `prompt` with `response` and the environment
        answered with `observation`.

        Raises:
            DataError: the observation does not fit the conversation.
            ConfigError: the template changes earlier turns, but the episode has to be one sequence.
        """
        ...

    def opening(self, prompt: Tokens, before: str) -> str:
        """Returns the text with which a prompt opens the response (`Action.opening`).

        Args:
            prompt: the whole prompt, or its part after the previous response if the prompt continues that response.
            before: the opening and the text of the previous response; "" if there is none.
        """
        ...


def start_history(turns: TurnTokens, prompt: Prompt, *, step_wise: bool) -> History:
    """Starts the conversation that `prompt` opens.

    Args:
        turns: encodes the text between two responses, with the tools of this conversation.
        step_wise: whether an episode may be several sequences, so that the template may change earlier turns.
    """
    if isinstance(prompt, str):
        return TextHistory(turns)
    return RenderedHistory(turns, prompt) if step_wise else ChatHistory(turns, prompt)


def require_unchanged(change: str | None) -> None:
    """Raises ConfigError if the template changes earlier turns (`TurnTokens.how_it_changes`)."""
    if change:
        raise ConfigError(
            f"the model's chat template {change}, so an episode of several turns is not one sequence: set "
            "generator.step_wise_trajectories=true, so that each such change begins a new sequence, or give the "
            "model a chat_template.jinja that keeps earlier turns and ends each with the same special token"
        )


class TextHistory:
    """Builds prompts of text without a template: appends each observation unchanged."""

    def __init__(self, turns: TurnTokens) -> None:
        self._codec = turns.codec
        self._openings = turns.openings

    def next_prompt(self, prompt: Tokens, response: Tokens, observation: Prompt | None) -> Tokens:
        return prompt + response + self._codec.encode_text(require_observed_text(observation))

    def opening(self, prompt: Tokens, before: str) -> str:
        return self._openings.of_text(prompt, before)


class ChatHistory:
    """Builds prompts of messages for a template that leaves earlier turns unchanged."""

    def __init__(self, turns: TurnTokens, opening: Sequence[Message]) -> None:
        self._turns = turns
        self._opening = opening

    def next_prompt(self, prompt: Tokens, response: Tokens, observation: Prompt | None) -> Tokens:
        messages = require_observed_messages(observation)
        require_unchanged(self._turns.how_it_changes(self._opening, messages))
        # A response may end with a special token that the template does not write there. It was sampled and is trained
        # on, so it stays, and the template's own end follows it.
        return prompt + response + self._turns.between(response, messages)[0]

    def opening(self, prompt: Tokens, before: str) -> str:
        return _behind_message(self._turns.openings.of_chat(prompt), self._opening[-1])


class RenderedHistory:
    """Builds prompts of messages for any template. If the template changes an earlier turn, begins a new sequence."""

    def __init__(self, turns: TurnTokens, opening: Sequence[Message]) -> None:
        self._codec = turns.codec
        self._turns = turns
        self._opening = opening
        self._messages = list(opening)
        self._is_known = True
        """Whether the texts of all answers are known."""

    def next_prompt(self, prompt: Tokens, response: Tokens, observation: Prompt | None) -> Tokens:
        messages = require_observed_messages(observation)
        said = self._turns.said(response)
        self._is_known = self._is_known and said is not None
        text = self._turns.text_of(response)
        said = text if said is None else said
        before = self._codec.render(self._messages) + text
        self._messages += [{"role": "assistant", "content": said}, *messages]
        change = self._turns.how_it_changes(self._opening, messages)
        if not change:
            following, is_exact = self._turns.between(response, messages)
            if is_exact:
                return prompt + response + following
        if self._turns.placeholders.needs_calls(messages):
            raise ConfigError(
                f"the model's chat template {change}, and shows the results of tools only after calls in its own "
                "format. Earlier turns are rendered again from their text, which has no such calls: let the "
                "environment answer with messages of the role user, or give the model a chat_template.jinja that keeps "
                "earlier turns or shows results after text"
            )
        text = self._codec.render(self._messages)
        if text.startswith(before):
            following, is_exact = self._turns.behind(before, response, text[len(before) :])
            if is_exact:
                return prompt + response + following
        if not self._is_known:
            raise DataError(
                f"the chat template writes {self._turns.marked_header!r} before the text of an answer, and changes "
                "earlier turns, but a response has no such text, so it cannot be rendered again"
            )
        require_shown(text, messages)
        return self._codec.encode_text(text)

    def opening(self, prompt: Tokens, before: str) -> str:
        return _behind_message(self._turns.openings.of_chat(prompt), self._messages[-1])


def _behind_message(opening: str, last: Message) -> str:
    """Returns an opening if the last message before the response is not in it. Else the template lets an earlier turn
    continue, as Gemma 4's does after results of tools, and only a mark of thinking at the end opens the response."""
    content = (last.get("content") or "").strip()
    is_earlier = last["role"] != "assistant" and content and content in opening
    return opened_thought(opening) if is_earlier else opening
