"""Warm-starts a model by short supervised training, with the same worker and engine as reinforcement learning.

The warm start trains by cross-entropy on rows of prompt and answer until the accuracy on training problems reaches a
target. It does not use held-out problems, not even for the decision to stop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core import plugins
from rl_core.algorithms import token_mean
from rl_core.batch import Batch
from rl_core.config import Config, engine_spec, generator_spec
from rl_core.errors import RLError
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, SamplingParams
from rl_core.reports.progress import Progress
from rl_core.trainer.before.settings import worker_spec
from rl_core.trainer.groups import DataRow
from rl_core.trainer.loop.evaluation import evaluate
from rl_core.trainer.loop.rollouts import RolloutSettings
from rl_core.trainer.publishing.publish import publish_weights
from rl_core.workers import MicroBatchLimits, WorkerGroup


@attrs.frozen(kw_only=True)
class WarmStart:
    """Settings of a warm start."""

    target_accuracy: float
    """Accuracy on training problems at which the warm start ends."""
    temperature: float = 0.0
    """Temperature for sampling the answers that measure the accuracy; 0: greedy."""
    lr: float = 3e-3
    batch_size: int = 128
    max_updates: int = 1500
    updates_per_check: int = 5
    rows_per_check: int = 256


def warm_start(
    config: Config,
    rows: Sequence[DataRow],
    directory: Path,
    settings: WarmStart,
    *,
    check_rows: Sequence[DataRow] | None = None,
) -> None:
    """Trains the model at `trainer.policy.model.path` on `rows` (prompt and answer) and writes it to `directory`.

    Args:
        check_rows: problems on which the accuracy is measured; None: `rows`.

    Raises:
        RLError: the target was not reached within `max_updates`.
    """
    asyncio.run(_warm_start(config, rows, rows if check_rows is None else check_rows, directory, settings))


async def _warm_start(
    config: Config, rows: Sequence[DataRow], check_rows: Sequence[DataRow], directory: Path, settings: WarmStart
) -> None:
    backend, spec = worker_spec(config, "policy", num_training_steps=None)
    optimizer = OptimizerConfig(lr=settings.lr, weight_decay=0.0, num_warmup_steps=20)
    engine, spec_of_engine = engine_spec(config)
    player, spec_of_generator = generator_spec(config)
    client = await engine.create(spec_of_engine)
    generator = player.create(spec_of_generator, client)
    # The warm start has one rank that trains all weights, even if the run after it uses more ranks or adapters.
    whole = ModelConfig(path=spec.model.path)
    spec = attrs.evolve(spec, optimizer=optimizer, model=whole, options=backend.options_class())
    group = await WorkerGroup.launch(backend, spec)
    transport = plugins.load("rl_core.weight_transports", config.weight_transport)
    encode = _encoder(config)
    rng, accuracy = random.Random(config.trainer.seed), 0.0
    try:
        with Progress("warm start", None, "updates") as progress:
            for update in range(1, settings.max_updates + 1):
                batch = Batch.from_sequences([encode(row.row) for row in rng.choices(rows, k=settings.batch_size)])
                batch = batch.with_columns(loss_weights=token_mean(batch["loss_mask"]))
                await group.forward_backward(
                    batch,
                    MicroBatchLimits(max_sequences=settings.batch_size),
                    LossSpec(name="cross_entropy"),
                    temperature=1.0,
                )
                await group.optim_step()
                if update % settings.updates_per_check == 0:
                    await publish_weights(group, client, transport, update, max_bucket_bytes=2**28)
                    accuracy = await _accuracy(
                        config, generator, rng.sample(check_rows, settings.rows_per_check), settings
                    )
                    progress.update(update, accuracy=accuracy, target=settings.target_accuracy)
                    if accuracy >= settings.target_accuracy:
                        await group.save_model(directory)
                        return
        raise RLError(
            f"warm start: got accuracy {accuracy:.2f} after {settings.max_updates} updates, "
            f"expected {settings.target_accuracy:.2f}; try another trainer.seed, or give the recipe more updates "
            "(WarmStart.max_updates)"
        )
    finally:
        await group.close()
        await client.close()


async def _accuracy(config: Config, generator: Any, rows: Sequence[DataRow], settings: WarmStart) -> float:
    sampling = config.generator.sampling_params
    params = SamplingParams(
        max_tokens=sampling.max_generate_length, temperature=settings.temperature, stop=tuple(sampling.stop or ())
    )
    played = RolloutSettings(num_samples=1, params=params, seed=0, drop_zero_variance=False, max_dropped_groups=0)
    result = await evaluate(generator, rows, played, version=0, batch_size=len(rows), timeout_s=600.0)
    return result.metrics["eval/accuracy"]


def _encoder(config: Config) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.trainer.policy.model.path)

    def encode(row: Mapping[str, Any]) -> dict[str, list[int]]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        trained = [0] * len(prompt) + [1] * len(answer)
        return {"tokens": prompt + answer, "sampled": trained, "loss_mask": trained}

    return encode
