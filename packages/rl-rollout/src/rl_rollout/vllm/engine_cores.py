"""Calls every data-parallel engine behind one AsyncLLM, and returns the answer of each.

vllm 0.30.0, v1/engine/core_client.py: `DPLBAsyncMPClient.call_utility_async`, and with it `AsyncLLM.collective_rpc` and
`reset_prefix_cache`, calls the core processes of all data-parallel engines but returns only the first one's answer. So
an engine that did not load a weight version would serve its old or half-loaded weights under the new version number.
This module calls each core process separately, by the method that vLLM itself uses. It can be removed when AsyncLLM
returns all answers; tests/rollout/vllm/test_split_engines.py shows the bug.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from rl_core.errors import ConfigError


def require_single_calls(engine: AsyncLLM) -> None:
    """Raises ConfigError if this vLLM's client of the core processes cannot call each one separately."""
    core: Any = engine.engine_core
    if not hasattr(core, "_call_utility_async") or not hasattr(core, "core_engines"):
        raise ConfigError(
            "this version of vLLM does not return the answer of every data-parallel engine "
            f"({type(core).__name__} has no _call_utility_async or no core_engines), so it is unknown whether all of "
            "them loaded new weights; use vllm 0.30"
        )


async def answers_of_all(engine: AsyncLLM, method: str, *arguments: Any) -> list[Any]:
    """Calls `method` in the core process of each data-parallel engine, and returns all answers, ordered by rank.

    Raises:
        Exception: the error of the failed engine with the lowest rank, raised after all have answered.
    """
    core: Any = engine.engine_core
    calls = [core._call_utility_async(method, *arguments, engine=identity) for identity in core.core_engines]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for rank, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            answer.add_note(f"by data-parallel engine {rank} of {len(answers)}")
            raise answer
    return answers
