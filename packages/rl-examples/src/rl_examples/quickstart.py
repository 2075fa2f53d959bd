"""GRPO on two-digit addition: a small model learns to add on two CPU cores, in a few minutes. Sums are written lowest
digit first, in the order in which they are computed: `37+45=280` means 082.

What it does: makes the data set and a 150k-parameter Qwen3, warm-starts it until it solves a fifth of the training
problems, then trains it by GRPO: 64 prompts × 16 samples per step, exact-match reward, two optimizer steps per batch,
asymmetric clipping.
Deliberately omitted: a reference model and a KL term (the start model is so weak that the policy should not stay
close to it), a format reward.

Run:      make quickstart [SEED=1]      or      rl train quickstart
Control:  rl train quickstart trainer.algorithm.advantage_estimator=rl_examples.controls:permuted_grpo_advantages
Experts:  rl train quickstart trainer.policy.model.path=runs/arithmetic/start_moe_model_seed0   (a small Qwen3-MoE)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Recipe

_DIRECTORY = "runs/arithmetic"
_TRAIN = f"{_DIRECTORY}/train.parquet"
_HELD_OUT = f"{_DIRECTORY}/held_out.parquet"
_START_MODEL = f"{_DIRECTORY}/start_model_seed${{trainer.seed}}"
_START_MOE_MODEL = f"{_DIRECTORY}/start_moe_model_seed${{trainer.seed}}"

recipe = Recipe(
    summary="a small model learns two-digit addition (sums lowest digit first: 37+45=280) on two CPU cores, in minutes",
    config={
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "trainer.run_name": "quickstart",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": _START_MODEL,
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
    makes=(_TRAIN, _HELD_OUT, _START_MODEL, _START_MOE_MODEL),
)

START_ACCURACY = 0.20


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import NUM_HELD_OUT, problems, write_missing_rows, write_model, write_moe_model
    from rl_examples.whole_models import is_to_be_made

    rows = problems()
    write_missing_rows(config, {_TRAIN: rows[NUM_HELD_OUT:], _HELD_OUT: rows[:NUM_HELD_OUT]})
    for start_model, write in ((_START_MODEL, write_model), (_START_MOE_MODEL, write_moe_model)):
        directory = start_model.replace("${trainer.seed}", str(config.trainer.seed))
        if config.policy_model_path == directory and is_to_be_made(Path(directory)):
            _write_start_model(Path(directory), write, rows[NUM_HELD_OUT:], seed=config.trainer.seed)


def _write_start_model(
    directory: Path, write_untrained: Callable[..., None], problems: list[dict[str, str]], *, seed: int
) -> None:
    """Warm-starts an untrained model on `problems` and writes it to `directory`. The model depends only on the seed,
    not on the data, backend or adapters of the run that uses it."""
    from rl_core.trainer.groups import DataRow
    from rl_examples.warm_start import WarmStart, warm_start
    from rl_examples.whole_models import make_whole

    untrained = directory.with_name(directory.name + ".untrained")
    make_whole(untrained, lambda partial: write_untrained(partial, seed=seed))
    config = from_mapping({**recipe.config, "trainer.seed": seed, "trainer.policy.model.path": str(untrained)})
    rows = [DataRow(problem, f"problem {number}") for number, problem in enumerate(problems, start=1)]
    settings = WarmStart(target_accuracy=START_ACCURACY)
    make_whole(directory, lambda partial: warm_start(config, rows, partial, settings))
