"""Decides whether a run may train on groups as they finish (`trainer.stream_groups`) without changing its steps.

For this, a part's advantages, masks and loss weights (before their division by the whole step's divisor) must not
depend on the step's other groups. Settings are checked directly. The advantage estimator, the KL in the reward and the
off-policy correction are tried on made-up groups, once with all groups together and once with each group alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.config import Config, needs_engine, needs_reference
from rl_core.errors import ConfigError, ConfigErrors
from rl_core.interfaces import Backend
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.trainer.update.batch_update import UpdateSettings, prepared

_KEY = "trainer.stream_groups"
_TOLERANCE = 1e-5
"""Absolute tolerance for float32 advantages and weights of about 1. Another order of summation changes their seventh
digit."""


def require_streamable(config: Config, update: UpdateSettings) -> None:
    """Requires that streaming does not change the run's steps.

    Args:
        config: a resolved configuration with `trainer.stream_groups=true`.
        update: the result of `update_settings(config)`.

    Raises:
        ConfigError: the run cannot be streamed; ConfigErrors: for several reasons.
    """
    found = [*_unfit_keys(config, update), *_unfit_backend(config)]
    if not found:
        found = list(_unfit_functions(config, update))
    if found:
        raise found[0] if len(found) == 1 else ConfigErrors(found)


def _unfit_keys(config: Config, update: UpdateSettings) -> Iterator[ConfigError]:
    trainer, algorithm, placement = config.trainer, config.trainer.algorithm, config.trainer.placement
    if not needs_engine(config):
        yield ConfigError(
            f"got true with generator.type={config.generator.type}, which reads responses from the rows; there is no "
            f"sampling that training could overlap with. Set {_KEY}=false",
            key=_KEY,
        )
    if placement.colocate_all:
        yield ConfigError(
            f"got true with {_KEY}=true; models train while engines sample, so they cannot take turns on the same "
            f"devices. Set colocate_all=false, or {_KEY}=false",
            key="trainer.placement.colocate_all",
        )
    if placement.colocate_policy_ref and needs_reference(config) and trainer.ref.inference_backend is None:
        yield ConfigError(
            f"got true with {_KEY}=true; policy and reference would take turns on their devices for every part of a "
            f"step. Set colocate_policy_ref=false, or {_KEY}=false",
            key="trainer.placement.colocate_policy_ref",
        )
    sizes = {"trainer.policy_mini_batch_size": trainer.policy_mini_batch_size}
    if update.critic is not None:
        sizes["trainer.critic_mini_batch_size"] = trainer.critic_mini_batch_size
    for key, size in sizes.items():
        if size != trainer.train_batch_size:
            yield ConfigError(
                f"got {size} of trainer.train_batch_size={trainer.train_batch_size} with {_KEY}=true; the first of "
                "several optimizer steps would train on the groups that finish first, which are a biased sample. Set "
                f"both to the same number, or {_KEY}=false",
                key=key,
            )
    if trainer.update_epochs_per_batch != 1:
        yield ConfigError(
            f"got {trainer.update_epochs_per_batch} with {_KEY}=true, which takes one optimizer step per batch. Set it "
            f"to 1, or {_KEY}=false",
            key="trainer.update_epochs_per_batch",
        )
    if algorithm.dynamic_sampling.type == "replace":
        yield ConfigError(
            f"replace chooses among all groups of a batch, but {_KEY}=true trains on the first groups before the last "
            f"have finished. Set it to filter, or {_KEY}=false",
            key="trainer.algorithm.dynamic_sampling.type",
        )
    if algorithm.advantage_batch_normalize:
        yield ConfigError(
            f"got true with {_KEY}=true; mean and deviation of a batch are known only when all of its groups have "
            f"finished. Set it to false, or {_KEY}=false",
            key="trainer.algorithm.advantage_batch_normalize",
        )
    if hasattr(objective_from_spec(update.policy.loss).function, "prepare"):
        yield ConfigError(
            f"{algorithm.policy_loss_type!r} needs statistics of the whole mini-batch before its gradient, but "
            f"{_KEY}=true computes gradients before all groups have finished. Choose another loss, e.g. regular, or "
            f"set {_KEY}=false",
            key="trainer.algorithm.policy_loss_type",
        )


def _unfit_backend(config: Config) -> Iterator[ConfigError]:
    backend: Backend = plugins.load("rl_core.backends", config.trainer.strategy, key="trainer.strategy")
    section = backend.config_section
    if backend.has_own_losses(config.trainer.policy.options(section)):
        yield ConfigError(
            f"enables auxiliary losses, which are weighted over a whole mini-batch, but {_KEY}=true computes them part "
            f"by part. Switch the losses off, or set {_KEY}=false",
            key=f"trainer.policy.{section}",
        )


def _unfit_functions(config: Config, update: UpdateSettings) -> Iterator[ConfigError]:
    """Tries the advantage estimator alone, then together with the KL in the reward and the off-policy correction.
    Yields an error for the first of these trials in which a group's columns depend on other groups."""
    estimation = attrs.evolve(update, kl_in_reward=None, correction_params=None)
    name = config.trainer.algorithm.advantage_estimator
    for what, settings in (
        (f"trainer.algorithm.advantage_estimator: with {name!r}", estimation),
        ("trainer.algorithm: with KL in the reward or off-policy correction", update),
    ):
        if difference := difference_alone(settings, num_samples=config.generator.n_samples_per_prompt):
            yield ConfigError(
                f"{what}, a group's advantages or weights depend on the other groups of the batch: they differ by "
                f"{difference:.2g} if the group is alone. But {_KEY}=true computes them before all groups have "
                "finished. Switch off normalisation over the batch, choose another estimator, e.g. grpo, or set "
                f"{_KEY}=false"
            )
            return


def difference_alone(settings: UpdateSettings, *, num_samples: int) -> float:
    """Prepares three made-up groups together, and each of them alone. Returns the largest difference between the two
    results, or 0 if it is not above `_TOLERANCE`."""
    largest = 0.0
    for seed in range(4):
        batch = made_up_batch(num_samples, seed)
        together, _ = prepared(batch, settings, kl_coef=0.1)
        for group in batch["group_id"].unique():
            rows = torch.nonzero(batch["group_id"] == group).squeeze(1)
            alone, _ = prepared(batch.select(rows), settings, kl_coef=0.1)
            same = together.select(rows)
            for column in alone:
                largest = max(largest, _difference(alone[column].double(), same[column].double()))
    return largest if largest > _TOLERANCE else 0.0


def _difference(first: Tensor, second: Tensor) -> float:
    equal = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(equal, 0.0, (first - second).abs()).nan_to_num(math.inf).max())


def made_up_batch(num_samples: int, seed: int) -> Batch:
    """A batch with samples of three prompts, and with all columns that exist before advantages are computed. The last
    sample of each prompt has two steps. Rewards are between 0 and 1; for every second seed they are 0 or 1."""
    dice = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> list[float]:
        return torch.rand(*shape, generator=dice).tolist()

    sequences = []
    for trajectory in range(3 * num_samples):
        group, sample = divmod(trajectory, num_samples)
        steps = 2 if sample == num_samples - 1 else 1
        for step in range(steps):
            length = int(torch.randint(3, 7, (), generator=dice))
            reward = random(1)[0]
            sampled = [0, *[1] * (length - 1)]
            sequences.append(
                {
                    "tokens": [1] * length,
                    "sampled": sampled,
                    "loss_mask": sampled,
                    "policy_version": [one - 1 for one in sampled],
                    "rewards": [*[0.0] * (length - 1), float(round(reward)) if seed % 2 else reward],
                    **{
                        name: [-value * one for value, one in zip(random(length), sampled, strict=True)]
                        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
                    },
                    "group_id": group,
                    "greedy_score": 0.25 * (group + seed) % 1.0,
                    "trajectory_id": trajectory,
                    "step_index": step,
                    "is_last_step": step == steps - 1,
                }
            )
    return Batch.from_sequences(sequences)
