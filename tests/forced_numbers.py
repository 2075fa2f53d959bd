"""Expected numbers for ranks that follow a batch's expert routes. They are computed with the library
`transformers`, whose models are made to use the batch's experts, for full training and for peft's adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import attrs
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_core.batch import Batch
from rl_core.interfaces import LoraConfig, Worker
from rl_transformers.testing.backend import (
    LIMITS,
    MOVED,
    TEMPERATURE,
    backward,
    expected_scores,
    other_routes,
    steps_of,
)
from rl_transformers.testing.cases import LOSS, Case
from rl_transformers.testing.ranks import RankGroup
from rl_transformers.testing.reference_worker import ReferenceWorker

LOGPROB_TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-6, 1e-5
"""Tolerances for float32 rounding: sums are added in another order. Log-probs: absolute. Gradients: relative L2 over
all parameters. Loss: relative, but absolute below 1, where the loss is a small difference of large parts."""
ADAPTER_TOLERANCE = 2e-5
"""Absolute, after three AdamW steps with lr=1e-3. AdamW normalises gradients, so rounding of tiny gradients shows."""
ATTENTION_ADAPTERS = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
"""Adapters of attention layers only. On experts, peft's adapters would differ from Megatron's: peft adapts the one
tensor in which transformers stores all experts of a layer, while Megatron adapts each expert's own layers."""


@attrs.frozen(kw_only=True, eq=False)
class ForcedNumbers:
    """Expected log-probs, loss and gradient of one batch, before any optimizer step."""

    logprobs_T: Tensor
    loss: float
    gradients: Mapping[str, Tensor]

    @classmethod
    def of(cls, reference: ReferenceWorker, batch: Batch) -> Self:
        """Computes the numbers of `batch` with `reference`, whose gradients must be empty."""
        logprobs_T = expected_scores(reference, batch)["logprobs"]
        return cls(logprobs_T=logprobs_T, loss=backward(reference, batch, LOSS), gradients=reference.gradients())


def require_replayed(group: RankGroup, batch: Batch, expected: ForcedNumbers) -> dict[str, Tensor]:
    """The ranks' scores. Raises AssertionError if log-probs, loss or gradient differ from the expected numbers."""
    scores = group.forward(batch, LIMITS, temperature=TEMPERATURE)
    difference = float((scores["logprobs"] - expected.logprobs_T).abs().max())
    assert difference <= LOGPROB_TOLERANCE, f"log-probs differ by {difference:.1e}"
    loss = group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
    assert abs(loss - expected.loss) <= LOSS_TOLERANCE * max(1.0, abs(expected.loss)), (
        f"loss {loss}, expected {expected.loss}"
    )
    error = gradient_error(group.gradients(), expected.gradients)
    assert error <= GRADIENT_TOLERANCE, f"gradients differ by {error:.1e}"
    return scores


def require_breaks_found(group: RankGroup, case: Case, expected: ForcedNumbers) -> None:
    """Negative control: with routes shifted by one token or taken from another layer, `require_replayed` fails."""
    for broken in other_routes(case):
        with pytest.raises(AssertionError, match="log-probs differ"):
            require_replayed(group, broken, expected)


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """L2 norm of the difference over all parameters, divided by the L2 norm of the expected gradients."""
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    return float(errors.norm() / whole)


# --- adapters -------------------------------------------------------------------------------------------------------


def require_adapters_trained_along_routes(group: RankGroup, case: Case) -> None:
    """Trains adapters for three steps, on the ranks and by peft with the experts forced.

    Raises AssertionError if the results differ, or if other routes give the same results.
    """
    group.call(Worker.save_model, case.directory / "before")
    reference, other = (adapted_reference(case, case.directory / "before" / "adapter") for _ in range(2))
    norms = [step_of_ranks(group, batch) for batch in steps_of(case.batch)]
    assert norms == pytest.approx([step_of_reference(reference, batch) for batch in steps_of(case.batch)], rel=1e-5)
    group.call(Worker.save_model, case.directory / "after")
    found = load_file(case.directory / "after" / "adapter" / "adapter_model.safetensors")
    assert largest(found, adapters_of(reference)) <= ADAPTER_TOLERANCE
    logprobs_T = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
    expected_T = expected_scores(reference, case.batch)["logprobs"]
    assert (logprobs_T - expected_T).abs().max() <= LOGPROB_TOLERANCE
    for broken in other_routes(case):
        assert (expected_scores(reference, broken)["logprobs"] - expected_T).abs().max() >= MOVED
    for batch in steps_of(other_routes(case)[1]):
        step_of_reference(other, batch)
    assert largest(found, adapters_of(other)) >= MOVED, (
        "other routes train the same adapters, so this comparison could not fail"
    )


def adapted_reference(case: Case, adapter: Path) -> ReferenceWorker:
    """The case's reference with the adapters in the directory `adapter`; it trains only the adapters."""
    reference = case.new_reference()
    model = peft.PeftModel.from_pretrained(reference.model, adapter, is_trainable=True)
    reference.computing = model  # pyright: ignore[reportAttributeAccessIssue]
    config = case.spec.optimizer
    assert config is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reference.optimizers = [
        torch.optim.AdamW(trained, lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay)
    ]
    return reference


def adapters_of(reference: ReferenceWorker) -> dict[str, Tensor]:
    """The reference's adapters, under the names of peft's file."""
    return peft.get_peft_model_state_dict(reference.computing)  # pyright: ignore[reportArgumentType]


def step_of_ranks(group: RankGroup, batch: Batch) -> float:
    """Takes one optimizer step and returns the gradient norm."""
    group.forward_backward(batch, LIMITS, LOSS, temperature=TEMPERATURE)
    return group.optim_step().grad_norm


def step_of_reference(reference: ReferenceWorker, batch: Batch) -> float:
    """Takes one optimizer step and returns the gradient norm."""
    backward(reference, batch, LOSS)
    return reference.optim_step().grad_norm


def largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest absolute difference over all tensors. Both mappings must have the same names."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
