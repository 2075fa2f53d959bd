"""A 20M-parameter model trained on prompts of mixed lengths by us and by TRL's GRPOTrainer, in turns.

Prompts of 64, 161, 406 and 1,024 tokens, 8 samples of each with 128 tokens, one update; else as `quickstart_step.py`:
the same start, the same tokens, processor seconds of one thread, nothing is generated.

TRL pads every sequence to the longest prompt. It is measured with micro-batches of several sizes (gradients accumulated
over them), and its best is compared. Ours is given one limit in tokens, 8,192. Goal: at most 0.6 of TRL's time. The
norms of the first gradient say that both compute the same.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from benchmarks.peers.quickstart_step import against_trl, median, ours, show_norms, step_of
from rl_core.config import from_mapping
from rl_core.interfaces import Trajectory, TrajectoryStep
from rl_core.testing.models import make_checkpoint
from rl_core.trainer.settings import update_settings

PROMPT_LENGTHS, NUM_SAMPLES, ANSWER_LENGTH = (64, 161, 406, 1024), 8, 128
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}


def played() -> list[Trajectory]:
    """Random tokens, after which an episode ends; the first two samples of a prompt are right."""
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for group, count in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(100, 8192, (count,), generator=generator).tolist()
        for sample in range(NUM_SAMPLES):
            answer = torch.randint(100, 8192, (ANSWER_LENGTH,), generator=generator).tolist()
            step = TrajectoryStep(
                tokens=[*prompt, *answer],
                sampled=[False] * count + [True] * ANSWER_LENGTH,
                rollout_logprobs=[0.0] * count + [-9.0] * ANSWER_LENGTH,
                policy_version=[-1] * count + [0] * ANSWER_LENGTH,
                reward=float(sample < 2),
                stop_reason="stop",
            )
            trajectories.append(
                Trajectory(
                    group_id=group,
                    sample_index=sample,
                    steps=(step,),
                    prompt_text="",
                    response_text="",
                    start_version=0,
                )
            )
    return trajectories


@click.command()
@click.option("--rounds", default=2, show_default=True, help="Batches that are measured, after one that is not.")
@click.option("--micro-batch", "sizes", default=[4, 8, 32], multiple=True, help="Sequences that TRL computes at once.")
def main(rounds: int, sizes: Sequence[int]) -> None:
    """Prints both times and their ratio."""
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(Path(name) / "model", **MODEL)
        config = from_mapping(
            {
                "trainer.policy.model.path": str(model),
                "trainer.policy.optimizer_config.lr": 1e-6,
                "trainer.algorithm.eps_clip_high": 0.28,
                "trainer.bf16": False,
                "trainer.gradient_checkpointing": False,
                "trainer.num_threads": 1,
                "trainer.train_batch_size": len(PROMPT_LENGTHS),
                "trainer.policy_mini_batch_size": len(PROMPT_LENGTHS),
                "trainer.max_tokens_per_microbatch": 8192,
                "generator.n_samples_per_prompt": NUM_SAMPLES,
                "generator.sampling_params.max_generate_length": ANSWER_LENGTH,
            }
        )
        trajectories, settings = played(), update_settings(config)
        group, update = loop.run_until_complete(ours(config, settings))
        norms: list[float] = []

        def step_once() -> None:
            norms.append(loop.run_until_complete(step_of(update, trajectories, step=2)))

        theirs, own = [], []
        for size in sizes:
            turns = against_trl(
                model,
                trajectories,
                step_once,
                num_samples=NUM_SAMPLES,
                num_updates=1,
                rounds=rounds,
                micro_batch=size,
            )
            show_norms(turns, norms[0])
            theirs.append(median(f"TRL, {size} sequences at once", [0.0, *turns.theirs]))
            own.extend(turns.ours)
        print(f"{'ours over the best of TRL':44s} {median('ours', own) / min(theirs):7.2f}  (goal 0.6)")
        loop.run_until_complete(group.close())


if __name__ == "__main__":
    main()
