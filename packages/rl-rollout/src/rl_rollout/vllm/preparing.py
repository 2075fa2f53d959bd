"""Makes a server's workers receive a weight version while they sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm.v1.engine.async_llm import AsyncLLM

from rl_core.errors import WeightSyncError
from rl_core.interfaces import Rendezvous
from rl_rollout.vllm.engine_cores import answers_of_all

_LOOK_S, _MAX_LOOK_S = 0.005, 0.1


def arguments_of(rendezvous: Rendezvous, version: int) -> Sequence[object]:
    """Returns the arguments of `rl_prepare_weights` and `rl_receive_weights` of the workers, as plain data."""
    return version, rendezvous.receiver, dict(rendezvous.data), rendezvous.adapter, rendezvous.delta


async def prepared(engine: AsyncLLM, rendezvous: Rendezvous, version: int, *, timeout_s: float) -> None:
    """Returns when every worker of every data-parallel engine has received the version. Workers continue sampling
    meanwhile.

    Raises:
        WeightSyncError: a worker did not receive it in time, or refused it; the previous version is still served.
    """
    look_s = _LOOK_S
    try:
        async with asyncio.timeout(timeout_s):
            await answers_of_all(
                engine, "collective_rpc", "rl_prepare_weights", None, arguments_of(rendezvous, version), None
            )
            while True:
                by_engine = await answers_of_all(engine, "collective_rpc", "rl_preparation_state", None, (), None)
                states = [state for states in by_engine for state in states]
                if errors := [state["error"] for state in states if state["error"] is not None]:
                    raise WeightSyncError(f"weight version {version}: {errors[0]}")
                if all(state["has_ended"] for state in states):
                    return
                await asyncio.sleep(look_s)
                look_s = min(1.5 * look_s, _MAX_LOOK_S)
    except TimeoutError:
        raise WeightSyncError(f"weight version {version} did not arrive within {timeout_s:g} s") from None
