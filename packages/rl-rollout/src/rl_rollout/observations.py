"""Finds what a chat template writes after a response, and requires that it contains the observation.

Some templates, such as five of the six of Gemma 4, write the results of tools only after a message with calls. Then
the fixed conversation in which the observation is rendered (`turn_tokens`) has a call for each result, and the policy's
turn ends where the template ends a turn with calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EXAMPLE_CALL, Message
from rl_rollout.chat import TokenCodec
from rl_rollout.rendering_proof import kind_of, require_complete
from rl_rollout.turn_ends import ASKED, REPLACES_SAID, SAID

NEEDS_CALLS = (
    "the model's chat template shows the results of tools only after calls in its own format, which the response does "
    "not end with: let the environment parse this format, answer with messages of the role user, or give the model "
    "another chat_template.jinja"
)


class PlaceholderTurns:
    """The fixed turn of the policy after which observations of one kind are rendered."""

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._calls: dict[Hashable, bool] = {}

    def knows(self, observation: Sequence[Message]) -> bool:
        """Whether an observation of this kind was rendered before."""
        return kind_of(observation) in self._calls

    def before(self, observation: Sequence[Message], said: str = SAID) -> Message:
        """Returns the turn before an observation: text, or calls if the template needs them to show the observation.
        Raises ConfigError if the template does not show it after either."""
        plain: Message = REPLACES_SAID if said == SAID else {"role": "assistant", "content": said}
        return _calling(observation) if self.needs_calls(observation) else plain

    def needs_calls(self, observation: Sequence[Message]) -> bool:
        """Whether the template shows the observation only after calls. Raises ConfigError as `before` does."""
        kind = kind_of(observation)
        if kind not in self._calls:
            fault = self._fault(REPLACES_SAID, observation)
            has_results = any(message["role"] == "tool" for message in observation)
            if fault is not None and not (has_results and self._fault(_calling(observation), observation) is None):
                raise ConfigError(f"an observation of the environment: {fault}") from fault
            self._calls[kind] = fault is not None
        return self._calls[kind]

    def _fault(self, turn: Message, observation: Sequence[Message]) -> DataError | None:
        try:
            require_complete(lambda messages, tools: self._codec.render(messages), [ASKED, turn, *observation])
        except DataError as error:
            return error
        # Mistral's template counts turns of text, but not those with calls: it lets an answer follow only after calls.
        if observation[-1]["role"] == "tool" and not self._is_answered(turn, observation):
            called = self._is_answered(_calling(observation), observation)
            return DataError("the chat template lets no answer follow results of tools after text") if called else None
        return None

    def _is_answered(self, turn: Message, observation: Sequence[Message]) -> bool:
        """Whether the template renders the policy's answer to results of tools after this turn."""
        try:
            self._codec.render([ASKED, turn, *observation, REPLACES_SAID], add_generation_prompt=False)
        except DataError:
            return False
        return True


def require_shown(text: str, observation: Sequence[Message]) -> None:
    """Raises DataError if the rendered text lacks the text of a message. The template shows messages of this kind, but
    it may treat certain texts differently."""
    for message in observation:
        if message["content"].strip() not in text:
            raise DataError(
                f"the model's chat template does not show the observation {message['content']!r:.80} "
                f"({message['role']}) unchanged: give the model a chat_template.jinja that does"
            )


def _calling(observation: Sequence[Message]) -> Message:
    """A turn with one call for each result in the observation."""
    results = [message for message in observation if message["role"] == "tool"]
    return {"role": "assistant", "content": "", "tool_calls": [_call_of(result) for result in results]}


def _call_of(result: Message) -> dict[str, Any]:
    function = {"name": result.get("name") or EXAMPLE_CALL["function"]["name"], "arguments": {"word": SAID}}
    return {**EXAMPLE_CALL, "id": result.get("tool_call_id") or EXAMPLE_CALL["id"], "function": function}
