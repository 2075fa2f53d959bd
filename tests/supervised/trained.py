"""The gradient of data rows, computed on one rank by the steps of a run: generator, collate, scores, `prepare`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_core.batch import Batch
from rl_core.config import Config, from_mapping, generator_spec
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.trainer.before.data import read_rows
from rl_core.trainer.before.preflight import NoSampler
from rl_core.trainer.before.settings import model_shapes, train_rollouts, update_settings, worker_spec
from rl_core.trainer.loop.rollouts import generate_group, group_request
from rl_core.trainer.update.batch_advantages import with_loss_weights
from rl_core.trainer.update.collate import collate
from rl_transformers.testing.ranks import RankGroup

PAIRS = {
    "generator.responses": "pair",
    "generator.n_samples_per_prompt": 2,
    "generator.eval_n_samples_per_prompt": 2,
    "trainer.algorithm.loss_reduction": "prompt_token_sum",
}


def config_of(directory: Path, model: Path, rows: Sequence[Mapping[str, Any]], **keys: Any) -> Config:
    """The configuration of a run on these rows, which form one batch."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return from_mapping(
        {
            "data.train_data": [str(data)],
            "generator.type": "dataset",
            "generator.n_samples_per_prompt": 1,
            "trainer.policy.model.path": str(model),
            "trainer.run_dir": str(directory / "run"),
            "trainer.train_batch_size": len(rows),
            "trainer.policy_mini_batch_size": len(rows),
            "trainer.micro_train_batch_size_per_gpu": 3,
            "trainer.bf16": False,
            "trainer.num_threads": 1,
            "trainer.algorithm.policy_loss_type": "cross_entropy",
            **keys,
        }
    )


def first_batch(config: Config) -> Batch:
    """The batch of all rows."""

    async def generated() -> Batch:
        plugin, spec = generator_spec(config)
        plugin.validate(spec)
        generator, settings = plugin.create(spec, NoSampler()), train_rollouts(config)
        rows = read_rows(config.data.train_data, key="data.train_data")
        requests = [group_request(row, number, 0, settings) for number, row in enumerate(rows)]
        groups = [await generate_group(generator, request) for request in requests]
        return collate([trajectory for group in groups for trajectory in group])

    return asyncio.run(generated())


def gradient(config: Config, directory: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first batch, and the gradients of all weights before clipping."""
    update, batch = update_settings(config), first_batch(config)
    limits, temperature, settings = update.forward_limits, update.temperature, update.policy
    ranks = {}
    try:
        for role in model_shapes(config):
            backend, spec = worker_spec(config, role, num_training_steps=10)
            ranks[role] = RankGroup(backend, spec, 1, directory=directory / role, timeout_s=120)
        scores = ranks["policy"].forward(batch, limits, temperature=temperature)
        columns = {"old_logprobs": "logprobs", "values": "values"}
        batch = batch.with_columns(**{name: scores[of] for name, of in columns.items() if of in scores})
        if "reference" in ranks:
            scores = ranks["reference"].forward(batch, limits, temperature=temperature)
            batch = batch.with_columns(ref_logprobs=scores["logprobs"])
        batch = with_loss_weights(batch, settings.reduction, settings.reduction_params)
        objective = objective_from_spec(settings.loss)
        batch = batch.with_columns(**objective.prepare(batch.columns, batch.sequence_index, seed=0))
        metrics = ranks["policy"].forward_backward(batch, settings.limits, settings.loss, temperature=temperature)
        return metrics["loss"][0], ranks["policy"].gradients()
    finally:
        for group in ranks.values():
            group.close()
