"""GRPO in one file, using only public parts: the quick start's model learns to add, with the loop written out.

What it does: a step samples 16 answers to each of 64 problems, rewards those that are right, compares each with the
others of its problem, takes two optimizer steps on the batch, and sends the new weights to the engine. Every ten steps
it measures the greedy accuracy on held-out problems. Task, start model and settings are those of `rl train quickstart`.
Deliberately omitted (`rl train` has them): checkpoints, handling of failed samples and engines, sampling while other
prompts are trained on, mini-batches, several ranks, conversations, metrics and reports.

Run:  python -m rl_examples.one_file      (two cores, a few minutes; the first time a minute more, for the start model)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.algorithms import grpo_advantages, token_mean
from rl_core.batch import Batch
from rl_core.config import load
from rl_core.errors import WeightSyncError
from rl_core.interfaces import GenerateRequest, LossSpec, ModelConfig, OptimizerConfig, SamplingParams, WorkerSpec
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_examples import quickstart
from rl_examples.arithmetic import NUM_HELD_OUT, problems
from rl_fsdp import FsdpOptions, fsdp
from rl_rollout import FilesTransport, LocalEngine

Rows = Sequence[Mapping[str, str]]
"""Problems, each a row with `prompt` and `answer`."""

LIMITS = MicroBatchLimits(max_sequences=512)
LOSS = LossSpec(name="ppo_clip", params={"eps_clip_low": 0.2, "eps_clip_high": 0.28})
SAMPLING = SamplingParams(max_tokens=5)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


async def train(model: str, training: Rows, held_out: Rows, *, steps: int = 130, seed: int = 0) -> list[float]:
    """Trains the model in the directory `model`; returns the held-out accuracy before training, every ten steps, and
    after training."""
    rng, accuracies = random.Random(seed), []
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = await WorkerGroup.launch(fsdp, policy_spec(model, optimizer_steps=2 * steps, seed=seed))
    engine = await start_engine(model, tokenizer)
    try:
        for step in range(steps + 1):
            if step % 10 == 0 or step == steps:
                _, rewards_N = await play(engine, tokenizer, held_out, GREEDY)
                accuracies.append(float(rewards_N.mean()))
                print(f"step {step:3}: held-out accuracy {accuracies[-1]:.3f}", flush=True)
            if step == steps:
                break
            chosen = rng.sample(training, 64)
            batch, rewards_N = await play(engine, tokenizer, chosen, SAMPLING, num_samples=16, seed=rng.getrandbits(30))
            advantages_N = grpo_advantages(rewards_N, batch["group_id"])
            scores = await policy.forward(batch, LIMITS, temperature=1.0)
            batch = batch.with_columns(
                old_logprobs=scores["logprobs"],
                advantages=torch.where(batch["sampled"], advantages_N[batch.sequence_index], 0.0),
                # The sum of loss_weights · loss is minimised, here the mean over the sampled tokens.
                loss_weights=token_mean(batch["sampled"]),
            )
            for _ in range(2):
                await policy.forward_backward(batch, LIMITS, LOSS, temperature=1.0)
                await policy.optim_step()
            await send_weights(policy, engine, version=step + 1)
    finally:
        await policy.close()
        await engine.close()
    return accuracies


def policy_spec(model: str, *, optimizer_steps: int, seed: int) -> WorkerSpec:
    """Returns the specification of a policy with one rank that trains all weights in float32."""
    return WorkerSpec(
        role="policy",
        model=ModelConfig(path=model),
        optimizer=OptimizerConfig(
            lr=1e-3, adam_betas=(0.9, 0.95), weight_decay=0.0, num_warmup_steps=5, scheduler="linear"
        ),
        options=FsdpOptions(),
        bf16=False,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=16384,
        total_optimizer_steps=optimizer_steps,
        seed=seed,
        num_threads=1,
    )


async def start_engine(model: str, tokenizer: Any) -> LocalEngine:
    """Starts an engine in this process, on a separate thread and with a separate copy of the weights."""

    def load_model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), tokenizer

    return await LocalEngine.start(load_model, max_num_seqs=1024, timeout_s=600.0, num_threads=1)


async def play(
    engine: LocalEngine, tokenizer: Any, rows: Rows, params: SamplingParams, *, num_samples: int = 1, seed: int = 0
) -> tuple[Batch, Tensor]:
    """Samples `num_samples` answers to each row. Returns one sequence per sample, and its reward: 1.0 if the sample is
    exactly the answer followed by the end token, else 0.0."""
    requests = [
        GenerateRequest(
            sample_id=f"row {number}",
            prompt_tokens=tuple(tokenizer.encode(row["prompt"])),
            params=params,
            seed=seed + number * num_samples,
            num_samples=num_samples,
        )
        for number, row in enumerate(rows)
    ]
    answers = await asyncio.gather(*map(engine.generate, requests))
    sequences, rewards = [], []
    for number, (row, request, samples) in enumerate(zip(rows, requests, answers, strict=True)):
        for sample in samples:
            tokens = [*request.prompt_tokens, *sample.tokens]
            sampled = [position >= len(request.prompt_tokens) for position in range(len(tokens))]
            sequences.append({"tokens": tokens, "sampled": sampled, "loss_mask": sampled, "group_id": number})
            text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
            rewards.append(float(text == row["answer"] and sample.stop_reason == "stop"))
    return Batch.from_sequences(sequences), torch.tensor(rewards)


async def send_weights(policy: WorkerGroup, engine: LocalEngine, *, version: int) -> None:
    """Sends the policy's weights to the engine. Policy and engine work concurrently, and each reports the names,
    shapes, dtypes and checksums of the weights."""
    transport = FilesTransport()
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    try:
        sending = policy.publish(rendezvous, version, max_bucket_bytes=2**28)
        sent, received = await asyncio.gather(sending, engine.update_weights(rendezvous, version))
    finally:
        transport.close(rendezvous)
    if sent != received:
        raise WeightSyncError(f"version {version}: the engine did not get the weights that were sent")


if __name__ == "__main__":
    config = load("quickstart").config
    quickstart.prepare(config)
    rows = problems()
    asyncio.run(train(config.policy_model_path, training=rows[NUM_HELD_OUT:], held_out=rows[:NUM_HELD_OUT]))
