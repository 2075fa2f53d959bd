"""Tests of the conformance suite itself: the reference worker passes, and every deliberate fault is found."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from _pytest.assertion.rewrite import AssertionRewritingHook

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import OptimizerConfig, RankInfo, Worker, WorkerSpec
from rl_core.rank_kit.weight_buckets import pack_buckets
from rl_core.testing.tensors import multiple_of
from rl_transformers.proof import model_proof
from rl_transformers.testing.backend import BackendConformance, Variant, checks, expected_scores, open_case
from rl_transformers.testing.bfloat16 import Bfloat16Worker
from rl_transformers.testing.cases import LIMITS, KeptRanks
from rl_transformers.testing.parity import DIRECTORY_VARIABLE
from tests import forked_proofs
from tests.core import plain_backend as plain
from tests.core.plain_backend import NoOptions, OffloadableWorker, PlainBackend, PlainWorker, RoutedWorker

MOE = {"family": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [0]}


@pytest.mark.slow
class TestReferenceWorker(BackendConformance):
    backend = PlainBackend(worker_class=PlainWorker)
    options = NoOptions()
    variants = (Variant(), Variant(checkpoint={"tie_word_embeddings": False}), Variant(world_size=2))


@pytest.mark.slow
class TestReferenceWorkerThatFollowsRoutes(BackendConformance):
    backend = PlainBackend(worker_class=RoutedWorker, name="plain_routed")
    options = NoOptions()
    variants = (
        Variant(checkpoint=MOE, forced_routes=True),
        Variant(world_size=2, checkpoint=MOE, forced_routes=True, parity_only=True),
    )


@pytest.mark.slow
class TestReferenceWorkerThatCanLeaveItsDevice(BackendConformance):
    backend = PlainBackend(worker_class=OffloadableWorker, name="plain_offloadable")
    options = NoOptions()
    variants = (Variant(world_size=2),)
    left_out: ClassVar = {
        name: "another reference worker runs it"
        for name in checks()
        if name != "test_offloading_between_all_phases_changes_nothing"
    }


class IgnoresTemperature(PlainWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        return super().forward(batch, plan, temperature=1.0)


class ScoresOneTokenLate(PlainWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        scores = super().forward(batch, plan, temperature=temperature)
        return {name: values_T.roll(1) for name, values_T in scores.items()}


class TrainsAtAnotherTemperature(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        return super().forward_backward(batch, plan, loss, temperature=1.01 * temperature, returns=returns)


class WeighsOneTokenWrong(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        weights_T = batch["loss_weights"].clone()
        weights_T[batch["loss_mask"].nonzero()[0]] *= 1.01
        return super().forward_backward(
            batch.with_columns(loss_weights=weights_T), plan, loss, temperature=temperature, returns=returns
        )


class LeavesOneTokenOut(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        mask_T = batch["loss_mask"].clone()
        mask_T[mask_T.nonzero()[-1]] = False
        return super().forward_backward(
            batch.with_columns(loss_mask=mask_T), plan, loss, temperature=temperature, returns=returns
        )


class AveragesOverMicroBatches(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        scaled = batch.with_columns(loss_weights=batch["loss_weights"] / len(plan))
        return super().forward_backward(scaled, plan, loss, temperature=temperature, returns=returns)


class AttendsOverAWholeMicroBatch(PlainWorker):
    def _sequences(self, batch, plan):
        bounds = batch.offsets.tolist()
        return [slice(bounds[min(m)], bounds[max(m) + 1]) for m in plan]


class ReadsOutsideTheMask(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        everything_T = torch.ones_like(batch["loss_mask"])
        return super().forward_backward(
            batch.with_columns(loss_mask=everything_T), plan, loss, temperature=temperature, returns=returns
        )


class KeepsItsGradients(PlainWorker):
    def optim_step(self, update=None):
        kept = self.gradients()
        step = super().optim_step(update)
        for name, parameter in self.model.named_parameters():
            parameter.grad = kept[name]
        return step


class TrainsEverything(PlainWorker):
    def __init__(self, spec, rank):
        super().__init__(attrs.evolve(spec, model=attrs.evolve(spec.model, trainable=None)), rank)


class DecaysFrozenWeights(PlainWorker):
    def optim_step(self, update=None):
        step = super().optim_step(update)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.0 if parameter.requires_grad else 1 - 1e-5)
        return step


class StepsOnNan(PlainWorker):
    def optim_step(self, update=None):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return super().optim_step(update)


def with_optimizer(**changes: Any) -> type[PlainWorker]:
    class Changed(PlainWorker):
        def __init__(self, spec: WorkerSpec, rank: RankInfo):
            if spec.optimizer is not None:
                spec = attrs.evolve(spec, optimizer=attrs.evolve(spec.optimizer, **changes))
            super().__init__(spec, rank)

    return Changed


def with_update(**changes: Any) -> type[PlainWorker]:
    """A worker class that overwrites some fields of every `update` passed to `optim_step`."""

    class Changed(PlainWorker):
        def optim_step(self, update=None):
            return super().optim_step(None if update is None else attrs.evolve(update, **changes))

    return Changed


class KeepsTheOtherStepsSettings(PlainWorker):
    last = None

    def optim_step(self, update=None):
        self.last = update or self.last
        return super().optim_step(self.last)


class ReturnsScoresOfAllTokens(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        result = super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)
        return {**result, **self.forward(batch, plan, temperature=temperature)} if returns else result


class TakesOtherLogprobsForItsOwn(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        if loss.old_is_current:
            loss = attrs.evolve(loss, old_is_current=False)
            batch = batch.with_columns(old_logprobs=torch.full((batch.num_tokens,), -4.0))
        return super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)


class GivesMoreScoresThanItIsAskedFor(PlainWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        return super().forward(batch, plan, temperature=temperature)


class ReportsTheClippedNorm(PlainWorker):
    def optim_step(self, update=None):
        step = super().optim_step(update)
        assert isinstance(self.spec.optimizer, OptimizerConfig)
        return attrs.evolve(step, grad_norm=min(step.grad_norm, self.spec.optimizer.max_grad_norm))


class ExportsOldWeights(PlainWorker):
    def __init__(self, spec, rank):
        super().__init__(spec, rank)
        self.first = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def export_weights(self, max_bucket_bytes, **options):
        return pack_buckets(self.first.items(), max_bucket_bytes)


class ExportsWithAPrefix(PlainWorker):
    def export_weights(self, max_bucket_bytes, **options):
        return pack_buckets(
            ((f"module.{name}", weight) for name, weight in self.model.named_parameters()), max_bucket_bytes
        )


class ExportsOneBucket(PlainWorker):
    def export_weights(self, max_bucket_bytes, **options):
        return super().export_weights(1 << 30, **options)


class ForgetsTheOptimizer(PlainWorker):
    def load_state(self, directory):
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        super().load_state(directory)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class StepsEverythingByAdamW(PlainWorker):
    def __init__(self, spec, rank):
        super().__init__(attrs.evolve(spec, optimizer=attrs.evolve(spec.optimizer, name="adamw")), rank)


class ForgetsTheSchedule(PlainWorker):
    def load_state(self, directory):
        steps_done = self.steps_done
        super().load_state(directory)
        self.steps_done = steps_done


class LosesItsGradientsWhenItScores(PlainWorker):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad = None
        return found


class LosesItsGradientsWhenLookedAt(PlainWorker):
    def gradients(self):
        found = super().gradients()
        for parameter in self.model.parameters():
            parameter.grad = None
        return found


class NeverTrainsOnceLookedAt(PlainWorker):
    """Freezes its gradients once they have been read, as if autograd had lost its accumulators."""

    is_deaf = False

    def gradients(self):
        self.is_deaf = True
        return super().gradients()

    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        kept = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        metrics = super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)
        if self.is_deaf:
            for parameter, gradient in zip(self.model.parameters(), kept, strict=True):
                parameter.grad = gradient
        return metrics


class DiesOnAForeignState(PlainWorker):
    def load_state(self, directory):
        assert (directory / "state.pt").exists()
        super().load_state(directory)


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


class ComputesInBfloat16(Bfloat16Worker):
    """Has exactly the precision that the suite requires."""

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        super().__init__(spec)


class KeepsNoFloat32Weights(ComputesInBfloat16):
    """Stores its weights in the compute precision, so most of a small step is rounded away."""

    def optim_step(self, update=None):
        step = super().optim_step(update)
        with torch.no_grad():
            for trained, computing in self._pairs():
                trained.copy_(computing)
        return step


class TakesLogprobsInBfloat16(ComputesInBfloat16):
    """Computes log-probs in the dtype of the logits that the model returns."""

    def score(self, tokens_T, temperature, routes=None, kept=None):
        logits_TV = self.computing(input_ids=tokens_T[None], use_cache=False).logits[0, :-1] / temperature
        all_logprobs_TV = logits_TV.log_softmax(-1)
        logprobs_T = all_logprobs_TV[range(len(tokens_T) - 1), tokens_T[1:]].float()
        entropies_T = -(all_logprobs_TV.exp() * all_logprobs_TV).sum(-1).float()
        return torch.cat([torch.zeros(1), logprobs_T]), torch.cat([torch.zeros(1), entropies_T])


def with_routes(change: Callable[[Batch], Batch]) -> type[RoutedWorker]:
    class Changed(RoutedWorker):
        def forward(self, batch, plan, *, temperature, returns=None):
            return super().forward(change(batch), plan, temperature=temperature)

        def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
            return super().forward_backward(change(batch), plan, loss, temperature=temperature, returns=returns)

    return Changed


class SavesWhatTrainingMadeOfItsState(PlainWorker):
    """Copies nothing when a background save starts, and writes the file only after the next step."""

    def start_saving(self, directory):
        self.directory = directory

    def has_saved(self):
        self.save_state(self.directory)
        return True


def one_token_late(batch: Batch) -> Batch:
    return batch.with_columns(routed_experts=batch["routed_experts"].roll(1, 0), routed=batch["routed"].roll(1, 0))


def one_layer_off(batch: Batch) -> Batch:
    routes_TLK = batch["routed_experts"]
    return batch.with_columns(routed_experts=torch.cat([routes_TLK[:, :1], routes_TLK[:, 1:].roll(1, 1)], 1))


def unknown_as_known(batch: Batch) -> Batch:
    routes_TLK = batch["routed_experts"].clone()
    routes_TLK[~batch["routed"]] = torch.tensor([0, 1], dtype=torch.uint8)
    return batch.with_columns(routed_experts=routes_TLK, routed=torch.ones_like(batch["routed"]))


class KeepsItsNoise(PlainWorker):
    """Removes its noise by subtracting it, which leaves rounding errors."""

    can_perturb = True

    def perturb(self, seed, scale):
        self.seed = seed
        self.add(1.0)

    def restore(self):
        self.add(-1.0)

    def add(self, sign):
        noise = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += sign * torch.randn(parameter.shape, generator=noise)


class IgnoresKeptTokens(PlainWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        return super().forward(batch.without_columns("kept_counts", "kept_ids"), plan, temperature=temperature)


class TrainsOnTheWholeVocabulary(PlainWorker):
    """Scores among the kept tokens, but trains without them."""

    def forward_backward(self, batch, *args, **kwargs):
        return super().forward_backward(batch.without_columns("kept_counts", "kept_ids"), *args, **kwargs)


class ShiftsKeptTokens(PlainWorker):
    """Reads each token's kept ids one token late, where they include the token."""

    def score(self, tokens_T, temperature, routes=None, kept=None):
        if kept is not None:
            late = zip(tokens_T, kept[1:] + kept[:1], strict=True)
            kept = [ids_K if token in ids_K else ids_K[:0] for token, ids_K in late]
        return super().score(tokens_T, temperature, routes, kept)


class IgnoresRoutes(RoutedWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        without = batch.without_columns("routed_experts", "routed")
        return PlainWorker.forward(self, without, plan, temperature=temperature)


class SendsNoGradientThroughTheRouter(RoutedWorker):
    def gradients(self):
        return {
            name: torch.zeros_like(gradient) if name.endswith("mlp.gate.weight") else gradient
            for name, gradient in super().gradients().items()
        }


@pytest.fixture(autouse=True)
def _no_row_of_the_parity_table(monkeypatch: pytest.MonkeyPatch):
    """Keeps these runs out of the parity table: most use faulty workers, to test the suite."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)


ONE, TWO = Variant(), Variant(world_size=2)
BFLOAT16 = "test_bfloat16_errs_by_little_more_than_plain_transformers"
OTHERWISE = "test_one_step_can_be_taken_otherwise_than_the_configuration_says"
IGNORED: tuple[dict[str, Any], ...] = (
    {"learning_rate": None},
    {"adam_betas": None},
    {"eps": None},
    {"weight_decay": None},
    {"max_grad_norm": None},
)
ROUTED = Variant(checkpoint=MOE, forced_routes=True)
FAULTS: list[tuple[Callable[[WorkerSpec, RankInfo], Worker], Variant, str]] = [
    (IgnoresTemperature, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (LosesItsGradientsWhenItScores, ONE, "test_a_step_whose_batch_comes_in_parts_is_that_of_the_batch"),
    (ScoresOneTokenLate, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (StepsEverythingByAdamW, ONE, "test_muon_is_stepped_exactly_or_refused_by_name"),
    (AttendsOverAWholeMicroBatch, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (plain.ReturnsScoresInThePlansOrder, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (plain.ReturnsScoresInThePlansOrder, TWO, "test_logprobs_and_entropies_of_the_stream"),
    (TrainsAtAnotherTemperature, ONE, "test_loss_and_every_gradient"),
    (IgnoresKeptTokens, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (TrainsOnTheWholeVocabulary, ONE, "test_loss_and_every_gradient"),
    (ShiftsKeptTokens, ONE, "test_logprobs_and_entropies_of_the_stream"),
    (WeighsOneTokenWrong, ONE, "test_loss_and_every_gradient"),
    (LeavesOneTokenOut, ONE, "test_loss_and_every_gradient"),
    (LeavesOneTokenOut, ONE, "test_metrics_are_averages_over_the_trained_tokens"),
    (plain.AveragesOverRanks, TWO, "test_loss_and_every_gradient"),
    (plain.AveragesOverRanks, TWO, "test_the_cross_entropy_loss"),
    (plain.DropsARank, TWO, "test_loss_and_every_gradient"),
    (plain.ReportsTheWholeLossOnEveryRank, TWO, "test_loss_and_every_gradient"),
    (plain.CountsMetricsOnEveryRank, TWO, "test_metrics_are_averages_over_the_trained_tokens"),
    (AveragesOverMicroBatches, ONE, "test_micro_batches_and_calls_only_add_up"),
    (ReadsOutsideTheMask, ONE, "test_what_stands_outside_the_loss_mask_does_not_matter"),
    (LosesItsGradientsWhenLookedAt, ONE, "test_looking_at_gradients_changes_neither_weights_nor_later_gradients"),
    (NeverTrainsOnceLookedAt, ONE, "test_looking_at_gradients_changes_neither_weights_nor_later_gradients"),
    (KeepsItsGradients, ONE, "test_an_optimizer_step_clears_the_gradients"),
    *((with_update(**change), ONE, OTHERWISE) for change in IGNORED),
    (KeepsTheOtherStepsSettings, ONE, OTHERWISE),
    (ReturnsScoresOfAllTokens, ONE, "test_a_training_pass_returns_the_scores_that_it_is_asked_for"),
    (TakesOtherLogprobsForItsOwn, ONE, "test_a_pass_takes_its_own_logprobs_as_the_old_ones"),
    (GivesMoreScoresThanItIsAskedFor, ONE, "test_scoring_gives_the_scores_that_it_is_asked_for"),
    (TrainsEverything, ONE, "test_frozen_parameters_do_not_change"),
    (DecaysFrozenWeights, ONE, "test_frozen_parameters_do_not_change"),
    (StepsOnNan, ONE, "test_a_gradient_that_is_not_finite_skips_step_and_schedule"),
    (plain.SkipsAlone, TWO, "test_a_gradient_that_is_not_finite_skips_step_and_schedule"),
    (with_optimizer(max_grad_norm=0.0), ONE, "test_three_optimizer_steps"),
    (with_optimizer(weight_decay=0.0), ONE, "test_three_optimizer_steps"),
    (with_optimizer(adam_betas=(0.9, 0.999)), ONE, "test_three_optimizer_steps"),
    (with_optimizer(num_warmup_steps=0), ONE, "test_three_optimizer_steps"),
    (plain.OneRankKeepsItsWeights, TWO, "test_three_optimizer_steps"),
    (plain.EachRankExportsItsOwn, TWO, "test_three_optimizer_steps"),
    (ReportsTheClippedNorm, ONE, "test_the_gradient_is_clipped_by_its_global_norm"),
    (plain.ClipsByItsOwnNorm, TWO, "test_the_gradient_is_clipped_by_its_global_norm"),
    (plain.LosesTheOffloadedOptimizer, ONE, "test_offloading_between_all_phases_changes_nothing"),
    (plain.LosesTheOffloadedWeightsPrecision, TWO, "test_offloading_between_all_phases_changes_nothing"),
    (plain.LosesTheOffloadedOptimizer, Variant(parity_only=True), "test_three_optimizer_steps"),
    (ExportsOldWeights, ONE, "test_three_optimizer_steps"),
    (ExportsOneBucket, ONE, "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets"),
    (plain.ExportsItsShardOnly, TWO, "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets"),
    (ForgetsTheOptimizer, ONE, "test_saved_state_continues_exactly"),
    (ForgetsTheSchedule, ONE, "test_saved_state_continues_exactly"),
    (SavesWhatTrainingMadeOfItsState, ONE, "test_a_state_saved_in_the_background_is_that_of_its_start"),
    (DiesOnAForeignState, ONE, "test_a_state_that_another_backend_wrote_is_a_checkpoint_error"),
    (IgnoresACutOffFile, ONE, "test_a_state_that_is_missing_or_cut_off_is_a_checkpoint_error"),
    (KeepsItsNoise, ONE, "test_noise_changes_every_trained_weight_and_goes_bit_for_bit"),
    (IgnoresRoutes, ROUTED, "test_logprobs_and_entropies_of_the_stream"),
    (with_routes(one_token_late), ROUTED, "test_logprobs_and_entropies_of_the_stream"),
    (with_routes(one_layer_off), ROUTED, "test_logprobs_and_entropies_of_the_stream"),
    (with_routes(unknown_as_known), ROUTED, "test_logprobs_and_entropies_of_the_stream"),
    (with_routes(one_token_late), ROUTED, "test_loss_and_every_gradient"),
    (with_routes(one_layer_off), ROUTED, "test_loss_and_every_gradient"),
    (SendsNoGradientThroughTheRouter, ROUTED, "test_loss_and_every_gradient"),
    (IgnoresRoutes, ROUTED, "test_routes_of_another_token_or_layer_give_other_logprobs"),
    (IgnoresRoutes, ROUTED, "test_routes_that_do_not_fit_the_model_are_refused"),
    (KeepsNoFloat32Weights, ONE, BFLOAT16),
    (TakesLogprobsInBfloat16, ONE, BFLOAT16),
    (SavesNoTokenizer, ONE, "test_the_saved_model_is_a_hugging_face_model_with_its_tokenizer"),
]
FOUND = (AssertionError, pytest.fail.Exception)
"""What a check raises. A worker that raises anything else has crashed, which shows nothing about the check."""


def suite_of(worker_class: Callable[[WorkerSpec, RankInfo], Worker]) -> BackendConformance:
    class Suite(BackendConformance):
        backend = PlainBackend(worker_class=worker_class)
        options = NoOptions()

    return Suite()


def run_check(worker_class: Callable[[WorkerSpec, RankInfo], Worker], variant: Variant, check: str, folder: Path):
    suite = suite_of(worker_class)
    with open_case(suite.backend, suite.options, variant, folder) as case:
        getattr(suite, check)(case)


@pytest.mark.parametrize(
    ("worker_class", "variant", "check"),
    [
        # The first bfloat16 check of a process also computes the results of plain transformers, which takes seconds.
        pytest.param(*fault, id=f"{fault[0].__name__}-{i}", marks=[pytest.mark.slow] if fault[2] == BFLOAT16 else [])
        for i, fault in enumerate(FAULTS)
    ],
)
def test_the_suite_finds_a_wrong_worker(worker_class, variant: Variant, check: str, tmp_path: Path):
    with pytest.raises(FOUND):
        run_check(worker_class, variant, check, tmp_path)


def test_a_worker_that_only_trains_may_lose_its_gradients_when_it_scores(tmp_path: Path):
    run_check(LosesItsGradientsWhenItScores, ONE, "test_loss_and_every_gradient", tmp_path)


class ReturnsTheGradientsThemselves(PlainWorker):
    """`gradients` returns the tensors into which later passes sum."""

    def gradients(self):
        copies = super().gradients()
        own = {name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        return copies | own


@pytest.mark.parametrize(
    "check",
    [
        "test_a_pass_takes_its_own_logprobs_as_the_old_ones",
        "test_looking_at_gradients_changes_neither_weights_nor_later_gradients",
    ],
)
def test_gradients_may_be_the_tensors_into_which_later_passes_sum(check: str, tmp_path: Path):
    run_check(ReturnsTheGradientsThemselves, ONE, check, tmp_path)


def test_gradients_that_are_divided_are_called_a_multiple_of_the_expected_ones(tmp_path: Path):
    check = "test_what_stands_outside_the_loss_mask_does_not_matter"
    with pytest.raises(AssertionError, match=r"; all gradients are 0\.\d+ times the expected ones: sum over micro-"):
        run_check(AveragesOverMicroBatches, ONE, check, tmp_path / "divided")
    with pytest.raises(AssertionError, match=r"gradient of .* differs") as raised:
        run_check(AttendsOverAWholeMicroBatch, ONE, check, tmp_path / "wrong")
    assert "times the expected" not in str(raised.value)


def test_one_wrong_gradient_among_many_is_not_called_a_multiple():
    expected = {"large": torch.ones(100), "small": torch.tensor([0.1])}
    assert not multiple_of(expected, {**expected, "small": torch.tensor([0.101])})


def test_a_step_whose_gradient_is_not_scaled_is_reported_with_both_norms(tmp_path: Path):
    with pytest.raises(
        AssertionError, match=r"step with OptimizerUpdate.*: grad_norm is \S+, expected \S+, the global"
    ):
        run_check(with_update(gradient_scale=1.0), ONE, OTHERWISE, tmp_path)


@pytest.mark.parametrize("content", [b"", b"text"])
def test_a_damaged_state_of_the_reference_worker_is_a_checkpoint_error(content: bytes, tmp_path: Path):
    suite = suite_of(PlainWorker)
    with open_case(suite.backend, suite.options, ONE, tmp_path) as case:
        (tmp_path / "state.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"state\.pt: missing or damaged"):
            case.reference.load_state(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "rl_core.testing.environments",
        "rl_core.testing.transports",
        "rl_transformers.testing.backend",
        "rl_transformers.testing.generators",
        "rl_transformers.testing.inference",
    ],
)
def test_a_failed_assertion_of_a_suite_shows_its_values(name: str):
    assert isinstance(import_module(name).__loader__, AssertionRewritingHook)


def test_the_error_for_wrong_names_counts_missing_and_unexpected_ones_and_shows_the_first(tmp_path: Path):
    check = "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets"
    with pytest.raises(AssertionError, match=r"24 missing, such as model\.emb.*; 24 unexpected, such as module\.m"):
        run_check(ExportsWithAPrefix, ONE, check, tmp_path)


@pytest.mark.slow
def test_a_worker_that_computes_in_bfloat16_passes_the_bfloat16_check(tmp_path: Path):
    run_check(ComputesInBfloat16, ONE, BFLOAT16, tmp_path)


def test_the_suite_finds_a_worker_that_resumes_only_at_its_world_size(tmp_path: Path):
    suite = suite_of(plain.ReadsTheFileOfItsRank)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with (
        open_case(suite.backend, suite.options, ONE, tmp_path / "one") as case,
        open_case(suite.backend, suite.options, TWO, tmp_path / "two") as other,
        pytest.raises(CheckpointError, match=r"state/1/state\.pt: missing"),
    ):
        suite.check_resumed(case, other)


PROOF = "test_a_small_copy_of_the_model_is_computed_as_by_transformers"


@pytest.fixture
def proofs(tmp_path, monkeypatch):
    """An empty cache, so that no proof of an earlier run applies."""
    monkeypatch.setenv("RL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker_class", "complaint"),
    [
        (plain.TakesAnotherEps, "log-probs of a small copy of it differ by"),
        (plain.RotatesSlowly, "log-probs of a small copy of it differ by"),
        (plain.SendsNoGradientToANorm, "the gradient of model.layers.0.self_attn.k_norm.weight differs"),
        (plain.KnowsAWeightByAnotherName, "k_norm.weight differs by inf"),
        (plain.CannotBuildIt, "plain cannot run a small copy of .* KeyError: 'no such layer'"),
        (plain.Dies, r"ended with exit code 7(.|\n)*\ncannot go on"),
    ],
)
def test_the_suite_finds_a_backend_with_wrong_model_code(worker_class, complaint, tmp_path, proofs, monkeypatch):
    if worker_class is plain.Dies:  # a forked proof has no error output
        monkeypatch.setattr(model_proof, "run_interpreter", forked_proofs.run_interpreter)
    with pytest.raises(ConfigError, match=complaint):
        prove(worker_class, tmp_path)


@pytest.mark.slow
def test_the_suite_passes_a_backend_that_computes_the_model_of_transformers(tmp_path, proofs):
    prove(PlainWorker, tmp_path)


def prove(worker_class: Callable[[WorkerSpec, RankInfo], Worker], folder: Path) -> None:
    class Suite(BackendConformance):
        backend = plain.ProvingBackend(worker_class=worker_class)
        options = NoOptions()

    with open_case(Suite.backend, Suite.options, ONE, folder) as case:
        getattr(Suite(), PROOF)(case)


def test_every_check_that_compares_numbers_has_a_wrong_worker():
    without = {
        "test_it_is_a_backend_of_this_contract": "checks types and the mesh, not what a worker computes",
        "test_a_missing_model_is_a_configuration_error": "no number",
        "test_scoring_leaves_no_gradient": "no number",
        "test_a_reference_model_scores_and_does_not_train": "its scores are compared by other checks",
        "test_state_saved_at_one_world_size_continues_at_another": "has a test of its own, above",
        PROOF: "has tests of its own, above",
    }
    assert set(checks()) == {check for _, _, check in FAULTS} | set(without)


def test_leaving_out_a_check_needs_its_name_and_a_reason():
    for left_out in ({"test_of_nothing": "a reason"}, {checks()[0]: " "}):
        with pytest.raises(TypeError, match="left_out"):
            type("Suite", (BackendConformance,), {"left_out": left_out})


def test_a_worker_that_attends_over_a_whole_micro_batch_differs_by_far_more_than_the_tolerance(tmp_path: Path):
    with open_case(PlainBackend(worker_class=AttendsOverAWholeMicroBatch), NoOptions(), ONE, tmp_path) as case:
        wrong = case.start().forward(case.batch, LIMITS, temperature=1.0)
        right = expected_scores(case.reference, case.batch)
    assert (wrong["logprobs"] - right["logprobs"]).abs().max() > 0.1


def test_ranks_of_an_earlier_check_are_reused_only_for_the_same_spec(tmp_path: Path):
    suite, kept = suite_of(PlainWorker), KeptRanks()
    with open_case(suite.backend, suite.options, TWO, tmp_path, kept=kept) as case:
        first = case.start()
        case.keep(first)
        assert case.start() is first
        case.keep(first)
        other = case.start(attrs.evolve(case.spec, seed=7))
        assert other is not first
        assert first.ranks.has_ended
        case.keep(other)
    assert not other.ranks.has_ended, "the ranks must stay alive for the next case"
    kept.close()
    assert other.ranks.has_ended
