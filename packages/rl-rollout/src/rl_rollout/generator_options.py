"""The keys of `generator` that only the generators of this package read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rl_core.interfaces import at_least


@attrs.frozen(kw_only=True)
class EnvironmentGeneratorOptions:
    """The generator that plays episodes of environments."""

    max_concurrency: int = attrs.field(default=1024, validator=at_least(1))
    """Maximum number of episodes that run at a time."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to the tokenizer's chat template, e.g. `enable_thinking`."""
    zero_reward_on_non_stop: bool = False
    """An episode gets reward 0 if its last response did not end by itself, or if it had no tokens left for another
    turn."""


def _some(_: object, attribute: attrs.Attribute[Any], names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"{attribute.name}: got []; expected at least one, e.g. [assistant]")


@attrs.frozen(kw_only=True)
class DatasetGeneratorOptions:
    """The generator that takes responses from the rows, for supervised fine-tuning and preference learning."""

    responses: Literal["completion", "pair"] = "completion"
    """`completion`: a row has one response, in the assistant's messages of `messages`, in the column `response_key`
    next to `prompt`, or in the marked tokens of `input_ids`. `pair`: a row has a preferred response in `chosen` and
    another in `rejected`."""
    response_key: str = "completion"
    """Column with the response to `prompt`, as text or messages."""
    trained_roles: tuple[str, ...] = attrs.field(default=("assistant",), validator=_some)
    """Roles whose messages are trained on. In a message of the assistant, training begins at the token where the
    policy would begin to sample; a message of another role is trained on in full, with the header that the template
    writes. The first token of a sequence is never trained on, because nothing precedes it."""
    trained_turns: Literal["all", "last"] = "all"
    """Which messages of the `trained_roles` are trained on."""
    scored_at_end: bool = False
    """Append one end-of-sequence token to each response and train only on it. A value head's prediction there depends
    on the whole response: it is the score that a reward model gives."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to the tokenizer's chat template."""
