"""Episodes of one turn: judged directly, or played through the generator with a scripted engine."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.interfaces import Action, GroupRequest, SamplingParams, StepResult, Trajectory
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_transformers.testing.models import character_tokenizer


async def judged(environment: Any, row: Mapping[str, Any], response: str, **options: Any) -> StepResult:
    """The environment's result for one response."""
    episode = environment(row, options)
    await episode.reset()
    try:
        return await episode.step(Action(text=response, tokens=(), stop_reason="stop"))
    finally:
        await episode.close()


async def played(
    environment: Any, row: Mapping[str, Any], responses: Sequence[str], options: Mapping[str, Any]
) -> tuple[Trajectory, ...]:
    """Plays one group through the generator: one sample per response."""
    tokenizer = character_tokenizer(string.printable)
    encoded = [tokenizer(response, add_special_tokens=False)["input_ids"] for response in responses]
    assert [tokenizer.decode(tokens) for tokens in encoded] == list(responses), "the tokenizer lacks characters"
    left = iter(encoded)
    client = ScriptedClient(lambda request: [*next(left), tokenizer.eos_token_id], end_tokens=[tokenizer.eos_token_id])
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment, environment_options=options, limits=Limits(max_turns=1)),
    )
    request = GroupRequest(
        group_id=0,
        row=row,
        row_place="rows:1",
        num_samples=len(responses),
        params=SamplingParams(max_tokens=200),
        seed=0,
        start_version=0,
    )
    try:
        return await generator.generate(request)
    finally:
        await generator.aclose()
