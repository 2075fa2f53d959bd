"""Conformance suite of training backends. It compares a `Backend` and its `Worker` with plain transformers.

A plug-in's author writes

    class TestMyBackend(BackendConformance):
        backend = my_backend
        options = MyOptions()
        variants = (*VARIANTS, Variant(world_size=2), Variant(world_size=2, options=MyOptions(shards=2)))
        preload = ("my_package.worker",)
        left_out = {"test_saved_state_continues_exactly": "its optimizer is an external service without state files"}

and runs pytest. Checks run on every variant to which they apply; several ranks run in separate processes. The suite
creates its own tiny checkpoints and batches. Most results are compared with `ReferenceWorker` in float32; `Tolerances`
has the limits and their reasons. If RL_PARITY_DIR is set, measurements are written there
(`rl_transformers.testing.parity`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from rl_core import plugins
from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError, ShapeError, WorkerError
from rl_core.interfaces import (
    Backend,
    LossSpec,
    ModelConfig,
    OptimizerStep,
    OptimizerUpdate,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.state_files import write_state_list
from rl_core.rank_kit.trained_parameters import unit_of
from rl_core.rank_kit.weight_buckets import unpack_bucket
from rl_core.testing.tensors import (
    largest_difference,
    multiple_of,
    require_close,
    require_equal,
    require_no_gradient,
    require_same_names,
)
from rl_core.workers.group import MicroBatchLimits
from rl_transformers.testing.bfloat16 import Baseline, make_batches, measure_results
from rl_transformers.testing.cases import (
    LIMITS,
    LOSS,
    OPTIMIZER,
    STEPS,
    TEMPERATURE,
    VARIANTS,
    Case,
    KeptRanks,
    Variant,
    make_batch,
    open_case,
    with_kept_tokens,
)
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.parity import Measurement, write_down
from rl_transformers.testing.ranks import ONE_MICRO_BATCH, PRELOADED, RankGroup
from rl_transformers.testing.reference_worker import ReferenceWorker

__all__ = ["BackendConformance", "Case", "Tolerances", "VARIANTS", "Variant", "make_batch", "open_case", "weights"]


@attrs.frozen(kw_only=True)
class Tolerances:
    """Largest allowed differences from the reference. All are above the differences measured with correct workers."""

    logprob: float = 1e-5
    """Absolute difference of log-probs and entropies, from rounding in about ten successive sums. Measured: 1.4e-6."""
    loss: float = 1e-6
    """Relative difference of the loss. The batch's advantages are not centred, so that the loss, a sum over tokens, is
    not near 0."""
    gradient: float = 5e-6
    """L2 of the difference / L2 of the gradient, over all parameters, from the summation order. Measured: 9e-7."""
    gradient_of_one: float = 1e-4
    """The same quotient for each parameter alone. The divisor is at least 1 % of the norm of the whole gradient."""
    gradient_norm: float = 1e-5
    """Relative difference of the gradient norm in each of three steps. In the later steps, the weights already differ
    by up to `weight`. Measured: 1e-6."""
    weight: float = 1e-5
    """Absolute difference of weights after three steps with learning rates up to 1e-3. AdamW divides by the
    gradient's magnitude, so rounding errors of small gradients are enlarged. Measured: 5.7e-6; with Muon, 1.2e-7."""
    tied_weight: float = 1e-4
    """Like `weight`, for all weights of models with tied embeddings, whose two gradients are rounded before they are
    added. Measured: 5.9e-6 with the models of this suite, 8e-5 with other models on two ranks."""
    bfloat16: float = 1.5
    """Multiple of the bfloat16 error of plain transformers (`rl_transformers.testing.bfloat16`): two correct
    implementations round at different places. Measured: 0.2 to 1.1."""


OTHER_STEP = OptimizerUpdate(
    learning_rate=3e-3,
    adam_betas=(0.7, 0.8),
    eps=1e-4,
    weight_decay=0.3,
    max_grad_norm=0.2,
    gradient_scale=2.5,
)
"""Settings that all differ from the configuration's."""
MOVED = 1e-3
"""Smallest difference that a control must show: ten times the largest default tolerance of weights and log-probs.
Three controls compare the weights after three steps with other weights: the initial ones, those after steps on half of
each mini-batch, and those after steps with the configured settings. Another control compares log-probs with log-probs
of other routes. If such a difference were within the tolerance, agreement within the tolerance would prove nothing."""


ROUTE_CHECKS = (
    "test_routes_of_another_token_or_layer_give_other_logprobs",
    "test_routes_that_do_not_fit_the_model_are_refused",
)
"""Checks that run only on variants with `forced_routes`."""

PARITY_CHECKS = (
    "test_logprobs_and_entropies_of_the_stream",
    "test_loss_and_every_gradient",
    "test_three_optimizer_steps",
    "test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets",
    "test_bfloat16_errs_by_little_more_than_plain_transformers",
)
"""Checks of single variants that run on variants with `parity_only`. On these variants, `test_three_optimizer_steps`
ends with one further step that checks offloading, if the worker can offload."""


class BackendConformance:
    """Base class of the suite. A subclass sets `backend` and `options`; pytest then runs all checks on it."""

    backend: ClassVar[Backend]
    options: ClassVar[Any]
    variants: ClassVar[Sequence[Variant]] = VARIANTS
    """Combinations of world size, options, spec and checkpoint with which the checks run."""
    resumes: ClassVar[Sequence[tuple[Variant, Variant]] | None] = None
    """Pairs of a variant that saves a state and a variant that loads it. None: take the first variant of each
    world size, and every ordered pair of these that has the same checkpoint."""
    left_out: ClassVar[Mapping[str, str]] = {}
    """Checks that do not apply → why; they are shown as skipped with the reason."""
    preload: ClassVar[Sequence[str]] = ()
    """Modules that a worker imports. Rank processes start faster if the fork server imports these modules once."""
    tolerances: ClassVar[Tolerances] = Tolerances()
    timeout_s: ClassVar[float] = 240.0
    """Longest wait for the ranks to answer one call. A call takes seconds, but a shared machine may stall for a
    minute."""

    def __init_subclass__(cls) -> None:
        for name, reason in cls.left_out.items():
            if name not in checks() or not reason.strip():
                raise TypeError(f"{cls.__name__}.left_out: {name!r} must be one of the suite's checks, with a reason")
        if hasattr(cls, "backend"):
            PRELOADED.update(dict.fromkeys([type(cls.backend).__module__, *cls.preload]))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs a check once per variant, or per pair of variants, to which it applies."""
        if "variant" in metafunc.fixturenames:
            name = metafunc.function.__name__
            variants = [v for v in self.variants if name in PARITY_CHECKS or not v.parity_only]
            variants = [v for v in variants if name not in ROUTE_CHECKS or v.forced_routes]
            none = pytest.param((), marks=pytest.mark.skip(reason="no variant has forced_routes"))
            # Class scope, so that all checks of one variant run in succession.
            metafunc.parametrize("variant", [_marked(v) for v in variants] or [none], scope="class")
        if "resumed" in metafunc.fixturenames:
            none = pytest.param(
                (), marks=pytest.mark.skip(reason="`resumes` is empty, or no two world sizes share a checkpoint")
            )
            pairs = [_marked(*pair) for pair in self._resumes()]
            metafunc.parametrize("resumed", pairs or [none])

    @pytest.fixture(autouse=True)
    def _left_out(self, request: pytest.FixtureRequest) -> None:
        if request.function.__name__ in self.left_out:
            pytest.skip(self.left_out[request.function.__name__])

    @pytest.fixture(scope="class")
    @classmethod
    def kept_ranks(cls) -> Iterator[KeptRanks]:
        """Ranks that one check leaves to the next."""
        kept = KeptRanks()
        yield kept
        kept.close()

    @pytest.fixture
    def case(
        self, variant: Variant, kept_ranks: KeptRanks, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Case]:
        """A fresh case for each test."""
        with self._open(variant, tmp_path, tmp_path_factory, kept_ranks) as case:
            yield case

    def _open(
        self, variant: Variant, directory: Path, factory: pytest.TempPathFactory, kept: KeptRanks | None = None
    ) -> Any:
        directory.mkdir(exist_ok=True)
        checkpoint = _checkpoint_of(variant, factory)
        return open_case(
            self.backend, self.options, variant, directory, checkpoint=checkpoint, timeout_s=self.timeout_s, kept=kept
        )

    @classmethod
    def _resumes(cls) -> Sequence[tuple[Variant, Variant]]:
        if cls.resumes is not None:
            return cls.resumes
        first = {}
        for variant in cls.variants:
            first.setdefault(variant.world_size, variant)
        return [(a, b) for a in first.values() for b in first.values() if a is not b and a.checkpoint == b.checkpoint]

    # --- the contract ---

    def test_it_is_a_backend_of_this_contract(self, case: Case) -> None:
        plugins.require_plugin("rl_core.backends", self.backend, self.backend.name)
        assert isinstance(case.spec.options, self.backend.options_class), (
            f"the suite's options are {case.spec.options!r}; expected a {self.backend.options_class.__name__}"
        )
        num_ranks = self.backend.mesh(case.spec.options, case.world_size).world_size
        assert num_ranks == case.world_size, f"the mesh for {case.world_size} ranks has world_size={num_ranks}"
        group = case.start()
        group.gradients()
        group.close()

    def test_a_missing_model_is_a_configuration_error(self, case: Case) -> None:
        spec = attrs.evolve(case.spec, model=ModelConfig(path=str(case.directory / "nothing")))
        with pytest.raises(ConfigError, match="nothing"):
            case.start(spec)

    # --- model code of the backend ---

    def test_a_small_copy_of_the_model_is_computed_as_by_transformers(self, case: Case) -> None:
        if type(self.backend).prove is Backend.prove:
            pytest.skip("the backend has no model code of its own")
        assert (reason := self.backend.prove(case.spec)) is None, f"the proof cannot run here: {reason}"

    # --- checks that change no state: most leave their ranks to the next check ---

    def test_exported_weights_are_those_of_the_checkpoint_in_bounded_buckets(self, case: Case) -> None:
        group = case.start()
        published = group.publish(3, 10_000)
        expected = weights(case.reference)
        self.require_close(case, "exported", published.tensors, expected, 0.0)
        assert published.manifest.version == 3, f"version 3 was published as {published.manifest.version}"
        largest = max(weight.nbytes for weight in expected.values())
        sizes = [size for of_rank in published.bucket_bytes for size in of_rank]
        assert max(sizes) <= max(10_000, largest), (
            f"a bucket has {max(sizes)} bytes; expected at most 10000, or a single tensor"
        )
        assert len(sizes) > 1, "all weights came in one bucket; expected several"
        require_equal(group.weights(), expected, "exported again")
        case.keep(group)

    def test_logprobs_and_entropies_of_the_stream(self, case: Case) -> None:
        group = case.start()
        scores = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        expected = expected_scores(case.reference, case.batch)
        assert set(scores) == {"logprobs", "entropies"}, (
            f"expected logprobs and entropies, forward returned {sorted(scores)}"
        )
        for name, values_T in scores.items():
            assert values_T.dtype == torch.float32, f"{name} is {values_T.dtype}; expected float32"
            assert bool((values_T[case.batch.offsets[:-1]] == 0).all()), f"{name} of a sequence's first token is not 0"
            quantity = {"logprobs": "log-probs", "entropies": "entropies"}[name]
            self.require_close(case, quantity, {name: values_T}, {name: expected[name]}, self.tolerances.logprob)
        if self.replays_kept_tokens:
            kept = self.among_kept_tokens(case)
            scores, restricted = (
                group.forward(kept, LIMITS, temperature=TEMPERATURE),
                expected_scores(case.reference, kept),
            )
            for name in ("logprobs", "entropies"):
                moved = (restricted[name] - expected[name]).abs().max().item()
                assert moved >= 0.3, f"the kept tokens change {name} by only {moved:.3g}"
                require_close(scores[name], restricted[name], self.tolerances.logprob, f"{name} among kept tokens")
        case.keep(group)

    @property
    def replays_kept_tokens(self) -> bool:
        """Whether the backend scores tokens among those that sampling kept."""
        return self.backend.replays_kept_tokens

    def among_kept_tokens(self, case: Case) -> Batch:
        """The case's batch with kept tokens."""
        return with_kept_tokens(case.batch, case.reference.model.config.get_text_config().vocab_size)

    def test_scoring_leaves_no_gradient(self, case: Case) -> None:
        group = case.start()
        group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        require_no_gradient(group.gradients())
        case.keep(group)

    def test_a_reference_model_scores_and_does_not_train(self, case: Case) -> None:
        group = case.start(attrs.evolve(case.spec, role="reference", optimizer=None))
        scores = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        expected = expected_scores(case.reference, case.batch)
        require_close(scores["logprobs"], expected["logprobs"], self.tolerances.logprob, "logprobs")
        with pytest.raises(WorkerError):
            group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)

    # --- routes ---

    def test_routes_of_another_token_or_layer_give_other_logprobs(self, case: Case) -> None:
        """A control: it shows that routes change the log-probs by much more than the tolerance, so that the other
        checks would find a backend that mixes up routes."""
        group, expected = case.start(), expected_scores(case.reference, case.batch)["logprobs"]
        others = other_routes(case)
        for batch in others:
            changed = expected_scores(case.reference, batch)["logprobs"]
            difference = (changed - expected).abs().max().item()
            self.measure(case, "other routes", difference, MOVED, "other routes change too little", at_least=True)
            found = group.forward(batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
            require_close(found, changed, self.tolerances.logprob, "log-probs of other routes")
        case.keep(group)

    def test_routes_that_do_not_fit_the_model_are_refused(self, case: Case) -> None:
        routes_TLK = case.batch["routed_experts"]
        routed = case.batch["routed"].nonzero()[0]
        wrong_id, twice = routes_TLK.clone(), routes_TLK.clone()
        wrong_id[routed] = 250
        twice[routed] = 0
        wrong = {
            "layers": case.batch.with_columns(routed_experts=routes_TLK[:, 1:]),
            "experts per token": case.batch.with_columns(routed_experts=routes_TLK[..., 1:]),
            "250": case.batch.with_columns(routed_experts=wrong_id),
            r"\[0, 0": case.batch.with_columns(routed_experts=twice),
            "no routes": case.batch.without_columns("routed_experts", "routed"),
        }
        for message, batch in wrong.items():
            group = case.start()
            with pytest.raises((ConfigError, ShapeError), match=message):
                group.forward(batch, LIMITS, temperature=TEMPERATURE)
            group.close()

    # --- gradients ---

    def test_loss_and_every_gradient(self, case: Case) -> None:
        group = case.start()
        metrics = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        for rank, part in enumerate(group.ranks.last_results):
            if group.mesh.returns_results(rank):
                weight = part["loss"][1]
                assert weight == 1.0, f"loss of rank {rank} has weight {weight}; expected 1, however the batch is split"
        negative = [name for name, (_, weight) in metrics.items() if weight < 0]
        assert not negative, f"metrics with a negative weight: {', '.join(negative)}"
        expected = backward(case.reference, case.batch, LOSS)
        self.require_same_loss(case, "loss", metrics["loss"][0], expected)
        self.require_same_gradients(case, group.gradients(), case.reference.gradients())
        if self.replays_kept_tokens:  # a second call, whose gradient is added
            kept, loss = self.among_kept_tokens(case), attrs.evolve(LOSS, old_is_current=True)
            kept = kept.without_columns("old_logprobs")
            found = group.forward_backward(kept, LIMITS, loss, temperature=TEMPERATURE)["loss"][0]
            self.require_same_loss(case, "loss", found, backward(case.reference, kept, loss))
            self.require_same_gradients(case, group.gradients(), case.reference.gradients())

    def test_the_cross_entropy_loss(self, case: Case) -> None:
        group, loss = case.start(), LossSpec(name="cross_entropy")
        found = group.forward_backward(case.batch, LIMITS, loss, temperature=TEMPERATURE)["loss"][0]
        self.require_same_loss(case, "cross-entropy", found, backward(case.reference, case.batch, loss))
        self.require_same_gradients(case, group.gradients(), case.reference.gradients())

    def test_metrics_are_averages_over_the_trained_tokens(self, case: Case) -> None:
        metrics = case.start().forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        scores = expected_scores(case.reference, case.batch)
        mask_T = case.batch["loss_mask"]
        ratio_T = (scores["logprobs"] - case.batch["old_logprobs"])[mask_T].exp()
        for name, values_T in {"entropy": scores["entropies"][mask_T], "ratio": ratio_T}.items():
            total, weight = metrics[name]
            assert weight == int(mask_T.sum()), (
                f"{name} has weight {weight}; there are {int(mask_T.sum())} trained tokens"
            )
            require_close(torch.tensor(total / weight), values_T.mean(), 10 * self.tolerances.logprob, name)

    def test_a_training_pass_returns_the_scores_that_it_is_asked_for(self, case: Case) -> None:
        group, mask_T = case.start(), case.batch["loss_mask"]
        names = ("entropies", "logprobs")
        found = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE, returns=names)
        expected = expected_scores(case.reference, case.batch)
        for name in names:
            values_T = torch.where(mask_T, expected[name], 0.0)
            require_close(found[name], values_T, self.tolerances.logprob, f"{name} of the training pass")
        with pytest.raises(ConfigError, match="'heights'"):
            group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE, returns=("heights",))

    def test_a_pass_takes_its_own_logprobs_as_the_old_ones(self, case: Case) -> None:
        """The gradient equals the gradient of a pass whose column `old_logprobs` contains this pass's log-probs: the
        old log-probs are constants, so the ratio is 1, but its gradient is not 0."""
        group, own = case.start(), attrs.evolve(LOSS, old_is_current=True)
        without = case.batch.without_columns("old_logprobs")
        found = group.forward_backward(without, ONE_MICRO_BATCH, own, temperature=TEMPERATURE, returns=("logprobs",))
        once = group.gradients()
        expected_T = expected_scores(case.reference, case.batch)["logprobs"]
        backward(case.reference, case.batch.with_columns(old_logprobs=expected_T), LOSS)
        self.require_same_gradients(case, once, case.reference.gradients())
        given = without.with_columns(old_logprobs=found["logprobs"])
        group.forward_backward(given, ONE_MICRO_BATCH, LOSS, temperature=TEMPERATURE)
        twice = {name: 2.0 * gradient for name, gradient in once.items()}
        # Adding a number to itself is exact: only another summation order could make a difference.
        difference = largest_difference(group.gradients(), twice)
        limit = 1e-6 * max(float(gradient.abs().max()) for gradient in twice.values())
        assert difference <= limit, f"with these log-probs as old_logprobs the gradient differs by {difference:.1e}"

    def test_scoring_gives_the_scores_that_it_is_asked_for(self, case: Case) -> None:
        group = case.start()
        found = group.forward(case.batch, LIMITS, temperature=TEMPERATURE, returns=("logprobs",))
        assert set(found) == {"logprobs"}, f"expected only logprobs, forward returned {sorted(found)}"
        expected = expected_scores(case.reference, case.batch)["logprobs"]
        require_close(found["logprobs"], expected, self.tolerances.logprob, "log-probs alone")
        case.keep(group)

    def test_micro_batches_and_calls_only_add_up(self, case: Case) -> None:
        whole, parts = case.start(), case.start()
        whole.forward_backward(case.batch, ONE_MICRO_BATCH, LOSS, temperature=TEMPERATURE)
        for sequences in ([7, 2, 0], [1, 3, 4, 5, 6]):
            one_each = MicroBatchLimits(max_sequences=1)
            parts.forward_backward(case.batch.select(sequences), one_each, LOSS, temperature=TEMPERATURE)
        self.require_same_gradients(case, parts.gradients(), whole.gradients())

    def test_looking_at_gradients_changes_neither_weights_nor_later_gradients(self, case: Case) -> None:
        """Checked in bfloat16, where gradients and computation have different dtypes, unless the backend refuses
        bfloat16."""
        spec = attrs.evolve(case.spec, bf16=True)
        try:
            case.backend.validate(spec, case.world_size)
        except ConfigError:
            spec = case.spec
        group = case.start(spec)
        before = group.weights()
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        first = group.gradients()
        require_equal(group.gradients(), first, "gradients read twice")
        require_equal(group.weights(), before, "after reading the gradients")
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        twice = {name: 2 * gradient for name, gradient in first.items()}
        # The same numbers are added to themselves. Sums stored in bfloat16 are rounded to 8 bits.
        difference = largest_difference(group.gradients(), twice)
        largest = max(float(gradient.abs().max()) for gradient in twice.values())
        assert difference <= 0.02 * largest, f"a second pass after reading gradients is off by {difference:g}"
        group.optim_step()
        assert largest_difference(group.weights(), before) > 0, "a step after reading the gradients changes no weight"

    def test_what_stands_outside_the_loss_mask_does_not_matter(self, case: Case) -> None:
        group = case.start()
        mask_T = case.batch["loss_mask"]
        other = {
            name: torch.where(mask_T, case.batch[name], float("nan"))
            for name in ("old_logprobs", "ref_logprobs", "advantages", "loss_weights")
        }
        group.forward_backward(case.batch.with_columns(**other), LIMITS, LOSS, temperature=TEMPERATURE)
        backward(case.reference, case.batch, LOSS)
        self.require_same_gradients(case, group.gradients(), case.reference.gradients())

    # --- optimizer steps ---

    def test_one_step_can_be_taken_otherwise_than_the_configuration_says(self, case: Case) -> None:
        """The second of three steps differs; the third uses the configuration's settings again."""
        group, plain = case.start(), case.new_reference()
        for update, batch in zip((None, OTHER_STEP, None), steps_of(case.batch), strict=True):
            group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
            for reference in (case.reference, plain):
                backward(reference, batch, LOSS)
            step, expected, without = group.optim_step(update), case.reference.optim_step(update), plain.optim_step()
            self.require_same_step(step, expected, f"step with {update or 'the configured settings'}")
            if update is not None:
                scaled = attrs.evolve(expected, grad_norm=update.gradient_scale * without.grad_norm)
                self.require_same_step(step, scaled, f"step with gradient_scale={update.gradient_scale}")
        moved = largest_difference(weights(case.reference), weights(plain))
        assert moved >= MOVED, f"the other settings change the weights by only {moved:.1e}, too little for this test"
        difference, limit = largest_difference(group.weights(), weights(case.reference)), self._weight_tolerance(case)
        assert difference <= limit, f"weights after these steps differ by {difference:.1e}, allowed {limit:g}"

    def test_a_step_whose_batch_comes_in_parts_is_that_of_the_batch(self, case: Case) -> None:
        """With `trainer.stream_groups`, loss weights are not divided by the number of tokens, sequences or prompts;
        instead, the optimizer step scales the gradient by the reciprocal of this number. Here the loss weights are
        multiplied by 64, and the step scales the gradient by 1/64. Between the parts, the worker scores, exports and
        saves, which must not change the pending gradients. The state saved in the middle of the second step must equal
        the state after the first step."""
        group = case.start()
        divisor = 64.0
        second = steps_of(case.batch)[1]
        before: Mapping[str, Tensor] = {}
        expected = None
        for number, batch in enumerate(steps_of(case.batch)[:2]):
            undivided = batch.with_columns(loss_weights=batch["loss_weights"] * divisor)
            loss, before = 0.0, group.weights()
            last = batch.num_sequences - 1
            for sequences in ([last], range(last)):
                part = undivided.select(sequences)
                loss += group.forward_backward(part, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0] / divisor
                group.forward(part, LIMITS, temperature=TEMPERATURE)
                require_equal(group.weights(), before, "between two parts")
                if number == 1 and sequences == [last]:
                    group.call(Worker.save_state, case.directory / "in_the_middle")
            expected_loss = backward(case.reference, batch, LOSS)
            assert loss == pytest.approx(expected_loss, rel=10 * self.tolerances.loss), (
                f"the losses of the parts add up to {loss}; the loss of the whole batch is {expected_loss}"
            )
            step = group.optim_step(OptimizerUpdate(gradient_scale=1.0 / divisor))
            expected = case.reference.optim_step()
            self.require_same_step(step, expected, f"step of a batch in parts, with gradient_scale=1/{divisor:g}")
        difference, limit = largest_difference(group.weights(), weights(case.reference)), self._weight_tolerance(case)
        assert difference <= limit, f"weights after two steps in parts differ by {difference:.1e}, allowed {limit:g}"
        group.call(Worker.load_state, case.directory / "in_the_middle")
        require_equal(group.weights(), before, "loaded from the middle of the second step")
        group.forward_backward(second, LIMITS, LOSS, temperature=TEMPERATURE)
        again = group.optim_step()
        assert expected is not None
        self.require_same_step(again, expected, "second step, repeated from the saved state")
        difference = largest_difference(group.weights(), weights(case.reference))
        assert difference <= limit, f"the second step, repeated from the saved state, differs by {difference:.1e}"

    def test_three_optimizer_steps(self, case: Case) -> None:
        group, before = case.start(), weights(case.reference)
        norms = []
        for rate, batch in zip((0.5e-3, 1e-3, 1e-3), steps_of(case.batch), strict=True):
            group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
            backward(case.reference, batch, LOSS)
            step, expected_step = group.optim_step(), case.reference.optim_step()
            assert step.learning_rate == pytest.approx(rate), (
                "with num_warmup_steps=2, the three steps have 1/2, 2/2 and 2/2 of the rate"
            )
            assert not step.skipped, "the step was skipped, but all gradients are finite"
            norms.append(abs(step.grad_norm / expected_step.grad_norm - 1.0))
        self.measure(case, "gradient norm", max(norms), self.tolerances.gradient_norm, "gradient norms differ")
        expected = weights(case.reference)
        moved = largest_difference(expected, before)
        assert moved >= MOVED, f"the steps change the weights by only {moved:.1e}, too little for this test"
        self.require_close(case, "weights", group.weights(), expected, self._weight_tolerance(case))
        halved = case.new_reference()
        for batch in steps_of(case.batch):
            backward(halved, batch.select(range((batch.num_sequences + 1) // 2)), LOSS)
            halved.optim_step()
        control = largest_difference(weights(halved), expected)
        self.measure(case, "half the batch", control, MOVED, "half the batch changes too little", at_least=True)
        if case.variant.parity_only and group.ranks.abilities.offload:
            self.check_offloading(case, group, num_steps=1)

    def test_muon_is_stepped_exactly_or_refused_by_name(self, case: Case) -> None:
        spec = attrs.evolve(case.spec, optimizer=attrs.evolve(OPTIMIZER, name="muon"))
        if (refusal := self._refusal(spec, case.world_size)) is not None:
            assert "optimizer_config.name" in refusal, f"the error does not name the key: {refusal}"
            return
        group, reference = case.start(spec), ReferenceWorker(spec)
        for batch in steps_of(case.batch):
            group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
            backward(reference, batch, LOSS)
            group.optim_step()
            reference.optim_step()
        expected, tolerance = weights(reference), self._weight_tolerance(case)
        difference = largest_difference(group.weights(), expected)
        assert difference <= tolerance, f"the weights differ by {difference:.1e}; expected at most {tolerance:.0e}"

    def _refusal(self, spec: WorkerSpec, world_size: int) -> str | None:
        """Why the backend cannot train with `spec`; None if it can."""
        try:
            self.backend.validate(spec, world_size)
        except ConfigError as error:
            return str(error)
        return None

    def test_offloading_between_all_phases_changes_nothing(self, case: Case) -> None:
        group = case.start()
        if not group.ranks.abilities.offload:
            pytest.skip("the worker cannot offload")
        self.check_offloading(case, group, num_steps=3)

    def check_offloading(self, case: Case, group: RankGroup, num_steps: int) -> None:
        """Takes steps, with parameters and optimizer state offloaded before each step, and checks the weights. The
        parameters return before the training pass, the optimizer state after it. Ranks and the case's reference must
        begin with the same state."""
        for batch in steps_of(case.batch)[:num_steps]:
            group.call(Worker.offload, parameters=True, optimizer=True)
            group.call(Worker.onload, parameters=True, optimizer=False)
            group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
            group.call(Worker.onload, parameters=False, optimizer=True)
            group.optim_step()
            backward(case.reference, batch, LOSS)
            case.reference.optim_step()
        before = group.weights()
        group.call(Worker.offload, parameters=True, optimizer=True)
        group.call(Worker.onload, parameters=True, optimizer=True)
        require_equal(group.weights(), before, "moved off the device and back")
        tolerance = self._weight_tolerance(case)
        self.require_close(case, "weights, offloaded", before, weights(case.reference), tolerance)

    def test_noise_changes_every_trained_weight_and_goes_bit_for_bit(self, case: Case) -> None:
        group = case.start()
        if not group.ranks.abilities.perturb:
            pytest.skip("the worker cannot perturb its weights")
        before = group.weights()
        group.call(Worker.perturb, 1, 1.0)
        noisy = group.weights()
        unmoved = [name for name, weight in noisy.items() if torch.equal(weight, before[name])]
        assert not unmoved or (case.spec.model.lora.rank and len(unmoved) < len(noisy)), f"no noise on {unmoved[:3]}"
        logprobs_T = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
        assert logprobs_T.isfinite().all(), "log-probs of the model with noise are not finite"
        group.call(Worker.restore)
        require_equal(group.weights(), before, "noise added and removed")

    def test_frozen_parameters_do_not_change(self, case: Case) -> None:
        self.check_frozen(case, (r"layers\.1\.",))

    def check_frozen(self, case: Case, trainable: tuple[str, ...]) -> None:
        """Trains only the parameters that `trainable` names, and compares with the reference, which does the same.

        Frozen weights must stay bit-identical. The gradient norm, the noise and the state must leave them out. A
        backend may refuse the key.
        """
        spec = attrs.evolve(case.spec, model=attrs.evolve(case.spec.model, trainable=trainable))
        try:
            self.backend.validate(spec, case.world_size)
        except ConfigError as error:
            if not str(error.key).endswith(".model.trainable"):
                raise
            pytest.skip(f"the backend refuses frozen parameters: {error}")
        group, reference, batch = case.start(spec), ReferenceWorker(spec), case.batch
        before = group.weights()
        backward(reference, batch, LOSS)
        group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
        gradients = reference.gradients()
        frozen = before.keys() - gradients.keys()
        assert frozen, f"{trainable} leaves no parameter frozen"
        found, size = group.gradients(), torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        require_same_names(found, gradients, "gradients of trained parameters")
        for name, gradient in gradients.items():
            require_close(found[name], gradient, self.tolerances.gradient * size, f"gradient of {name}")
        self.require_same_step(group.optim_step(), reference.optim_step(), "step with frozen parameters")
        group.call(Worker.save_state, case.directory / "state")
        saved = group.weights()
        step = train_step(group, case)
        backward(reference, batch, LOSS)
        self.require_same_step(step, reference.optim_step(), "second step with frozen parameters")
        after = group.weights()
        for name in frozen:
            assert torch.equal(after[name], before[name]), f"{name} is frozen, but training changed it"
        units = {unit_of(name) for name in gradients}
        expected = {name: weight for name, weight in after.items() if unit_of(name) in units}
        require_equal(group.publish(0, 1 << 20, only_trained=True).tensors, expected, "sent with only_trained")
        for name, weight in weights(reference).items():
            require_close(after[name], weight, self._weight_tolerance(case), f"{name} after two steps")
        group.call(Worker.load_state, case.directory / "state")
        require_equal(group.weights(), saved, "loaded, with frozen parameters")
        assert train_step(group, case) == step, "the step after loading differs from the step without loading"
        if group.ranks.abilities.perturb:
            before = group.weights()
            group.call(Worker.perturb, 1, 1.0)
            noisy = group.weights()
            assert {name for name in noisy if torch.equal(noisy[name], before[name])} == frozen, (
                "noise on frozen weights"
            )
            group.call(Worker.restore)
            require_equal(group.weights(), before, "noise added and removed")

    def test_the_gradient_is_clipped_by_its_global_norm(self, case: Case) -> None:
        large = case.batch.with_columns(loss_weights=case.batch["loss_weights"] * 100)
        group = case.start()
        group.forward_backward(large, LIMITS, LOSS, temperature=TEMPERATURE)
        backward(case.reference, large, LOSS)
        norm, expected = group.optim_step().grad_norm, case.reference.optim_step().grad_norm
        assert expected > 10 * OPTIMIZER.max_grad_norm
        assert norm == pytest.approx(expected, rel=self.tolerances.gradient_norm), (
            "grad_norm must be the norm before clipping"
        )

    def test_a_gradient_that_is_not_finite_skips_step_and_schedule(self, case: Case) -> None:
        group = case.start()
        before = group.weights()
        # NaN in one sequence: only the rank that has this sequence sees it, but all must skip.
        broken_T = torch.where(case.batch.sequence_index == 1, float("nan"), case.batch["loss_weights"])
        broken = case.batch.with_columns(loss_weights=broken_T)
        group.forward_backward(broken, LIMITS, LOSS, temperature=TEMPERATURE)
        step = group.optim_step()
        assert step.skipped, "a gradient is NaN, but the step was taken"
        assert not step.grad_norm < float("inf"), f"a gradient is NaN, but the norm is {step.grad_norm}"
        require_equal(group.weights(), before, "after a skipped step")
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        backward(case.reference, case.batch, LOSS)
        assert group.optim_step().learning_rate == pytest.approx(0.5e-3), "a skipped step must not advance the schedule"
        case.reference.optim_step()
        after, tolerance = group.weights(), self.tolerances.tied_weight
        for name, weight in weights(case.reference).items():
            require_close(after[name], weight, tolerance, f"{name} after a skipped and a good step")

    def test_an_optimizer_step_clears_the_gradients(self, case: Case) -> None:
        group = case.start()
        train_step(group, case)
        require_no_gradient(group.gradients())

    # --- bfloat16 ---

    def test_bfloat16_errs_by_little_more_than_plain_transformers(self, case: Case) -> None:
        checkpoint = make_checkpoint(case.directory / "bfloat16", dtype="bfloat16", **case.variant.checkpoint)
        spec = attrs.evolve(case.spec, bf16=True, model=ModelConfig(path=str(checkpoint)))
        try:
            self.backend.validate(spec, case.world_size)
        except ConfigError as error:
            if error.key != "trainer.bf16":
                raise
            pytest.skip(f"the backend refuses bfloat16: {error}")
        variant = case.variant
        batches = {"forced_routes": variant.forced_routes, "shared_beginnings": variant.shares_prefixes}
        key = repr((sorted(variant.checkpoint.items()), batches))
        if key not in _baselines:
            _baselines[key] = Baseline.of(spec, partial(make_batches, **batches))
        group, baseline = case.start(spec), _baselines[key]
        found = measure_results(group, baseline.batches, LIMITS, group.weights)
        own, plain = map(attrs.asdict, baseline.errors(found))
        for name, unit in plain.items():
            message = f"the error is {own[name]:.1e}, that of plain transformers {unit:.1e}; their ratio is too large"
            self.measure(case, f"bf16 {name}", own[name] / unit, self.tolerances.bfloat16, message, unit=unit)

    # --- weights and state ---

    def test_saved_state_continues_exactly(self, case: Case) -> None:
        """The loaded weights and the next step's norm and learning rate must be equal. The weights after that step may
        differ by the tolerance."""
        first, second = case.start(), case.start()
        train_step(first, case)
        first.call(Worker.save_state, case.directory / "state")
        second.forward_backward(case.batch.select([0]), LIMITS, LOSS, temperature=TEMPERATURE)
        second.call(Worker.load_state, case.directory / "state")
        require_equal(second.weights(), first.weights(), "loaded")
        steps = [train_step(first, case), train_step(second, case)]
        assert steps[0] == steps[1], f"the step after loading is {steps[1]}, without loading it is {steps[0]}"
        after = second.weights()
        for name, weight in first.weights().items():
            require_close(after[name], weight, self.tolerances.weight, f"{name}, a step after loading")

    def test_state_saved_at_one_world_size_continues_at_another(
        self, resumed: tuple[Variant, Variant], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with (
            self._open(resumed[0], tmp_path / "saved", tmp_path_factory) as case,
            self._open(resumed[1], tmp_path / "loaded", tmp_path_factory) as other_case,
        ):
            self.check_resumed(case, other_case)

    def test_a_state_saved_in_the_background_is_that_of_its_start(self, case: Case) -> None:
        first, second = case.start(), case.start()
        if not first.ranks.abilities.save_in_background:
            pytest.skip("the worker cannot save in the background")
        for directory in (case.directory / "state-1", case.directory / "state-2"):
            train_step(first, case)
            saved = first.weights()
            first.call(Worker.start_saving, directory)
            train_step(first, case)
            deadline = time.monotonic() + self.timeout_s
            while not all(first.call(Worker.has_saved)):
                assert time.monotonic() < deadline, f"{directory.name} was not saved within {self.timeout_s:g} s"
            second.call(Worker.load_state, directory)
            require_equal(second.weights(), saved, "loaded")
            train_step(second, case)
            after = second.weights()
            for name, weight in first.weights().items():
                require_close(after[name], weight, self.tolerances.weight, f"{name}, a step after loading")

    def check_resumed(self, case: Case, other_case: Case) -> None:
        """Checks that `other_case` continues from the state that `case` saved."""
        first, second = case.start(), other_case.start()
        train_step(first, case)
        first.call(Worker.save_state, case.directory / "state")
        second.call(Worker.load_state, case.directory / "state")
        loaded_at = str(other_case.variant)
        self.require_close(case, "loaded weights", second.weights(), first.weights(), 0.0, loaded_at=loaded_at)
        losses = [
            group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
            for group in (first, second)
        ]
        self.require_same_loss(case, "next loss", losses[1], losses[0], loaded_at=loaded_at)
        steps = [first.optim_step(), second.optim_step()]
        self.require_same_step(steps[1], steps[0], "step after loading")
        tolerance = self.tolerances.weight
        self.require_close(case, "next step", second.weights(), first.weights(), tolerance, loaded_at=loaded_at)

    def test_a_state_that_is_missing_or_cut_off_is_a_checkpoint_error(self, case: Case) -> None:
        group = case.start()
        with pytest.raises(CheckpointError, match="nothing"):
            group.call(Worker.load_state, case.directory / "nothing")
        group = train_and_save(case, case.directory / "state")
        before = group.weights()
        for file in sorted(path for path in (case.directory / "state").rglob("*") if path.is_file()):
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2])
            with pytest.raises(CheckpointError, match=file.name):
                group.call(Worker.load_state, case.directory / "state")
            file.write_bytes(content)
            if group.ranks.has_ended:
                group = case.start()
                group.call(Worker.load_state, case.directory / "state")
            require_equal(group.weights(), before, f"after {file.name} was refused")
        group.call(Worker.load_state, case.directory / "state")

    def test_a_state_that_another_backend_wrote_is_a_checkpoint_error(self, case: Case) -> None:
        directory = case.directory / "foreign"
        write_foreign_state(directory)
        group = case.start()
        before = group.weights()
        with pytest.raises(CheckpointError, match="foreign"):
            group.call(Worker.load_state, directory)
        if not group.ranks.has_ended:
            require_equal(group.weights(), before, "after a foreign state was refused")

    def test_the_saved_model_is_a_hugging_face_model_with_its_tokenizer(self, case: Case) -> None:
        from transformers import AutoTokenizer

        group = case.start()
        train_step(group, case)
        group.call(Worker.save_model, case.directory / "model")
        saved = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(case.directory / "model"))))
        require_equal(weights(saved), group.weights(), "saved model")
        text = "3+4=7"
        tokenizers = [AutoTokenizer.from_pretrained(path) for path in (case.directory / "model", case.spec.model.path)]
        assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids, (
            "the saved tokenizer encodes text differently"
        )

    # --- how differences are judged ---

    def measure(
        self,
        case: Case,
        quantity: str,
        difference: float,
        limit: float,
        message: str,
        *,
        at_least: bool = False,
        loaded_at: str | None = None,
        unit: float | None = None,
    ) -> None:
        """Records a difference for the parity table, and raises AssertionError if it is beyond its limit."""
        measurement = Measurement(
            backend=self.backend.name,
            mesh=str(case.variant),
            quantity=quantity,
            difference=difference,
            limit=limit,
            at_least=at_least,
            loaded_at=loaded_at,
            unit=unit,
        )
        write_down(measurement)
        assert difference >= limit if at_least else difference <= limit, f"{message}: {quantity} {difference:.1e}, " + (
            f"expected at least {limit:g}" if at_least else f"allowed {limit:g}"
        )

    def require_same_loss(
        self, case: Case, quantity: str, found: float, expected: float, *, loaded_at: str | None = None
    ) -> None:
        """Measures the relative difference of a loss, and raises AssertionError if it is above the tolerance."""
        error = abs(found - expected) / abs(expected)
        message = f"loss {found}, expected {expected}"
        self.measure(case, quantity, error, self.tolerances.loss, message, loaded_at=loaded_at)

    def require_close(
        self,
        case: Case,
        quantity: str,
        actual: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        limit: float,
        *,
        loaded_at: str | None = None,
    ) -> None:
        """Measures the largest absolute difference of tensors by name, and raises AssertionError if it is above
        `limit`."""
        require_same_names(actual, expected, quantity)
        for name, tensor in expected.items():
            assert actual[name].shape == tensor.shape, f"{name}: {actual[name].shape}, expected {tensor.shape}"
        worst = max(expected, key=lambda name: largest_difference({name: actual[name]}, {name: expected[name]}))
        difference = largest_difference(actual, expected)
        self.measure(case, quantity, difference, limit, f"{worst} differs most", loaded_at=loaded_at)

    def require_same_gradients(self, case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        """Measures the relative difference of all gradients. Raises AssertionError if this difference, or the
        difference of one parameter, is above its tolerance."""
        require_same_names(actual, expected, "gradients")
        whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        errors = {name: (actual[name] - gradient).norm().item() for name, gradient in expected.items()}
        for name, gradient in expected.items():
            size = max(gradient.norm().item(), 0.01 * whole)
            assert errors[name] <= self.tolerances.gradient_of_one * size, (
                f"gradient of {name} differs by {errors[name] / size:.1e} (relative L2), "
                f"allowed {self.tolerances.gradient_of_one:g}{multiple_of(expected, actual)}"
            )
        error = sum(e * e for e in errors.values()) ** 0.5 / whole
        self.measure(case, "gradients", error, self.tolerances.gradient, "gradients differ (relative L2)")

    def require_same_step(self, step: OptimizerStep, expected: OptimizerStep, what: str) -> None:
        """Raises AssertionError unless both steps have the same learning rate, and norms within the tolerance."""
        assert step.learning_rate == pytest.approx(expected.learning_rate), (
            f"{what}: learning_rate is {step.learning_rate}, expected {expected.learning_rate}"
        )
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=self.tolerances.gradient_norm), (
            f"{what}: grad_norm is {step.grad_norm}, expected {expected.grad_norm}, the global norm of the summed and "
            "scaled gradient before clipping"
        )

    def _weight_tolerance(self, case: Case) -> float:
        return self.tolerances.tied_weight if case.variant.is_tied else self.tolerances.weight


def checks() -> tuple[str, ...]:
    """Names of the suite's tests."""
    return tuple(name for name in vars(BackendConformance) if name.startswith("test_"))


def _marked(*variants: Variant) -> Any:
    """One variant, or a pair of variants, as a pytest parameter with its marks."""
    marks = [getattr(pytest.mark, name) for variant in variants for name in variant.marks]
    value = variants[0] if len(variants) == 1 else variants
    return pytest.param(value, id=" to ".join(map(str, variants)), marks=marks)


def steps_of(batch: Batch) -> list[Batch]:
    """The mini-batches of three optimizer steps."""
    return [batch.select(sequences) for sequences in STEPS]


def other_routes(case: Case) -> list[Batch]:
    """The case's batch with all routes shifted by one token, and with the routes of another layer."""
    layers = sorted(routers(case.reference.model))
    by_token_TLK, by_layer_TLK = case.batch["routed_experts"].roll(1, 0), case.batch["routed_experts"].clone()
    by_layer_TLK[:, layers] = by_layer_TLK[:, layers[1:] + layers[:1]]
    late_T = case.batch["routed"] & case.batch["routed"].roll(1)
    assert len(layers) > 1, "the model needs at least two layers with experts"
    return [
        case.batch.with_columns(routed_experts=by_token_TLK, routed=late_T),
        case.batch.with_columns(routed_experts=by_layer_TLK),
    ]


def expected_scores(reference: ReferenceWorker, batch: Batch) -> dict[str, Tensor]:
    """The reference's scores of the whole batch, computed in one micro-batch."""
    return reference.forward(batch, [range(batch.num_sequences)], temperature=TEMPERATURE)


def backward(reference: ReferenceWorker, batch: Batch, loss: LossSpec) -> float:
    """Adds the gradient of the whole batch to the reference; returns the loss."""
    return reference.forward_backward(batch, [range(batch.num_sequences)], loss, temperature=TEMPERATURE)["loss"][0]


def train_step(group: RankGroup, case: Case) -> OptimizerStep:
    """Takes one optimizer step on the whole batch."""
    group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    return group.optim_step()


def train_and_save(case: Case, directory: Path) -> RankGroup:
    """Starts ranks, takes one step, and saves their state to `directory`."""
    group = case.start()
    train_step(group, case)
    group.call(Worker.save_state, directory)
    return group


def write_foreign_state(directory: Path) -> None:
    """Writes a complete state in torch's distributed format with tensor names, shapes and an object that fit no model
    of the suite."""
    state = {"model.word_embeddings": torch.zeros(3, 2), "optimizer.common": {"step": 3}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        save(state, storage_writer=FileSystemWriter(directory), no_dist=True)
    write_state_list(directory, [path.name for path in directory.iterdir()], steps_done=3)


def weights(worker: Worker) -> dict[str, Tensor]:
    """Copies of the tensors that a worker exports, by name."""
    return {name: t.clone() for bucket in worker.export_weights(1 << 20) for name, t in unpack_bucket(bucket)}


_baselines: dict[str, Baseline] = {}
"""Baselines by checkpoint and kind of batch. Each is computed once per pytest run."""
_checkpoints: dict[tuple[Path, str], Path] = {}


def _checkpoint_of(variant: Variant, factory: pytest.TempPathFactory) -> Path:
    """Returns the variant's checkpoint. It is created only once per pytest run, because workers only read it."""
    key = (factory.getbasetemp(), repr(sorted(variant.checkpoint.items())))
    if key not in _checkpoints:
        _checkpoints[key] = make_checkpoint(factory.mktemp("model"), **variant.checkpoint)
    return _checkpoints[key]
