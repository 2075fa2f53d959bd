"""Makes the tiny variants of the recipes for large models, which run with a small random copy of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_examples import gsm8k

_MODELS = "runs/tiny_models"
TINY: dict[str, Any] = {
    **(gsm8k.recipe.tiny or {}),
    "trainer.max_training_steps": 2,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    "trainer.placement.colocate_all": True,
    "trainer.max_prompt_length": 512,
    "trainer.eval_before_train": False,
    "trainer.ckpt_interval": -1,
    "generator.inference_engine.backend": "local",
    "generator.inference_engine.num_engines": 1,
    "generator.inference_engine.tensor_parallel_size": 1,
    "generator.inference_engine.gpu_memory_utilization": 0.8,
    "generator.inference_engine.weight_sync_backend": "files",
}
"""Settings of the tiny variants: two steps on one or two CPU cores, in float32, with the engine in the trainer's
process."""
MADE = gsm8k.recipe.makes
"""Data files and model that `rl_examples.gsm8k` makes for tiny runs."""


def tiny_copy(name: str) -> str:
    """Returns the directory of a model's small copy."""
    return f"{_MODELS}/{name}"


def prepare(config: Config) -> None:
    """Creates the tiny run's data and the small copy of the model if the configuration uses them and they are
    missing."""
    from rl_core.rank_kit.shipped_configs import known_config
    from rl_examples.tiny_model import write_tiny_copy
    from rl_examples.whole_models import is_to_be_made, make_whole

    gsm8k.prepare(config)
    directory = Path(config.policy_model_path)
    if not directory.is_relative_to(_MODELS) or not is_to_be_made(directory):
        return
    fields = known_config(str(directory.relative_to(_MODELS)))
    if fields is not None:
        make_whole(directory, lambda partial: write_tiny_copy(partial, fields, seed=0))
