"""Tokens per second through client, HTTP server and actor, compared with the same requests in `LLM.generate`.

The base model (about 25M parameters) is large enough to dominate the time; the tiny one shows the overhead per request.
Both sides sample every batch with the same seeds and alternate, so that other load on the machine affects both. The
ratio is the median over the turns. Both engines stay alive throughout; an idle engine uses no processor time.

    python benchmarks/rollout.py [--batches 1 8 64 256] [--tokens 64] [--turns 3] [--sizes base tiny]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.config import engine_spec, from_mapping
from rl_core.interfaces import Completion, EngineSpec, GenerateRequest, SamplingParams
from rl_rollout.vllm import wire
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.engine_arguments import engine_arguments
from rl_rollout.vllm.launch import cpu_environment, create_client
from rl_transformers.testing.models import make_checkpoint

SIZES: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
    "tiny": {},
}
PROMPT = tuple(range(1, 17))


def make_spec(directory: Path, size: str) -> EngineSpec:
    """Writes a random model and returns the spec of a float32 engine that serves it."""
    sizes = SIZES[size] and {**SIZES[size], "num_key_value_heads": 4, "head_dim": 64}
    make_checkpoint(directory / "model", **{"head_dim": 32, "max_position_embeddings": 512, **sizes})
    config = from_mapping(
        {
            "trainer.policy.model.path": str(directory / "model"),
            "trainer.run_dir": str(directory),
            "trainer.bf16": False,
            "generator.inference_engine.backend": "vllm",
            "generator.inference_engine.max_num_seqs": 256,
            # Both sides sample every batch, so neither may reuse cached prompts.
            "generator.inference_engine.enable_prefix_caching": False,
        }
    )
    return engine_spec(config)[1]


def through_http(runner: asyncio.Runner, client: RemoteInferenceClient, name: str, count: int, tokens: int) -> float:
    """Seconds of `count` concurrent requests."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [
        GenerateRequest(sample_id=f"{name}-{i}", prompt_tokens=PROMPT, params=params, seed=i) for i in range(count)
    ]

    async def together() -> list[tuple[Completion, ...]]:
        return await asyncio.gather(*(client.generate(request) for request in requests))

    began = time.perf_counter()
    completions = runner.run(together())
    seconds = time.perf_counter() - began
    assert all(len(completion.tokens) == tokens for (completion,) in completions)
    return seconds


def in_process(engine: Any, count: int, tokens: int) -> float:
    """Seconds of the same requests in one call of vLLM's own interface."""
    from vllm import SamplingParams as EngineParams
    from vllm.inputs import TokensPrompt

    params = [
        EngineParams(max_tokens=tokens, ignore_eos=True, seed=i, logprobs=0, detokenize=False, flat_logprobs=True)
        for i in range(count)
    ]
    prompts = [TokensPrompt(prompt_token_ids=list(PROMPT)) for _ in range(count)]
    began = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return seconds


def compare(size: str, batches: list[int], tokens: int, turns: int) -> None:
    """Measures both sides and prints one line per batch size."""
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        spec = make_spec(Path(directory), size)
        client = runner.run(create_client(spec))
        os.environ.update(cpu_environment(1))
        from vllm import LLM

        served = engine_arguments(spec, has_gpus=False)
        del served["worker_extension_cls"], served["served_model_name"]
        engine = LLM(**served)
        try:
            for count in batches:
                through_http(runner, client, f"{size}-warm-{count}", count, 8)
                in_process(engine, count, 8)
                times = [
                    (
                        through_http(runner, client, f"{size}-{count}-{turn}", count, tokens),
                        in_process(engine, count, tokens),
                    )
                    for turn in range(turns)
                ]
                http, direct = (statistics.median(column) for column in zip(*times, strict=True))
                ratio = statistics.median(own / other for other, own in times)
                print(
                    f"{size:5} batch {count:4}: {count * tokens / http:8.0f} tokens/s over HTTP, "
                    f"{count * tokens / direct:8.0f} in process, ratio {ratio:.2f}, "
                    f"{1e3 * (http - direct) / count:+.2f} ms per request",
                    flush=True,
                )
        finally:
            runner.run(client.close())


def routed_experts_bytes(layers: int = 48, experts_per_token: int = 8, tokens: int = 2000) -> None:
    """Prints the bytes that routed experts add to a completion, compared with layers × experts per token."""

    def size_of(routed: np.ndarray | None) -> int:
        completion = Completion(
            tokens=(1,) * tokens,
            logprobs=(0.0,) * tokens,
            policy_versions=(1,) * tokens,
            stop_reason="length",
            routed_experts=routed,
        )
        return len(wire.completions_body([completion]))

    without = size_of(None)
    added = size_of(np.zeros((tokens, layers, experts_per_token), np.uint8)) - without
    print(
        f"routed experts of {layers} layers × {experts_per_token}: {added / tokens:.2f} bytes per token on the wire, "
        f"L·K = {layers * experts_per_token}; everything else {without / tokens:.2f} bytes per token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args()
    routed_experts_bytes()
    for size in given.sizes:
        compare(size, given.batches, given.tokens, given.turns)


if __name__ == "__main__":
    main()
