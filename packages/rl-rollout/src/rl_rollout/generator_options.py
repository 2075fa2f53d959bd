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
    """Episodes that run at a time."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to the tokenizer's chat template, e.g. `enable_thinking`."""
    zero_reward_on_non_stop: bool = False
    """A response that did not end by itself gets reward 0."""


def _some(_: object, attribute: attrs.Attribute[Any], names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"{attribute.name}: got []; expected at least one, e.g. [assistant]")


@attrs.frozen(kw_only=True)
class DatasetGeneratorOptions:
    """The generator whose responses are the rows' own: supervised fine-tuning, and preferences."""

    responses: Literal["completion", "pair"] = "completion"
    """`completion`: a row has one response: the assistant's messages of `messages`, the column `response_key` beside
    `prompt`, or marked tokens of `input_ids`. `pair`: a row has a preferred response in `chosen` and another in
    `rejected`."""
    response_key: str = "completion"
    """Column of the response to `prompt`: text, or messages."""
    trained_roles: tuple[str, ...] = attrs.field(default=("assistant",), validator=_some)
    """Whose messages are trained on: the assistant's from where the policy begins to sample, another role's whole, with
    the header that the template writes. The very first token, which nothing precedes, is not."""
    trained_turns: Literal["all", "last"] = "all"
    """Which of their messages are trained on."""
    scored_at_end: bool = False
    """One more token, the end of sequence, stands behind each response and is the only one trained on. What a value
    head predicts at it, it predicts from the whole response: the score that a reward model gives."""
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    """Passed to the tokenizer's chat template."""
