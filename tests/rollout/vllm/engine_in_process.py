"""A real vLLM engine and its worker in one child process, for tests that need what a server does not expose."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rl_core.errors import WeightSyncError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    GenerateRequest,
    InferenceClient,
    Manifest,
    PauseMode,
    Rendezvous,
)

_TIMEOUT_S = 600.0


class EngineInProcess(InferenceClient):
    """The methods of InferenceClient that weight syncs and verification call."""

    def __init__(self, model_path: str, **arguments: Any) -> None:
        from vllm import LLM

        from rl_rollout.vllm.engine_arguments import WORKER_EXTENSION

        self.model_path = model_path
        self.llm = LLM(
            model=model_path,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=16,
            kv_cache_memory_bytes=32 * 2**20,
            worker_extension_cls=WORKER_EXTENSION,
            **arguments,
        )

    @property
    def vocab_size(self) -> int:
        return self.llm.model_config.get_vocab_size()

    def forgetful(self) -> EngineInProcess:
        """Makes the engine forget which tensors earlier versions had; returns the engine."""
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        worker.__dict__.pop("rl_held", None)
        return self

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Does nothing: no request runs between two calls."""

    async def resume(self) -> None:
        """Does nothing: nothing was paused."""

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        """Does nothing: no request runs between two calls."""

    async def health(self) -> EngineHealth:
        return EngineHealth(version=0, num_running=0, num_waiting=0)

    async def close(self) -> None:
        """Does nothing: the engine ends with its process."""

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        from rl_rollout.vllm.wire import manifest_of

        arguments = (version, rendezvous.receiver, dict(rendezvous.data), rendezvous.adapter, rendezvous.delta)
        (answer,) = await asyncio.to_thread(self.llm.collective_rpc, "rl_receive_weights", args=arguments)
        if answer["error"]:
            raise WeightSyncError(answer["error"])
        self.llm.reset_prefix_cache()
        return manifest_of(answer["manifest"])

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        return {"engine": self.logprobs(sequences)}

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        from vllm import SamplingParams

        asked = request.params
        params = SamplingParams(
            max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos, logprobs=0, seed=request.seed, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": list(request.prompt_tokens)}]
        outputs: Any = self.llm.generate(prompts, params, use_tqdm=False)
        sampled: Any = outputs[0].outputs[0]
        tokens = tuple(sampled.token_ids)
        return (
            Completion(
                tokens=tokens,
                logprobs=tuple(given[token].logprob for given, token in zip(sampled.logprobs, tokens, strict=True)),
                policy_versions=(0,) * len(tokens),
                stop_reason="length",
            ),
        )

    def logprobs(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[list[float]]:
        """The log-prob of each token given the tokens before it; 0.0 for the first. `options` go to `LLM.generate`, for
        example an adapter.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts: Any = [{"prompt_token_ids": list(tokens)} for tokens in sequences]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, **options)
        return [
            [0.0] + [given[token].logprob for given, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]  # pyright: ignore
            for output, tokens in zip(outputs, sequences, strict=True)
        ]


def run_in_engine(model_path: str, act: Callable[[EngineInProcess], Awaitable[Any]], **arguments: Any) -> Any:
    """Runs `act` with an engine in a child process and returns its result; `arguments` are vLLM's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_run, str(model_path), act, arguments).result(_TIMEOUT_S)


def _run(model_path: str, act: Callable[[EngineInProcess], Awaitable[Any]], arguments: Mapping[str, Any]) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    engine = EngineInProcess(model_path, **arguments)

    async def run() -> Any:
        return await act(engine)

    return asyncio.run(run())
