"""A response that the engine returns in several parts is joined with everything that the engine recorded about it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rl_core.interfaces import Completion, GenerateRequest, KeptTokens, SamplingParams, StopReason
from rl_rollout.resuming import whole_response
from rl_transformers.testing.models import make_checkpoint


class InParts:
    """Answers each request with the next part."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self.parts = list(parts)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        return (self.parts.pop(0),)


@pytest.mark.parametrize(("stop", "num_tokens"), [((), 5), (("34",), 4)], ids=["whole", "cut at a stop string"])
def test_kept_tokens_of_the_parts_stay_at_their_tokens(stop: tuple[str, ...], num_tokens: int, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path / "model"))
    tokens = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "12345"]
    kept = [[tokens[0], 1], [], [2, tokens[2], 3], [tokens[3]], [4, tokens[4]]]

    def part(first: int, end: int, stop_reason: StopReason) -> Completion:
        return Completion(
            tokens=tuple(tokens[first:end]),
            logprobs=(-1.0,) * (end - first),
            policy_versions=(0,) * (end - first),
            stop_reason=stop_reason,
            kept_tokens=KeptTokens.of_each(kept[first:end]),
        )

    engine = InParts([part(0, 3, "abort"), part(3, 3, "abort"), part(3, 5, "length")])
    params = SamplingParams(max_tokens=5, top_p=0.5, stop=stop)
    request = GenerateRequest(sample_id="one", prompt_tokens=(7,), params=params, seed=0)
    whole = asyncio.run(whole_response(engine, request, tokenizer))
    assert whole.tokens == tuple(tokens[:num_tokens])
    assert whole.kept_tokens == KeptTokens.of_each(kept[:num_tokens])
