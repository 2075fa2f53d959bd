"""Compares training on two ranks with training on one, for a critic, for adapters, and for a critic with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import peft
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.interfaces import LoraConfig, LossSpec, WorkerSpec
from rl_transformers.testing.backend import Variant
from rl_transformers.testing.cases import LIMITS, TEMPERATURE, Case
from rl_transformers.testing.ranks import RankGroup

GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 5e-6, 1e-5
"""Rounding in float32, because sums are added in another order. Gradients: L2 norm of one tensor's difference, divided
by the L2 norm of all gradients. Weights and scores: absolute."""
UNTIED = Variant(checkpoint={"tie_word_embeddings": False})
LORA = LoraConfig(rank=4, alpha=8)
_VALUES = LossSpec(name="value_clip", params={"value_clip": 1.0})


@attrs.frozen
class Kind:
    """A kind of trained model."""

    loss: LossSpec
    scored: str
    """The column of scores that the model computes."""
    role: str = "policy"
    lora: LoraConfig = attrs.field(factory=LoraConfig)

    def spec(self, case: Case, **fields: Any) -> WorkerSpec:
        """The case's spec, changed to this kind of model."""
        model = attrs.evolve(case.spec.model, lora=self.lora)
        return attrs.evolve(case.spec, model=model, role=self.role, **fields)

    def train(self, group: RankGroup, case: Case, count: int) -> None:
        """Takes `count` optimizer steps on the case's batch."""
        for _ in range(count):
            group.forward_backward(batch_of(case), LIMITS, self.loss, temperature=TEMPERATURE)
            group.optim_step()

    def compare_training(self, one: RankGroup, two: RankGroup, case: Case) -> None:
        """Requires equal gradients, and equal scores and weights after three steps."""
        before = one.weights()
        for group in (one, two):
            group.forward_backward(batch_of(case), LIMITS, self.loss, temperature=TEMPERATURE)
        expected, found = one.gradients(), two.gradients()
        assert set(found) == set(expected)
        norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= GRADIENT_TOLERANCE * norm, name
        for group in (one, two):
            group.optim_step()
            self.train(group, case, 2)
        scores = [group.forward(batch_of(case), LIMITS, temperature=TEMPERATURE)[self.scored] for group in (one, two)]
        torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=WEIGHT_TOLERANCE)
        expected = one.weights()
        assert set(expected) == set(before)
        assert max((expected[name] - before[name]).abs().max() for name in before) >= 1e-3
        require_equal_weights(two.weights(), expected)

    def require_saved(self, directory: Path, case: Case, expected: Mapping[str, Tensor]) -> None:
        """Requires that `save_model` wrote these weights: the model, and a critic's head or an adapter."""
        if self.role == "critic":
            head, model = (load_file(directory / f"{name}.safetensors") for name in ("value_head", "model"))
            assert all(weight.any() and weight.equal(expected[name]) for name, weight in head.items())
            assert {*head, *model} >= expected.keys(), sorted(expected.keys() - {*head, *model})
            assert all(weight.equal(expected[name]) for name, weight in model.items() if name in expected)
            return
        merged = AutoModelForCausalLM.from_pretrained(directory)
        assert all(weight.equal(expected[name]) for name, weight in merged.named_parameters())
        base = AutoModelForCausalLM.from_pretrained(case.spec.model.path)
        loaded = peft.PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload()
        for name, weight in loaded.named_parameters():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)


KINDS = {
    "critic": Kind(_VALUES, "values", role="critic"),
    "adapters": Kind(LossSpec(name="cross_entropy"), "logprobs", lora=LORA),
    "adapters of a critic": Kind(_VALUES, "values", role="critic", lora=LORA),
}


def batch_of(case: Case) -> Batch:
    """The suite's batch with the columns that a critic reads: `values`, `returns` and `loss_weights`."""
    mask_T = case.batch["loss_mask"]
    noise_T = torch.randn(mask_T.numel(), generator=torch.Generator().manual_seed(2))
    weights_T = mask_T.float() / int(mask_T.sum())
    return case.batch.with_columns(values=0.1 * noise_T, returns=1.0 + 0.3 * noise_T, loss_weights=weights_T)


def require_equal_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Requires the same weights, up to float32 rounding."""
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=WEIGHT_TOLERANCE, msg=name)
