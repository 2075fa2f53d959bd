"""PPO's critic: its values, its batches and its checkpoints, and when it trains at the same time as the policy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.algorithms.advantages import gae_advantages
from rl_core.batch import Batch
from rl_core.config import from_mapping, needs_critic, resolve
from rl_core.config.checks import check_plugins
from rl_core.errors import ConfigError, NonFiniteError
from rl_core.interfaces import LossSpec, OptimizerStep
from rl_core.trainer.before.settings import update_settings, worker_spec
from rl_core.trainer.update.batch_update import BatchUpdate, UpdateSettings, explained_variance
from rl_core.trainer.update.model_update import ModelUpdateSettings
from rl_core.trainer.update.models import Models
from rl_core.workers import MicroBatchLimits

LIMITS = MicroBatchLimits(max_sequences=4)


class FakeGroup:
    """A policy, or a critic if `value` is given; records calls and lets other tasks run during each training pass."""

    def __init__(self, name: str, events: list[str], *, value: float | None = None, shares: bool = False):
        self.name = name
        self.events = events
        self.value = value
        self.shares = shares
        self.trained: list[tuple[Batch, LossSpec]] = []
        self.grad_norm = 1.0

    def shares_devices_with(self, other: FakeGroup) -> bool:
        return self.shares

    async def forward(
        self, batch: Batch, limits: MicroBatchLimits, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        if self.value is not None:
            return {"values": torch.where(batch["sampled"], self.value, 0.0)}
        return {"logprobs": -batch["sampled"].float(), "entropies": torch.ones(batch.num_tokens)}

    async def forward_backward(
        self, batch: Batch, limits: MicroBatchLimits, loss: LossSpec, *, temperature: float, returns: Sequence[str]
    ) -> dict[str, tuple[float, float]]:
        self.trained.append((batch, loss))
        self.events.append(f"{self.name} starts")
        await asyncio.sleep(0)
        self.events.append(f"{self.name} ends")
        return {"loss": (2.0, 1.0)}

    async def optim_step(self) -> OptimizerStep:
        return OptimizerStep(grad_norm=self.grad_norm, learning_rate=0.1, skipped=not math.isfinite(self.grad_norm))

    async def save_state(self, directory: Any) -> None:
        self.events.append(f"{self.name} to {directory}")

    save_model = load_state = save_state


def make_batch() -> Batch:
    """Two prompts with two samples each: one prompt token and two sampled tokens, the last of which has the reward."""
    return Batch.from_sequences(
        [
            {
                "tokens": [5, 6, 7],
                "sampled": [0, 1, 1],
                "loss_mask": [0, 1, 1],
                "rewards": [0.0, 0.0, reward],
                "group_id": number // 2,
                "trajectory_id": number,
                "step_index": 0,
                "is_last_step": True,
            }
            for number, reward in enumerate([1.0, 0.0, 1.0, 1.0])
        ]
    )


def model_settings(name: str, loss: str, groups_per_mini_batch: int) -> ModelUpdateSettings:
    return ModelUpdateSettings(
        name=name,
        loss=LossSpec(name=loss),
        reduction="token_mean",
        reduction_params={},
        groups_per_mini_batch=groups_per_mini_batch,
        epochs=1,
        temperature=1.0,
        limits=LIMITS,
        max_nonfinite_steps=2,
        seed=0,
    )


def ppo(policy: FakeGroup, critic: FakeGroup) -> BatchUpdate:
    settings = UpdateSettings(
        policy=model_settings("policy", "rl_core.algorithms.losses:ppo_clip_loss", 2),
        critic=model_settings("critic", "rl_core.algorithms.value_losses:value_clip_loss", 1),
        estimator=gae_advantages,
        estimator_params={"whiten_advantages": False},
        correction_params=None,
        kl_in_reward=None,
        adaptive_kl=None,
        normalize_advantages=False,
        temperature=1.0,
        forward_limits=LIMITS,
    )
    models: Any = Models(policy=policy, critic=critic)  # pyright: ignore[reportArgumentType]
    return BatchUpdate(settings, models, kl_coef=0.0)


def make_groups(**fields: Any) -> tuple[list[str], FakeGroup, FakeGroup]:
    events: list[str] = []
    return events, FakeGroup("policy", events), FakeGroup("critic", events, value=0.25, **fields)


async def test_the_baseline_is_the_critics_values_and_the_critics_target_is_the_returns():
    _, policy, critic = make_groups()
    update = ppo(policy, critic)
    batch, _ = update.prepare(await update.score(make_batch()))
    assert batch["values"].tolist() == [0.0, 0.25, 0.25] * 4
    assert batch["returns"].tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1]
    assert batch["advantages"].tolist() == [0, 0.75, 0.75, 0, -0.25, -0.25, 0, 0.75, 0.75, 0, 0.75, 0.75]


async def test_the_critic_has_its_own_mini_batches_loss_weights_and_columns():
    _, policy, critic = make_groups()
    update = ppo(policy, critic)
    batch, _ = update.prepare(await update.score(make_batch()))
    _, metrics = await update.train(batch, step=1)
    assert [batch.num_sequences for batch, _ in policy.trained] == [4]
    assert [batch.num_sequences for batch, _ in critic.trained] == [2, 2]
    assert [float(batch["loss_weights"].sum()) for batch, _ in critic.trained] == pytest.approx([1.0, 1.0])
    assert set(critic.trained[0][0]) == {"tokens", "loss_mask", "loss_weights", "values", "returns"}
    assert metrics["critic/loss"] == (4.0, 2.0)
    assert metrics["critic/grad_norm"] == (2.0, 2.0)
    assert metrics["policy/loss"] == (2.0, 1.0)


async def test_critic_and_policy_train_at_the_same_time_on_separate_devices():
    events, policy, critic = make_groups()
    update = ppo(policy, critic)
    await update.train(update.prepare(await update.score(make_batch()))[0], step=1)
    assert events.index("critic starts") < events.index("policy ends")
    assert events.index("policy starts") < events.index("critic ends")


async def test_critic_and_policy_train_one_after_the_other_on_shared_devices():
    events, policy, critic = make_groups(shares=True)
    update = ppo(policy, critic)
    await update.train(update.prepare(await update.score(make_batch()))[0], step=1)
    assert events == [*["critic starts", "critic ends"] * 2, "policy starts", "policy ends"]


async def test_skipped_steps_of_each_model_are_counted_separately():
    _, policy, critic = make_groups()
    critic.grad_norm = float("nan")
    update = ppo(policy, critic)
    with pytest.raises(NonFiniteError, match="2 optimizer steps of the critic in a row"):
        await update.train(update.prepare(await update.score(make_batch()))[0], step=1)
    assert (update.nonfinite_steps, update.critic_nonfinite_steps) == (0, 2)


async def test_a_checkpoint_holds_the_critic_beside_the_policy():
    events, policy, critic = make_groups()
    models: Any = Models(policy=policy, critic=critic)  # pyright: ignore[reportArgumentType]
    for call in (models.save_state, models.load_state, models.save_model):
        await call(Path("at"))
    assert events == [*["policy to at/policy", "critic to at/critic"] * 2, "policy to at", "critic to at/critic"]


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    batch = make_batch()
    returns_T = torch.tensor([9.0, 1, 2, 9, 3, 4, 9, 5, 6, 9, 7, 8])
    for values_T, expected in ((returns_T, 1.0), (returns_T + 3, 1.0), (torch.full((12,), 4.0), 0.0)):
        metrics = explained_variance(batch.with_columns(returns=returns_T, values=values_T))
        assert metrics["critic/explained_variance"] == (pytest.approx(expected), 1.0)
    assert explained_variance(batch.with_columns(returns=torch.ones(12), values=returns_T)) == {}


def test_a_run_has_a_critic_exactly_when_its_estimator_reads_values():
    with_critic = from_mapping({"trainer.algorithm.advantage_estimator": "gae"})
    without = from_mapping({"trainer.algorithm.advantage_estimator": "rloo"})
    assert (needs_critic(with_critic), needs_critic(without)) == (True, False)
    critic = update_settings(resolve(with_critic)).critic
    assert critic is not None
    assert critic.loss == LossSpec(name="value_clip", params={"value_clip": 0.2})
    assert update_settings(resolve(without)).critic is None


def test_the_critic_has_its_own_section_and_starts_from_the_policys_model():
    values = {
        "trainer.policy.model.path": "some/model",
        "trainer.policy.model.lora.rank": 8,
        "trainer.critic.optimizer_config.max_grad_norm": 0.5,
    }
    _, spec = worker_spec(resolve(from_mapping(values)), "critic", num_training_steps=None)
    assert spec.model.path == "some/model"
    assert spec.model.lora.rank == 0
    assert spec.optimizer is not None
    assert (spec.optimizer.lr, spec.optimizer.max_grad_norm) == (5e-6, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trainer.critic_mini_batch_size": 48},
            "critic_mini_batch_size: 48 does not divide.*next smaller divisor is 32",
        ),
        (
            {"trainer.placement.critic_num_gpus_per_node": 2},
            "colocate_all=true needs a critic with .* has 1 × 1, .* is 1 × 2",
        ),
    ],
)
def test_a_critic_that_cannot_be_trained_is_refused_before_the_run(change: dict[str, Any], message: str):
    ppo = {"trainer.algorithm.advantage_estimator": "gae", "trainer.train_batch_size": 64}
    sizes = {"trainer.policy_mini_batch_size": 64, "trainer.critic_mini_batch_size": 64}
    with pytest.raises(ConfigError, match=message):
        check_plugins(from_mapping(ppo | sizes | change))
