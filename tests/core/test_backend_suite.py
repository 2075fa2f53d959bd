"""The conformance suite itself: it passes the reference worker, and finds every fault that is built into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from rl_core.errors import ConfigError
from rl_core.interfaces import CONTRACT_VERSION, OptimizerConfig, RankInfo, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.testing.backend import BackendConformance, Variant, checks, make_case
from rl_core.testing.reference_worker import ReferenceWorker
from rl_core.weights import pack_buckets


@attrs.frozen
class NoOptions:
    """No options."""


@attrs.frozen(kw_only=True)
class PlainBackend:
    """A backend around a worker class."""

    worker_class: Callable[[WorkerSpec], ReferenceWorker]
    name: str = "plain"
    contract_version: int = CONTRACT_VERSION
    config_section: str = "plain_config"
    options_class: type = NoOptions

    def mesh(self, options: NoOptions, world_size: int) -> Mesh:
        return Mesh(world_size=world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        if not (Path(spec.model.path or "") / "config.json").exists():
            raise ConfigError(f"{spec.model.path}: no model")

    def needs_own_process(self) -> bool:
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> ReferenceWorker:
        return self.worker_class(spec)


class PlainWorker(ReferenceWorker):
    """The reference with the metrics that the suite asks for."""

    def forward_backward(self, batch, plan, loss, *, temperature):
        metrics = super().forward_backward(batch, plan, loss, temperature=temperature)
        scores = self.forward(batch, plan, temperature=temperature)
        mask_T = batch["loss_mask"]
        if "old_logprobs" not in batch:
            return metrics
        ratio_T = (scores["logprobs"] - batch["old_logprobs"])[mask_T].exp()
        count = float(mask_T.sum())
        return {
            **metrics,
            "entropy": (scores["entropies"][mask_T].sum().item(), count),
            "ratio": (ratio_T.sum().item(), count),
        }


class TestReferenceWorker(BackendConformance):
    backend = PlainBackend(worker_class=PlainWorker)
    options = NoOptions()
    variants = (Variant(), Variant(tie_word_embeddings=False))


class IgnoresTemperature(PlainWorker):
    def forward(self, batch, plan, *, temperature):
        return super().forward(batch, plan, temperature=1.0)


class ScoresOneTokenLate(PlainWorker):
    def forward(self, batch, plan, *, temperature):
        scores = super().forward(batch, plan, temperature=temperature)
        return {name: values_T.roll(1) for name, values_T in scores.items()}


class TrainsAtAnotherTemperature(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature):
        return super().forward_backward(batch, plan, loss, temperature=1.01 * temperature)


class WeighsOneTokenWrong(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature):
        weights_T = batch["loss_weights"].clone()
        weights_T[batch["loss_mask"].nonzero()[0]] *= 1.01
        return super().forward_backward(batch.with_columns(loss_weights=weights_T), plan, loss, temperature=temperature)


class LeavesOneTokenOut(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature):
        mask_T = batch["loss_mask"].clone()
        mask_T[mask_T.nonzero()[-1]] = False
        return super().forward_backward(batch.with_columns(loss_mask=mask_T), plan, loss, temperature=temperature)


class AveragesOverMicroBatches(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature):
        scaled = batch.with_columns(loss_weights=batch["loss_weights"] / len(plan))
        return super().forward_backward(scaled, plan, loss, temperature=temperature)


class LooksIntoTheNextSequence(PlainWorker):
    def _sequences(self, batch, plan):
        bounds = batch.offsets.tolist()
        return [slice(bounds[min(m)], bounds[max(m) + 1]) for m in plan]


class ReadsOutsideTheMask(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature):
        everything_T = torch.ones_like(batch["loss_mask"])
        return super().forward_backward(batch.with_columns(loss_mask=everything_T), plan, loss, temperature=temperature)


class KeepsItsGradients(PlainWorker):
    def optim_step(self):
        kept = self.gradients()
        step = super().optim_step()
        for name, parameter in self.model.named_parameters():
            parameter.grad = kept[name]
        return step


class StepsOnNan(PlainWorker):
    def optim_step(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return super().optim_step()


def with_optimizer(**changes: Any) -> type[PlainWorker]:
    class Changed(PlainWorker):
        def __init__(self, spec: WorkerSpec):
            if spec.optimizer is not None:
                spec = attrs.evolve(spec, optimizer=attrs.evolve(spec.optimizer, **changes))
            super().__init__(spec)

    return Changed


class ReportsTheClippedNorm(PlainWorker):
    def optim_step(self):
        step = super().optim_step()
        assert isinstance(self.spec.optimizer, OptimizerConfig)
        return attrs.evolve(step, grad_norm=min(step.grad_norm, self.spec.optimizer.max_grad_norm))


class ExportsOldWeights(PlainWorker):
    def __init__(self, spec):
        super().__init__(spec)
        self.first = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def export_weights(self, max_bucket_bytes):
        return pack_buckets(self.first.items(), max_bucket_bytes)


class ExportsWithAPrefix(PlainWorker):
    def export_weights(self, max_bucket_bytes):
        return pack_buckets(
            ((f"module.{name}", weight) for name, weight in self.model.named_parameters()), max_bucket_bytes
        )


class ExportsOneBucket(PlainWorker):
    def export_weights(self, max_bucket_bytes):
        return super().export_weights(1 << 30)


class ForgetsTheOptimizer(PlainWorker):
    def load_state(self, directory):
        optimizer, self.optimizer = self.optimizer, None
        super().load_state(directory)
        self.optimizer = optimizer


class ForgetsTheSchedule(PlainWorker):
    def load_state(self, directory):
        steps_done = self.steps_done
        super().load_state(directory)
        self.steps_done = steps_done


class IgnoresACutOffFile(PlainWorker):
    def load_state(self, directory):
        try:
            super().load_state(directory)
        except Exception:
            if not directory.exists():
                raise


class SavesNoTokenizer(PlainWorker):
    def save_model(self, directory):
        self.model.save_pretrained(directory)


FAULTS: dict[type[ReferenceWorker], str] = {
    IgnoresTemperature: "test_logprobs_and_entropies_of_the_stream",
    ScoresOneTokenLate: "test_logprobs_and_entropies_of_the_stream",
    TrainsAtAnotherTemperature: "test_loss_and_every_gradient",
    WeighsOneTokenWrong: "test_loss_and_every_gradient",
    LeavesOneTokenOut: "test_loss_and_every_gradient",
    AveragesOverMicroBatches: "test_micro_batches_and_calls_only_add_up",
    LooksIntoTheNextSequence: "test_logprobs_and_entropies_of_the_stream",
    ReadsOutsideTheMask: "test_what_stands_outside_the_loss_mask_does_not_matter",
    KeepsItsGradients: "test_an_optimizer_step_clears_the_gradients",
    StepsOnNan: "test_a_gradient_that_is_not_finite_skips_step_and_schedule",
    with_optimizer(max_grad_norm=0.0): "test_three_optimizer_steps",
    with_optimizer(weight_decay=0.0): "test_three_optimizer_steps",
    with_optimizer(adam_betas=(0.9, 0.999)): "test_three_optimizer_steps",
    with_optimizer(num_warmup_steps=0): "test_three_optimizer_steps",
    ReportsTheClippedNorm: "test_the_gradient_is_clipped_by_its_global_norm",
    ExportsOldWeights: "test_three_optimizer_steps",
    ExportsWithAPrefix: "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets",
    ExportsOneBucket: "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets",
    ForgetsTheOptimizer: "test_saved_state_continues_exactly",
    ForgetsTheSchedule: "test_saved_state_continues_exactly",
    IgnoresACutOffFile: "test_a_state_that_is_missing_or_cut_off_is_a_checkpoint_error",
    SavesNoTokenizer: "test_the_saved_model_is_a_hugging_face_model_with_its_tokenizer",
}


@pytest.mark.parametrize(
    ("worker_class", "check"), FAULTS.items(), ids=[f"{w.__name__}-{i}" for i, w in enumerate(FAULTS)]
)
def test_the_suite_finds_a_wrong_worker(worker_class: type[ReferenceWorker], check: str, tmp_path: Path):
    class Suite(BackendConformance):
        backend = PlainBackend(worker_class=worker_class)
        options = NoOptions()

    with pytest.raises((AssertionError, pytest.fail.Exception, OSError, ValueError)):
        getattr(Suite(), check)(make_case(tmp_path, NoOptions(), Variant()))


def test_every_check_that_compares_numbers_has_a_wrong_worker():
    without = {
        "test_it_is_a_backend_of_this_contract": "isinstance proves it",
        "test_a_missing_model_is_a_configuration_error": "no number",
        "test_scoring_needs_tokens_only_and_leaves_no_gradient": "a column that is read raises",
        "test_the_cross_entropy_loss": "the loss's own formula; gradients are compared as elsewhere",
        "test_metrics_are_averages_over_the_trained_tokens": "LeavesOneTokenOut changes their weight, seen below",
        "test_a_reference_model_scores_and_does_not_train": "scores are compared as elsewhere",
    }
    assert set(checks()) == set(FAULTS.values()) | set(without)


def test_a_token_left_out_shows_in_the_metrics(tmp_path: Path):
    class Suite(BackendConformance):
        backend = PlainBackend(worker_class=LeavesOneTokenOut)
        options = NoOptions()

    with pytest.raises(AssertionError, match="weighs"):
        Suite().test_metrics_are_averages_over_the_trained_tokens(make_case(tmp_path, NoOptions(), Variant()))


def test_a_worker_that_attends_over_a_whole_micro_batch_differs_by_far_more_than_the_tolerance(tmp_path: Path):
    case = make_case(tmp_path, NoOptions(), Variant())
    wrong = LooksIntoTheNextSequence(case.spec).forward(case.batch, ((0, 1), (2, 3), (4, 5), (6, 7)), temperature=1.0)
    right = case.reference.forward(case.batch, case.plan, temperature=1.0)
    assert (wrong["logprobs"] - right["logprobs"]).abs().max() > 0.1
