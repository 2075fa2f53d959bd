"""Training without a scoring pass over the whole batch gives the same gradients, weights and rollout agreement as
training with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core import plugins
from rl_core.algorithms.advantages import grpo_advantages
from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, RankInfo
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.trainer.update.batch_update import BatchUpdate, UpdateSettings, rollout_agreement
from rl_core.trainer.update.model_update import ModelUpdateSettings
from rl_core.trainer.update.models import Models
from rl_core.trainer.update.scoring_pass import ScoringPass
from rl_core.workers import MicroBatchLimits, WorkerGroup
from rl_fsdp import fsdp
from rl_fsdp.worker import FsdpWorker
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import StartWorker, random_batch, spec_of

LENGTHS = [5, 61, 2, 33, 40, 1, 90, 12]
PLAN = [[0, 1, 2, 3], [4, 5, 6, 7]]
UNSCORED = ScoringPass(covers_batch=False, first_is_own=True, keeps_first=True, scores=("logprobs",))
NAMES = [plugin.name for plugin in plugins.installed("rl_core.policy_losses")]
COMPARING = [
    name
    for name in NAMES
    if (objective := objective_from_spec(LossSpec(name=name))).compares_with_old and not objective.prepare_columns
]


def gradient(worker: FsdpWorker, batch: Batch, loss: LossSpec, returns: Sequence[str] = ()) -> tuple[Tensor, Any]:
    found = worker.forward_backward(batch, PLAN, loss, temperature=0.9, returns=returns)
    vector = torch.cat([g.double().flatten() for g in worker.gradients().values()])
    worker.shards.clear_gradients()
    return vector, found


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    "loss",
    [
        *(LossSpec(name=name) for name in COMPARING),
        LossSpec(name="ppo_clip", kl_coef=0.1, kl_estimator="k3_unbiased", entropy_coef=0.05),
        LossSpec(name="reinforce", kl_coef=0.1, kl_estimator="k3_unbiased"),
    ],
    ids=lambda loss: f"{loss.name}{'+kl' if loss.kl_coef else ''}",
)
def test_a_loss_that_takes_its_own_logprobs_as_old_ones_has_the_gradient_of_a_scored_batch(
    loss: LossSpec, start_worker: StartWorker
):
    worker = start_worker({"dtype": "float32"})
    batch = random_batch(LENGTHS)
    batch = batch.with_columns(
        loss_weights=batch["loss_mask"].float() / batch.num_tokens,
        rollout_logprobs=batch["old_logprobs"],
        correction_weights=torch.ones(batch.num_tokens),
    )
    own = attrs.evolve(loss, old_is_current=True)
    found, returned = gradient(worker, batch.without_columns("old_logprobs"), own, ("logprobs",))
    assert found.norm() > 1e-3
    # Equal to the last bit, because the same micro-batches give the same log-probs.
    same, _ = gradient(worker, batch.with_columns(old_logprobs=returned["logprobs"]), loss)
    assert torch.equal(found, same)
    # A scoring pass also scores prompts, so its tensors have other shapes, and its log-probs differ in the last bit.
    scored = worker.forward(batch, PLAN, temperature=0.9)
    expected, _ = gradient(worker, batch.with_columns(old_logprobs=scored["logprobs"]), loss)
    assert relative(found, expected) <= 1e-6
    # Negative control: other old log-probs are detected. At every other token, the ratio exceeds every clipping bound.
    shift_T = 0.5 * (torch.arange(batch.num_tokens) % 2)
    other, _ = gradient(worker, batch.with_columns(old_logprobs=scored["logprobs"] - shift_T), loss)
    assert relative(other, expected) > 1e-3


class CountingFsdp:
    """FSDP whose only rank records how many sequences each scoring pass has."""

    def __init__(self) -> None:
        self.scored: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(fsdp, name)

    def create_worker(self, spec: Any, rank: RankInfo) -> FsdpWorker:
        scored = self.scored

        class Counting(FsdpWorker):
            def forward(self, batch: Batch, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
                scored.append(batch.num_sequences)
                return super().forward(batch, *args, **kwargs)

        return Counting(spec, rank)


def settings_of(scoring: ScoringPass, *, groups_per_mini_batch: int, epochs: int) -> UpdateSettings:
    limits = MicroBatchLimits(max_tokens=200)
    policy = ModelUpdateSettings(
        name="policy",
        loss=LossSpec(name="ppo_clip"),
        reduction="token_mean",
        reduction_params={},
        groups_per_mini_batch=groups_per_mini_batch,
        epochs=epochs,
        temperature=1.0,
        limits=limits,
        entropy_interval=2,
        max_nonfinite_steps=2,
        seed=0,
    )
    return UpdateSettings(
        policy=policy,
        critic=None,
        scoring=scoring,
        estimator=grpo_advantages,
        estimator_params={},
        correction_params=None,
        kl_in_reward=None,
        adaptive_kl=None,
        normalize_advantages=False,
        temperature=1.0,
        forward_limits=limits,
    )


def played_batch() -> Batch:
    """A batch of four groups of two samples. Its first sampled token is not trained on."""
    batch = random_batch(LENGTHS).without_columns("old_logprobs", "ref_logprobs", "advantages")
    count = batch.num_sequences
    rewards_T = torch.zeros(batch.num_tokens)
    rewards_T[batch.offsets[1:] - 1] = torch.arange(count).float() % 3
    mask_T = batch["loss_mask"].clone()
    mask_T[mask_T.nonzero()[0]] = False
    return batch.with_columns(
        loss_mask=mask_T,
        rollout_logprobs=torch.full((batch.num_tokens,), -3.7),
        policy_version=torch.where(batch["sampled"], 0, -1).to(torch.int32),
        rewards=rewards_T,
        trajectory_id=torch.arange(count),
        step_index=torch.zeros(count, dtype=torch.int64),
        is_last_step=torch.ones(count, dtype=torch.bool),
    )


async def trained(
    path: Path, scoring: ScoringPass, *, groups_per_mini_batch: int, epochs: int
) -> tuple[dict[str, float], Tensor, list[int]]:
    """Takes one step. Returns its metrics, the scores by the new weights, and the number of sequences in each scoring
    pass."""
    backend: Any = CountingFsdp()
    group = await WorkerGroup.launch(backend, spec_of(path))
    settings = settings_of(scoring, groups_per_mini_batch=groups_per_mini_batch, epochs=epochs)
    update = BatchUpdate(settings, Models(policy=group), kl_coef=0.0)
    batch, _ = update.prepare(await update.score(played_batch()))
    batch, metrics = await update.train(batch, step=1)
    agreement = update.agreement(batch, version=0)
    if scoring.covers_batch:
        assert agreement == rollout_agreement(batch, 0)
        agreement = rollout_agreement(batch, 0, among=batch["loss_mask"])
    metrics = {**metrics, **agreement}
    scored = list(backend.scored)
    scores = torch.cat(list((await group.forward(batch, settings.forward_limits, temperature=1.0)).values()))
    await group.close()
    return {name: total / weight for name, (total, weight) in metrics.items()}, scores, scored


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.mark.parametrize(
    ("groups_per_mini_batch", "epochs", "scored"),
    [(4, 1, []), (4, 3, []), (2, 1, [4]), (1, 2, [6])],
    ids=["one step", "three epochs", "two mini-batches", "four mini-batches, two epochs"],
)
async def test_a_step_without_a_scoring_pass_over_the_whole_batch_equals_a_step_with_one(
    groups_per_mini_batch: int, epochs: int, scored: list[int], checkpoint: Path
):
    steps = {"groups_per_mini_batch": groups_per_mini_batch, "epochs": epochs}
    expected, expected_scores, whole = await trained(checkpoint, ScoringPass(scores=("logprobs",)), **steps)
    found, scores, later = await trained(checkpoint, UNSCORED, **steps)
    assert whole == [8]
    assert later == scored
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert "policy/entropy" in found
    # Log-probs and entropies by the new weights. Where a gradient is 0, Adam can turn a rounding error into a change of
    # up to lr.
    assert (scores - expected_scores).abs().max() <= 1e-4
