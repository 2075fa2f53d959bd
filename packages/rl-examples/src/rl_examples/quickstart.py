"""GRPO on two-digit addition: a small model learns to add on two CPU cores, in about two minutes.

What it does: makes the data set and a 150k-parameter Qwen3, warm-starts it until it solves a fifth of the training
problems,
then trains it by GRPO: 64 prompts × 16 samples a step, exact-match reward, two optimizer steps per batch, asymmetric
clipping.
Left out, on purpose: a reference model and a KL term (the start is too weak to stay close to), a format reward.

Run:      make quickstart [SEED=1]      or      rl train quickstart
Control:  rl train quickstart trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
"""

from __future__ import annotations

from pathlib import Path

import attrs

from rl_core.config import Config
from rl_core.interfaces import ModelConfig, Recipe

_DIRECTORY = "runs/arithmetic"

recipe = Recipe(
    summary="a small model learns two-digit addition on two CPU cores, in minutes",
    config={
        "data.train_data": [f"{_DIRECTORY}/train.parquet"],
        "data.val_data": [f"{_DIRECTORY}/held_out.parquet"],
        "trainer.run_name": "quickstart",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": f"{_DIRECTORY}/start_model_seed${{trainer.seed}}",
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.policy.optimizer_config.num_warmup_steps": 5,
        "trainer.policy.optimizer_config.scheduler": "linear",
        "trainer.algorithm.eps_clip_high": 0.28,
        "trainer.seed": 0,
        "trainer.bf16": False,
        "trainer.gradient_checkpointing": False,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 130,
        "trainer.train_batch_size": 64,
        "trainer.policy_mini_batch_size": 64,
        "trainer.update_epochs_per_batch": 2,
        "trainer.micro_train_batch_size_per_gpu": 512,
        "trainer.micro_forward_batch_size_per_gpu": 1024,
        "trainer.logprobs_chunk_size": 16384,
        "trainer.eval_interval": 10,
        "trainer.ckpt_interval": 50,
        "trainer.max_ckpts_to_keep": 2,
        "generator.n_samples_per_prompt": 16,
        "generator.sampling_params.max_generate_length": 5,
    },
    prepare="rl_examples.quickstart:prepare",
)

START_ACCURACY = 0.20


def prepare(config: Config) -> None:
    """Makes the data set and the warm-started model, unless they are there."""
    from rl_core.trainer.data import read_rows
    from rl_examples.arithmetic import write_data, write_model
    from rl_examples.warm_start import WarmStart, warm_start

    train, held_out = Path(config.data.train_data[0]), Path(config.data.val_data[0])
    if not (train.exists() and held_out.exists()):
        write_data(train, held_out)
    directory = Path(config.trainer.policy.model.path or "")
    if not directory.exists():
        untrained = directory.with_name(directory.name + ".untrained")
        write_model(untrained, seed=config.trainer.seed)
        model = ModelConfig(path=str(untrained))  # without adapters: the start is the same whatever trains it further
        policy = attrs.evolve(config.trainer.policy, model=model)
        start = attrs.evolve(config, trainer=attrs.evolve(config.trainer, policy=policy))
        rows = read_rows([train], key="data.train_data")
        warm_start(start, rows, directory, WarmStart(target_accuracy=START_ACCURACY))
