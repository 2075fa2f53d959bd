"""A training step of a 20M-parameter model on prompts of mixed lengths, by this project and by TRL's GRPOTrainer.

Prompts of 64, 161, 406 and 1,024 tokens, 8 samples of 128 tokens for each, one update. As in `quickstart_step.py`, both
trainers start from the same model, get the same tokens and generate nothing; times are processor seconds of one thread.

TRL pads every sequence to the longest prompt. It is measured with several micro-batch sizes (gradients accumulated over
them), and its best time is compared. Our trainer's micro-batches have at most 8,192 tokens. Goal: at most 0.6 of TRL's
time. The norms of the first gradients show that both trainers compute the same gradient.
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
from rl_core.trainer.before.settings import update_settings
from rl_transformers.testing.models import make_checkpoint

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
    """Trajectories of random tokens; the first two samples of each prompt get a reward."""
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
@click.option("--rounds", default=2, show_default=True, help="Measured batches, after one warm-up batch.")
@click.option("--micro-batch", "sizes", default=[4, 8, 32], multiple=True, help="Sequences in TRL's micro-batch.")
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
            theirs.append(median(f"TRL, {size} sequences at once", turns.theirs))
            own.extend(turns.ours)
        print(f"{'ours over the best of TRL':44s} {median('ours', own) / min(theirs):7.2f}  (goal 0.6)")
        loop.run_until_complete(group.close())


if __name__ == "__main__":
    main()
