"""The keys of `generator` that only the `environment` generator reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
