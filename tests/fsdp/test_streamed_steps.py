"""Training a step in parts, in whatever order its groups finish, gives the same result as training it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, OptimizerStep, OptimizerUpdate, RankInfo
from rl_core.trainer.loop.step_metrics import divided
from rl_core.trainer.update.batch_update import BatchUpdate
from rl_core.trainer.update.models import Models
from rl_core.trainer.update.scoring_pass import ScoringPass
from rl_core.workers import WorkerGroup
from rl_fsdp import fsdp
from rl_fsdp.worker import FsdpWorker
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import spec_of
from tests.fsdp.test_scoring_pass import UNSCORED, played_batch, settings_of

PARTS = ([[0, 1, 2, 3]], [[3], [1, 2], [0]], [[2], [0], [3], [1]])
"""Ways to split a step into parts: the groups of each part, in the order in which they finish."""
TOLERANCE = 1e-6
"""Relative L2 difference of the gradients over all parameters. Only the order of sums differs; measured: 3e-7."""


class RecordingFsdp:
    """FSDP whose only rank records the gradient of each step. With `scales=False` it omits the gradient scale."""

    def __init__(self, *, scales: bool = True) -> None:
        self.gradients: list[Tensor] = []
        self.scales = scales

    def __getattr__(self, name: str) -> Any:
        return getattr(fsdp, name)

    def create_worker(self, spec: Any, rank: RankInfo) -> FsdpWorker:
        recording = self

        class Recording(FsdpWorker):
            def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
                update = update if recording.scales else None
                vector = torch.cat([gradient.double().flatten() for gradient in self.gradients().values()])
                recording.gradients.append(vector * (1.0 if update is None else update.gradient_scale))
                return super().optim_step(update)

        return Recording(spec, rank)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="float32")


async def stepped(
    path: Path,
    batch: Batch,
    parts: list[list[int]] | None,
    *,
    reduction: str = "token_mean",
    loss: str = "ppo_clip",
    scoring: ScoringPass = UNSCORED,
    scales: bool = True,
) -> tuple[Tensor, dict[str, float], Tensor]:
    """The gradient of one step, its metrics, and the scores by the new weights. `parts=None` trains on all groups
    at once."""
    backend: Any = RecordingFsdp(scales=scales)
    group = await WorkerGroup.launch(backend, spec_of(path))
    settings = settings_of(scoring, groups_per_mini_batch=4, epochs=1)
    policy = attrs.evolve(
        settings.policy,
        loss=LossSpec(name=loss, entropy_coef=0.05),
        reduction=reduction,
        reduction_params={"max_seq_len": 100} if reduction == "seq_mean_token_sum_norm" else {},
    )
    update = BatchUpdate(attrs.evolve(settings, policy=policy), Models(policy=group), kl_coef=0.0)
    if parts is None:
        whole, _ = update.prepare(await update.score(batch))
        whole, metrics = await update.train(whole, step=1)
    else:
        trained = []
        for groups in parts:
            rows = [row for number in groups for row in (2 * number, 2 * number + 1)]
            part, _ = update.prepare(await update.score(batch.select(rows)))
            trained.append(await update.add(part, step=1))
        metrics = await update.finish(step=1)
        whole = Batch.concat(trained)
        whole = whole.select(torch.argsort(whole["trajectory_id"]))
    metrics = {**metrics, **update.agreement(whole, version=0)}
    scores = await group.forward(batch, settings.forward_limits, temperature=1.0)
    await group.close()
    (gradient,) = backend.gradients
    return gradient, divided(metrics), scores["logprobs"]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


CASES = [
    *((reduction, "ppo_clip", UNSCORED) for reduction in REDUCTIONS),
    *(("sequence_mean", loss, UNSCORED) for loss in ("gspo", "cispo", "dro", "reinforce")),
    ("prompt_mean", "ppo_clip", ScoringPass(scores=("logprobs",))),
]


@pytest.mark.parametrize(
    ("reduction", "loss", "scoring"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "unscored" if value is UNSCORED else "scored",
)
async def test_the_step_does_not_depend_on_the_order_in_which_groups_finish(
    reduction: str, loss: str, scoring: ScoringPass, checkpoint: Path
):
    case: dict[str, Any] = {"reduction": reduction, "loss": loss, "scoring": scoring}
    expected, metrics, scores = await stepped(checkpoint, played_batch(), None, **case)
    assert expected.norm() > 1e-4
    for parts in PARTS:
        found, found_metrics, found_scores = await stepped(checkpoint, played_batch(), parts, **case)
        assert relative(found, expected) <= TOLERANCE
        assert found_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        # Where a gradient is 0, Adam can turn a rounding error into a change of up to the learning rate.
        assert (found_scores - scores).abs().max() <= 1e-4


@pytest.mark.parametrize("reduction", REDUCTIONS)
async def test_a_step_without_trained_tokens_is_the_same_in_parts(reduction: str, checkpoint: Path):
    batch = played_batch()
    batch = batch.with_columns(loss_mask=torch.zeros_like(batch["loss_mask"]))
    expected, metrics, scores = await stepped(checkpoint, batch, None, reduction=reduction)
    found, found_metrics, found_scores = await stepped(checkpoint, batch, PARTS[1], reduction=reduction)
    assert not expected.any()
    assert not found.any()
    assert torch.equal(found_scores, scores)
    assert found_metrics == metrics


async def test_a_gradient_that_is_not_divided_at_the_end_is_noticed(checkpoint: Path):
    """Negative control: without the scale, the ranks have the gradient of a sum instead of a mean."""
    expected, metrics, _ = await stepped(checkpoint, played_batch(), None)
    found, found_metrics, _ = await stepped(checkpoint, played_batch(), PARTS[1], scales=False)
    assert relative(found, expected) > 10.0
    assert found_metrics["policy/grad_norm"] > 10.0 * metrics["policy/grad_norm"]


async def test_weights_computed_per_part_are_noticed(checkpoint: Path):
    """Negative control: if each part takes its own mean, a group's weight depends on which groups finish with it."""
    expected, _, _ = await stepped(checkpoint, played_batch(), None, reduction="token_mean")
    parts = [await stepped(checkpoint, played_batch(), [groups]) for groups in PARTS[1]]
    found = torch.stack([gradient for gradient, _, _ in parts]).mean(0)
    assert relative(found, expected) > 1e-2
