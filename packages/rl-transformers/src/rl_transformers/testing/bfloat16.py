"""Measures a worker's bfloat16 error, as a multiple of the error of plain transformers in bfloat16.

bfloat16 has eight significant bits, so correct implementations differ from each other, and no absolute limit separates
wrong implementations from correct ones. But the error of plain transformers shows how much rounding is due to the model
itself. A 50 % larger error indicates that a worker rounds values that should stay in float32 (log-probs, trained
weights).

The checkpoint is stored in bfloat16, so that the float32 computation starts from the same weights. Errors are means
over many numbers, because the errors of two correct implementations at single tokens differ by factors of ten and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from rl_core.batch import Batch
from rl_core.interfaces import LossSpec, OptimizerStep, OptimizerUpdate, WorkerSpec
from rl_core.rank_kit.weight_buckets import unpack_bucket
from rl_core.rank_kit.worker_specs import require_model_path
from rl_transformers.testing.cases import LOSS, TEMPERATURE, make_batch, make_routes
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.reference_worker import ReferenceWorker

NUM_BATCHES = 4
"""Number of batches; they have 836 tokens in total. With other seeds, the multiple that is measured for a mesh changes
by at most 0.1."""
NUM_BATCHES_OF_ROUTERS = 16
"""Number of batches for models in which the routers choose the experts. Rounding flips about one choice in a hundred,
and the flips cause most of the error. Measured multiples: 1 to 3.9 with 4 batches, 0.98 to 1.06 with 32."""


class Bfloat16Worker(ReferenceWorker):
    """transformers in bfloat16, as precise as possible without changing the model's code.

    Trained weights, the sum of gradients over sequences, AdamW and log-probs are float32.
    """

    def __init__(self, spec: WorkerSpec):
        from transformers import AutoModelForCausalLM

        super().__init__(spec)
        assert spec.model.path is not None
        # The model is loaded in bfloat16, not cast to bfloat16 afterwards, so that tensors which transformers keeps in
        # float32 (rotary frequencies, a router's bias) remain float32.
        self.computing = AutoModelForCausalLM.from_pretrained(
            require_model_path(spec), dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        for trained, computing in self._pairs():
            computing.register_post_accumulate_grad_hook(partial(_add_to, trained))

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Updates the float32 weights, then copies them, rounded, to the model that computes."""
        step = super().optim_step(update)
        with torch.no_grad():
            for trained, computing in self._pairs():
                computing.copy_(trained)
        return step

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.model.parameters(), self.computing.parameters(), strict=True))


def _add_to(trained: nn.Parameter, computing: nn.Parameter) -> None:
    assert computing.grad is not None
    gradient = computing.grad.float()
    trained.grad = gradient if trained.grad is None else trained.grad.add_(gradient)
    computing.grad = None


@attrs.frozen(kw_only=True, eq=False)
class Results:
    """A worker's results: scores and gradients of some batches, and weights after three optimizer steps."""

    logprobs_T: Tensor
    """Log-probs of all scored tokens of all batches."""
    gradients: Mapping[str, Tensor]
    """Gradients summed over all batches."""
    weights: Mapping[str, Tensor]
    """Weights after three steps: one with these gradients, then one with each of the first two batches."""


@attrs.frozen(kw_only=True)
class Errors:
    """Differences between a worker's results and the float32 results."""

    logprobs: float
    """Mean |difference| in nats."""
    direction: float
    """1 − the cosine of the angle between the gradients of all parameters as one vector."""
    weights: float
    """RMS of the differences / RMS of the changes that the optimizer steps made."""


def make_batches(reference: ReferenceWorker, *, forced_routes: bool, shared_beginnings: bool = False) -> list[Batch]:
    """Makes the batches of the comparison, chosen so that the means are stable.

    Old and reference log-probs are those of `reference`, and all tokens have the same weight. Otherwise rounding near a
    clipping bound could switch off one token's gradient, and with it most of the batch's gradient. Forced routes cover
    every token, because rounding can flip a router's own choice, and one flipped choice can cause most of the error.
    """
    chooses = bool(routers(reference.model)) and not forced_routes
    num_batches = NUM_BATCHES_OF_ROUTERS if chooses else NUM_BATCHES
    batches = []
    for seed in range(1, num_batches + 1):
        batch = make_batch(reference, forced_routes=forced_routes, shared_beginnings=shared_beginnings, seed=seed)
        if forced_routes:
            batch = batch.with_columns(**_routes_of_every_token(reference, batch))
        mask_T = batch["loss_mask"]
        logprobs_T = reference.forward(batch, _one_by_one(batch), temperature=TEMPERATURE)["logprobs"]
        uniform_T = mask_T.float() / mask_T.sum() / num_batches
        batches.append(batch.with_columns(old_logprobs=logprobs_T, ref_logprobs=logprobs_T, loss_weights=uniform_T))
    return batches


def _routes_of_every_token(reference: ReferenceWorker, batch: Batch) -> dict[str, Tensor]:
    lengths = batch.offsets.diff().tolist()
    routes = [make_routes(reference, length, seed=i, has_gaps=False) for i, length in enumerate(lengths)]
    return {name: torch.cat([of_one[name] for of_one in routes]) for name in routes[0]}


def _one_by_one(batch: Batch) -> list[list[int]]:
    return [[i] for i in range(batch.num_sequences)]


@attrs.frozen(kw_only=True, eq=False)
class Baseline:
    """The results with which a worker's results are compared."""

    batches: Sequence[Batch]
    before: Mapping[str, Tensor]
    """The weights before the optimizer steps."""
    exact: Results
    """The results in float32."""
    plain: Results
    """The results of plain transformers in bfloat16, with float32 weights."""

    @classmethod
    def of(cls, spec: WorkerSpec, batches_of: Callable[[ReferenceWorker], Sequence[Batch]]) -> Baseline:
        """Computes the float32 and the bfloat16 results on the batches that `batches_of` makes with the float32 worker.
        The checkpoint of `spec.model` must be stored in bfloat16."""
        reference = ReferenceWorker(spec)
        before, batches = weights_of(reference), batches_of(reference)
        exact = measure_results(reference, batches, None, partial(weights_of, reference))
        del reference  # frees its model before the next is loaded: real models take gigabytes
        worker = Bfloat16Worker(spec)
        plain = measure_results(worker, batches, None, partial(weights_of, worker))
        return cls(batches=batches, before=before, exact=exact, plain=plain)

    def errors(self, found: Results) -> tuple[Errors, Errors]:
        """Returns the errors of `found` and of `plain`. Weights are compared in the dtype of `found`."""
        rounded = {name: self.plain.weights[name].to(weight.dtype) for name, weight in found.weights.items()}
        plain = attrs.evolve(self.plain, weights=rounded)
        return errors(found, self.exact, self.before), errors(plain, self.exact, self.before)


def measure_results(
    worker: Any, batches: Sequence[Batch], limits: Any, weights: Callable[[], Mapping[str, Tensor]]
) -> Results:
    """Computes the `Results` of a worker.

    Args:
        worker: has `forward`, `forward_backward`, `gradients` and `optim_step`: a worker or a `RankGroup`.
        batches: from `make_batches`.
        limits: the micro-batch limits of a `RankGroup`; None for a worker, which gets a plan instead.
        weights: returns the worker's weights by name.
    """
    plans = [limits or _one_by_one(batch) for batch in batches]
    pairs = list(zip(batches, plans, strict=True))
    scores = [worker.forward(*pair, temperature=TEMPERATURE)["logprobs"] for pair in pairs]
    for pair in pairs:
        worker.forward_backward(*pair, LOSS, temperature=TEMPERATURE)
    gradients = worker.gradients()
    worker.optim_step()
    for pair in pairs[:2]:
        # This loss has no clipped ratio. Rounding errors of earlier steps could move a ratio across its bound.
        worker.forward_backward(*pair, LossSpec(name="cross_entropy"), temperature=TEMPERATURE)
        worker.optim_step()
    scored = [scores_T[is_scored(batch)] for scores_T, batch in zip(scores, batches, strict=True)]
    return Results(logprobs_T=torch.cat(scored), gradients=gradients, weights=weights())


def is_scored(batch: Batch) -> Tensor:
    """Returns bool [T], True for all tokens but each sequence's first."""
    is_scored_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    is_scored_T[batch.offsets[:-1]] = False
    return is_scored_T


def errors(found: Results, exact: Results, before: Mapping[str, Tensor]) -> Errors:
    """Measures the differences between `found` and `exact`. `before`: the weights before the steps.

    Weights are compared as exported: if a weight of `found` is bfloat16, the exact weight is rounded to bfloat16, too.
    """
    like = {name: exact.weights[name].to(weight.dtype).float() for name, weight in found.weights.items()}
    missed, moved = _distance(found.weights, like), _distance(exact.weights, before)
    return Errors(
        logprobs=float((found.logprobs_T - exact.logprobs_T).abs().mean()),
        direction=1.0 - _cosine(found.gradients, exact.gradients),
        weights=missed / moved,
    )


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float((a[name].double() - b[name].double()).pow(2).sum()) for name in b) ** 0.5


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    def product(c: Mapping[str, Tensor], d: Mapping[str, Tensor]) -> float:
        return sum(float((c[name].double() * d[name].double()).sum()) for name in b)

    return product(a, b) / (product(a, a) * product(b, b)) ** 0.5


def weights_of(worker: ReferenceWorker) -> dict[str, Tensor]:
    """Copies of the weights that the worker exports."""
    return {name: t.clone() for bucket in worker.export_weights(1 << 20) for name, t in unpack_bucket(bucket)}
