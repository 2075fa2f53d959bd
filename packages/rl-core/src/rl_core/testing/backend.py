"""Conformance suite of training backends: what a `Backend` and its `Worker` must do, compared with plain transformers.

A plug-in's author writes

    class TestMyBackend(BackendConformance):
        backend = my_backend
        options = MyOptions()

and runs pytest. The suite makes its own tiny checkpoint and batch. Every number is compared with `ReferenceWorker`, in
float32; tolerances stand in `Tolerances`, with their reasons. A test is left out by setting it to None, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError, WorkerError
from rl_core.interfaces import (
    CONTRACT_VERSION,
    Backend,
    Inspectable,
    LossSpec,
    Manifest,
    ModelConfig,
    OptimizerConfig,
    Plan,
    RankInfo,
    WeightBucket,
    Worker,
    WorkerSpec,
)
from rl_core.testing.models import make_checkpoint
from rl_core.testing.reference_worker import ReferenceWorker
from rl_core.weights import tensor_record, unpack_bucket


@attrs.frozen(kw_only=True)
class Tolerances:
    """Largest differences from the reference, some ten times what a correct float32 worker was seen to differ by."""

    logprob: float = 1e-5
    """Absolute, log-probs and entropies: rounding of some 10 layers of sums, seen 1e-6."""
    gradient: float = 5e-6
    """L2 of the difference over L2 of the gradient, all parameters together: summation order, seen 3e-7."""
    gradient_of_one: float = 1e-4
    """The same for each parameter; one with a gradient below 1 % of the whole counts as 1 %."""
    weight: float = 1e-5
    """Absolute, after three AdamW steps at 1e-3: AdamW divides by the gradient's own size, so rounding of small
    gradients shows. Seen 8e-7 on one rank, 4e-6 sharded over two."""
    tied_weight: float = 1e-4
    """As `weight`, for tied embeddings, whose two gradients are rounded before they are added. 8e-5 on two ranks."""


@attrs.frozen(kw_only=True)
class Variant:
    """One way to run the same computation."""

    use_sample_packing: bool = True
    gradient_checkpointing: bool = False
    tie_word_embeddings: bool = True

    def __str__(self) -> str:
        return "-".join(
            [
                "packed" if self.use_sample_packing else "padded",
                "recomputed" if self.gradient_checkpointing else "stored",
                "tied" if self.tie_word_embeddings else "untied",
            ]
        )


VARIANTS = (
    Variant(),
    Variant(use_sample_packing=False),
    Variant(gradient_checkpointing=True),
    Variant(tie_word_embeddings=False),
)
TEMPERATURE = 0.7
LOSS = LossSpec(name="ppo_clip", kl_coef=0.1, entropy_coef=0.05)
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, num_warmup_steps=2)


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """What one test is given."""

    spec: WorkerSpec
    batch: Batch
    plan: Plan
    """Three micro-batches, in an order that is not the batch's."""
    reference: ReferenceWorker
    """Fresh: no gradient, no step."""
    directory: Path
    """Empty, for the test's files."""
    is_tied: bool
    """The output layer shares the input embedding."""


def make_case(directory: Path, options: Any, variant: Variant) -> Case:
    """Checkpoint, batch and reference, all seeded."""
    checkpoint = make_checkpoint(directory / "model", tie_word_embeddings=variant.tie_word_embeddings)
    spec = WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(checkpoint)),
        optimizer=OPTIMIZER,
        options=options,
        bf16=False,
        gradient_checkpointing=variant.gradient_checkpointing,
        use_sample_packing=variant.use_sample_packing,
        logprobs_chunk_size=32,
        total_optimizer_steps=None,
        seed=0,
    )
    reference = ReferenceWorker(spec)
    batch = make_batch(reference)
    batch.save(directory / "batch.safetensors")
    (directory / "files").mkdir()
    return Case(
        spec=spec,
        batch=batch,
        plan=((5, 0, 3), (1, 6), (4, 2, 7)),
        reference=reference,
        directory=directory / "files",
        is_tied=variant.tie_word_embeddings,
    )


def make_batch(reference: ReferenceWorker) -> Batch:
    """Eight sequences of 1 to 61 tokens: prompts, observations in between, one of a single token, one not trained on.

    Old log-probs lie around the current ones, so that some ratios are clipped and most are not. What stands outside the
    loss mask must not matter and is made large.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary = reference.model.config.vocab_size
    sequences = []
    for i, length in enumerate((23, 61, 1, 40, 9, 33, 2, 40)):
        position_T = torch.arange(length)
        sampled_T = (position_T >= max(1, length // 3)) & (position_T % 11 != 7)
        mask_T = sampled_T & (i != 4)
        tokens_T = torch.randint(vocabulary, (length,), generator=generator)
        with torch.no_grad():
            logprobs_T, _ = reference.score(tokens_T, TEMPERATURE)
        noise_T, ref_noise_T, advantages_T = 0.3 * torch.randn(3, length, generator=generator)
        sequences.append(
            {
                "tokens": tokens_T,
                "sampled": sampled_T,
                "loss_mask": mask_T,
                "old_logprobs": torch.where(mask_T, logprobs_T + noise_T, -50.0),
                "ref_logprobs": torch.where(mask_T, logprobs_T + ref_noise_T, 50.0),
                "advantages": torch.where(mask_T, 10 * advantages_T, 1e3),
                "loss_weights": mask_T.float() / max(1, int(mask_T.sum())) / (i + 1),
                "group_id": i // 2,
            }
        )
    return Batch.from_sequences(sequences)


class RecordingSender:
    """A `WeightSender` that keeps what it was given."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.bucket_bytes: list[int] = []

    def send(self, buckets: Iterator[WeightBucket], version: int) -> Manifest:
        """Drains the buckets."""
        for bucket in buckets:
            self.bucket_bytes.append(bucket.data.numel())
            for name, tensor in unpack_bucket(bucket):
                assert name not in self.tensors, f"{name} was sent twice"
                self.tensors[name] = tensor.clone()
        return Manifest(version=version, tensors={name: tensor_record(t) for name, t in self.tensors.items()})


class BackendConformance:
    """Subclass it, set `backend` and `options`, run pytest. One rank, in the test's process."""

    backend: ClassVar[Backend]
    options: ClassVar[Any]
    tolerances: ClassVar[Tolerances] = Tolerances()
    variants: ClassVar[tuple[Variant, ...]] = VARIANTS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test once per variant."""
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants, ids=str)

    @pytest.fixture
    def case(self, variant: Variant, tmp_path: Path) -> Case:
        """A fresh case for each test."""
        return make_case(tmp_path, self.options, variant)

    def start(self, spec: WorkerSpec) -> Worker:
        """A worker, as a group would start it."""
        self.backend.validate(spec, 1)
        return self.backend.create_worker(spec, RankInfo())

    def test_it_is_a_backend_of_this_contract(self, case: Case) -> None:
        assert isinstance(self.backend, Backend)
        assert self.backend.contract_version == CONTRACT_VERSION
        assert isinstance(self.options, self.backend.options_class)
        assert self.backend.mesh(self.options, 1).world_size == 1
        worker = self.start(case.spec)
        assert isinstance(worker, Worker)
        assert isinstance(worker, Inspectable)
        worker.close()
        worker.close()

    def test_a_missing_model_is_a_configuration_error(self, case: Case) -> None:
        spec = attrs.evolve(case.spec, model=ModelConfig(path=str(case.directory / "nothing")))
        with pytest.raises(ConfigError, match="nothing"):
            self.start(spec)

    def test_logprobs_and_entropies_of_the_stream(self, case: Case) -> None:
        scores = self.start(case.spec).forward(case.batch, case.plan, temperature=TEMPERATURE)
        expected = case.reference.forward(case.batch, case.plan, temperature=TEMPERATURE)
        assert set(scores) == {"logprobs", "entropies"}
        for name, values_T in scores.items():
            assert values_T.dtype == torch.float32
            assert values_T.device.type == "cpu"
            assert not values_T.requires_grad
            assert bool((values_T[case.batch.offsets[:-1]] == 0).all()), f"{name} of a sequence's first token is not 0"
            require_close(values_T, expected[name], self.tolerances.logprob, name)

    def test_scoring_needs_tokens_only_and_leaves_no_gradient(self, case: Case) -> None:
        worker = self.start(case.spec)
        tokens = Batch(case.batch.offsets, {"tokens": case.batch["tokens"]})
        worker.forward(tokens, case.plan, temperature=TEMPERATURE)
        assert not any(bool(gradient.any()) for gradient in gradients(worker).values())

    def test_loss_and_every_gradient(self, case: Case) -> None:
        worker = self.start(case.spec)
        metrics = worker.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)
        expected = case.reference.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)["loss"][0]
        assert all(weight > 0 for _, weight in metrics.values())
        loss, weight = metrics["loss"]
        assert weight == 1.0, f"loss weighs {weight}; a call weighs 1, however many micro-batches it had"
        assert abs(loss - expected) <= self.tolerances.logprob * max(1.0, abs(expected)), (
            f"loss {loss}, expected {expected}"
        )
        self.require_same_gradients(gradients(worker), case.reference.gradients())

    def test_the_cross_entropy_loss(self, case: Case) -> None:
        worker, loss = self.start(case.spec), LossSpec(name="cross_entropy")
        worker.forward_backward(case.batch, case.plan, loss, temperature=1.0)
        case.reference.forward_backward(case.batch, case.plan, loss, temperature=1.0)
        self.require_same_gradients(gradients(worker), case.reference.gradients())

    def test_metrics_are_averages_over_the_trained_tokens(self, case: Case) -> None:
        metrics = self.start(case.spec).forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)
        scores = case.reference.forward(case.batch, case.plan, temperature=TEMPERATURE)
        mask_T = case.batch["loss_mask"]
        ratio_T = (scores["logprobs"] - case.batch["old_logprobs"])[mask_T].exp()
        for name, values_T in {"entropy": scores["entropies"][mask_T], "ratio": ratio_T}.items():
            total, weight = metrics[name]
            assert weight == int(mask_T.sum()), f"{name} weighs {weight}, trained are {int(mask_T.sum())} tokens"
            require_close(torch.tensor(total / weight), values_T.mean(), 10 * self.tolerances.logprob, name)

    def test_micro_batches_and_calls_only_add_up(self, case: Case) -> None:
        whole, parts = self.start(case.spec), self.start(case.spec)
        whole.forward_backward(case.batch, [range(8)], LOSS, temperature=TEMPERATURE)
        for sequences in ([7, 2, 0], [1, 3, 4, 5, 6]):
            part = case.batch.select(sequences)
            parts.forward_backward(part, [[i] for i in range(part.num_sequences)], LOSS, temperature=TEMPERATURE)
        self.require_same_gradients(gradients(parts), gradients(whole))

    def test_what_stands_outside_the_loss_mask_does_not_matter(self, case: Case) -> None:
        workers = [self.start(case.spec), self.start(case.spec)]
        mask_T = case.batch["loss_mask"]
        other = {
            name: torch.where(mask_T, case.batch[name], float("nan"))
            for name in ("old_logprobs", "ref_logprobs", "advantages", "loss_weights")
        }
        for worker, batch in zip(workers, (case.batch, case.batch.with_columns(**other)), strict=True):
            worker.forward_backward(batch, case.plan, LOSS, temperature=TEMPERATURE)
        self.require_same_gradients(gradients(workers[1]), gradients(workers[0]))

    def test_three_optimizer_steps(self, case: Case) -> None:
        worker, before = self.start(case.spec), weights(case.reference)
        tolerance = self.tolerances.tied_weight if case.is_tied else self.tolerances.weight
        for rate, micro_batch in zip((0.5e-3, 1e-3, 1e-3), case.plan, strict=True):
            steps = []
            for actor in (worker, case.reference):
                actor.forward_backward(case.batch, [micro_batch], LOSS, temperature=TEMPERATURE)
                steps.append(actor.optim_step())
            assert steps[0].learning_rate == pytest.approx(rate), (
                "num_warmup_steps=2: the steps are at 1/2, 2/2, 2/2 of the rate"
            )
            assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-3)
            assert not steps[0].skipped
        after, expected = weights(worker), weights(case.reference)
        moved = max((expected[name] - before[name]).abs().max().item() for name in before)
        assert moved >= 1e-3, f"the weights moved by {moved:.1e} only: this test would see nothing"
        assert set(after) == set(expected)
        for name, weight in expected.items():
            require_close(after[name], weight, tolerance, f"{name} after three steps")

    def test_the_gradient_is_clipped_by_its_global_norm(self, case: Case) -> None:
        large = case.batch.with_columns(loss_weights=case.batch["loss_weights"] * 100)
        norms = []
        for actor in (self.start(case.spec), case.reference):
            actor.forward_backward(large, case.plan, LOSS, temperature=TEMPERATURE)
            norms.append(actor.optim_step().grad_norm)
        assert norms[1] > 10 * OPTIMIZER.max_grad_norm
        assert norms[0] == pytest.approx(norms[1], rel=1e-4), "grad_norm is the norm before clipping"

    def test_a_gradient_that_is_not_finite_skips_step_and_schedule(self, case: Case) -> None:
        worker = self.start(case.spec)
        before = weights(worker)
        broken_T = torch.where(case.batch["loss_mask"], float("nan"), 0.0)
        worker.forward_backward(
            case.batch.with_columns(loss_weights=broken_T), case.plan, LOSS, temperature=TEMPERATURE
        )
        step = worker.optim_step()
        assert step.skipped
        assert not step.grad_norm < float("inf")
        require_equal(weights(worker), before, "after a skipped step")
        for actor in (worker, case.reference):
            actor.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)
            step = actor.optim_step()
            assert step.learning_rate == pytest.approx(0.5e-3), "a skipped step does not advance the schedule"
        tolerance = self.tolerances.tied_weight
        for name, weight in weights(case.reference).items():
            require_close(weights(worker)[name], weight, tolerance, f"{name} after a skipped and a good step")

    def test_an_optimizer_step_clears_the_gradients(self, case: Case) -> None:
        worker = self.start(case.spec)
        worker.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)
        worker.optim_step()
        assert not any(bool(gradient.any()) for gradient in gradients(worker).values())

    def test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets(self, case: Case) -> None:
        worker, sender = self.start(case.spec), RecordingSender()
        manifest = worker.publish(sender, 3, 10_000)
        expected = weights(case.reference)
        require_equal(sender.tensors, expected, "exported")
        assert manifest.version == 3
        assert set(manifest.tensors) == set(expected)
        largest = max(weight.nbytes for weight in expected.values())
        assert max(sender.bucket_bytes) <= max(10_000, largest)
        assert len(sender.bucket_bytes) > 1
        require_equal(weights(worker), expected, "exported again")

    def test_saved_state_continues_exactly(self, case: Case) -> None:
        first, second = self.start(case.spec), self.start(case.spec)
        train_step(first, case)
        first.save_state(case.directory / "state")
        second.forward_backward(case.batch, [[0]], LOSS, temperature=TEMPERATURE)
        second.load_state(case.directory / "state")
        require_equal(weights(second), weights(first), "loaded")
        steps = [train_step(worker, case) for worker in (first, second)]
        assert steps[0] == steps[1]
        for name, weight in weights(first).items():
            require_close(weights(second)[name], weight, self.tolerances.weight, f"{name}, a step after loading")

    def test_a_state_that_is_missing_or_cut_off_is_a_checkpoint_error(self, case: Case) -> None:
        worker = self.start(case.spec)
        with pytest.raises(CheckpointError, match="nothing"):
            worker.load_state(case.directory / "nothing")
        train_step(worker, case)
        worker.save_state(case.directory / "state")
        before = weights(worker)
        files = [file for file in sorted((case.directory / "state").rglob("*")) if file.is_file()]
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2])
            with pytest.raises(CheckpointError, match=file.name):
                worker.load_state(case.directory / "state")
            file.write_bytes(content)
        require_equal(weights(worker), before, "after refused checkpoints")
        worker.load_state(case.directory / "state")

    def test_the_saved_model_is_a_hugging_face_model_with_its_tokenizer(self, case: Case) -> None:
        from transformers import AutoTokenizer

        worker = self.start(case.spec)
        train_step(worker, case)
        worker.save_model(case.directory / "model")
        saved = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(case.directory / "model"))))
        require_equal(weights(saved), weights(worker), "saved model")
        text = "3+4=7"
        tokenizers = [AutoTokenizer.from_pretrained(path) for path in (case.directory / "model", case.spec.model.path)]
        assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids

    def test_a_reference_model_scores_and_does_not_train(self, case: Case) -> None:
        worker = self.start(attrs.evolve(case.spec, role="reference", optimizer=None))
        scores = worker.forward(case.batch, case.plan, temperature=TEMPERATURE)
        expected = case.reference.forward(case.batch, case.plan, temperature=TEMPERATURE)
        require_close(scores["logprobs"], expected["logprobs"], self.tolerances.logprob, "logprobs")
        with pytest.raises(WorkerError):
            worker.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)

    def require_same_gradients(self, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        """Raises AssertionError naming the parameter, unless all gradients agree."""
        assert set(actual) == set(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
        whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        errors = {name: (actual[name] - gradient).norm().item() for name, gradient in expected.items()}
        for name, gradient in expected.items():
            size = max(gradient.norm().item(), 0.01 * whole)
            assert errors[name] <= self.tolerances.gradient_of_one * size, (
                f"gradient of {name} differs by {errors[name] / size:.1e} (relative L2), "
                f"allowed {self.tolerances.gradient_of_one:g}"
            )
        error = sum(e * e for e in errors.values()) ** 0.5 / whole
        assert error <= self.tolerances.gradient, (
            f"gradients differ by {error:.1e} (relative L2), allowed {self.tolerances.gradient:g}"
        )


def checks() -> tuple[str, ...]:
    """Names of the suite's tests."""
    return tuple(name for name in vars(BackendConformance) if name.startswith("test_"))


def train_step(worker: Worker, case: Case) -> Any:
    """One optimizer step on the whole batch."""
    worker.forward_backward(case.batch, case.plan, LOSS, temperature=TEMPERATURE)
    return worker.optim_step()


def weights(worker: Worker) -> dict[str, Tensor]:
    """What the worker exports."""
    return {name: t.clone() for bucket in worker.export_weights(1 << 20) for name, t in unpack_bucket(bucket)}


def gradients(worker: Worker) -> dict[str, Tensor]:
    """What the worker's side door shows."""
    assert isinstance(worker, Inspectable)
    return worker.gradients()


def require_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raises AssertionError with the largest difference and where it is."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual - expected).abs().reshape(-1)
    worst = int(difference.argmax())
    assert difference[worst] <= tolerance, (
        f"{what}: differs by {difference[worst]:.1e} at {worst}, allowed {tolerance:g}"
    )


def require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Raises AssertionError unless the same tensors stand under the same names, bit for bit."""
    assert set(actual) == set(expected), f"{what}: names differ: {sorted(set(actual) ^ set(expected))}"
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{what}: {name} differs"
