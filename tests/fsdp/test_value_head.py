"""The critic compared with plain transformers and a linear layer, which process one sequence at a time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import LossSpec, OptimizerConfig, Plan, RankInfo
from rl_fsdp import FsdpWorker
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import random_batch, spec_of

LENGTHS = [23, 40, 1, 9, 33, 2]
PLAN = ((5, 0, 3), (1, 2), (4,))
LOSS = LossSpec(name="value_clip", params={"value_clip": 0.1})
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, num_warmup_steps=2)


def critic_batch() -> Batch:
    """A batch with returns around 1 and values around 0, so that some predictions are clipped and some are not."""
    batch, generator = random_batch(LENGTHS), torch.Generator().manual_seed(3)
    values_T, noise_T = 0.1 * torch.randn(2, batch.num_tokens, generator=generator)
    weights_T = batch["loss_mask"].float() / int(batch["loss_mask"].sum())
    return batch.with_columns(values=values_T, returns=1.0 + noise_T, loss_weights=weights_T)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with a value head, so that values are not all zero."""
    path = make_checkpoint(tmp_path_factory.mktemp("critic"))
    weight = 0.1 * torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    save_file({"value_head.weight": weight, "value_head.bias": torch.tensor([0.3])}, path / "value_head.safetensors")
    return path


def critic(path: Path, **fields: Any) -> FsdpWorker:
    return FsdpWorker(spec_of(path, **{"role": "critic", "optimizer": OPTIMIZER, **fields}), RankInfo())


class PlainCritic:
    """The base model of transformers with a linear layer."""

    def __init__(self, path: Path):
        self.model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        head = load_file(path / "value_head.safetensors")
        self.head = torch.nn.Linear(32, 1)
        self.head.load_state_dict({name.removeprefix("value_head."): weight for name, weight in head.items()})
        self.parameters = {
            **dict(self.model.named_parameters()),
            **{f"value_head.{name}": weight for name, weight in self.head.named_parameters()},
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0, weight_decay=0.1)

    def values(self, tokens_T: Tensor) -> Tensor:
        """Values per token. The value of token t comes from the hidden state of token t − 1; the first token's value is
        0."""
        hidden_TH = self.model(input_ids=tokens_T[None]).last_hidden_state[0]
        return torch.cat([torch.zeros(1), self.head(hidden_TH[:-1]).squeeze(-1)])

    def backward(self, batch: Batch) -> float:
        total = torch.zeros(())
        for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
            columns = {name: batch[name][start:end] for name in ("tokens", "values", "returns", "loss_weights")}
            predicted_T = self.values(columns["tokens"])
            clipped_T = columns["values"] + (predicted_T - columns["values"]).clamp(-0.1, 0.1)
            error_T = torch.maximum((predicted_T - columns["returns"]) ** 2, (clipped_T - columns["returns"]) ** 2)
            total = total + (columns["loss_weights"] * 0.5 * error_T).sum()
        total.backward()
        return total.item()

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 0.5)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


def begun_alike(batch: Batch) -> Batch:
    """The batch, with the start of each sequence replaced by the same 20 tokens, or as many of them as fit."""
    tokens_T, start = batch["tokens"].clone(), torch.arange(20)
    for first, length in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False):
        tokens_T[first : first + min(20, length)] = start[: min(20, length)]
    return batch.with_columns(tokens=tokens_T)


@pytest.mark.parametrize(
    ("packing", "shares", "plan"), [(True, False, PLAN), (False, False, PLAN), (True, True, ((5, 0, 1, 4), (2, 3)))]
)
def test_values_losses_gradients_and_three_steps_are_those_of_plain_transformers(
    checkpoint: Path, packing: bool, shares: bool, plan: Plan
):
    worker, plain = critic(checkpoint, use_sample_packing=packing, share_prefixes=shares), PlainCritic(checkpoint)
    batch, given = critic_batch(), []
    if shares:
        batch = begun_alike(batch)
        worker.scorer.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
    with torch.no_grad():
        bounds = batch.offsets.tolist()
        expected_T = torch.cat([plain.values(batch["tokens"][a:b]) for a, b in pairwise(bounds)])
    values_T = worker.forward(batch, plan, temperature=0.7)["values"]
    torch.testing.assert_close(values_T, expected_T, rtol=0, atol=1e-5)
    # The first micro-batch has sequences of 2, 23, 40 and 33 tokens. Last tokens are not inputs, and the 20 tokens with
    # which the three long sequences start are computed once.
    assert given == ([1 + 20 + 2 + 19 + 12, 8] if shares else [])
    # Negative control: values shifted by one token differ clearly.
    assert (values_T[:-1] - expected_T[1:]).abs().max() > 0.1

    start = {name: weight.detach().clone() for name, weight in plain.parameters.items()}
    for rate in (0.5e-3, 1e-3, 1e-3):
        metrics = worker.forward_backward(batch, plan, LOSS, temperature=0.7)
        assert metrics["loss"] == (pytest.approx(plain.backward(batch), rel=1e-5), 1.0)
        gradients = worker.gradients()
        assert set(gradients) == set(plain.parameters)
        found, expected = (
            torch.cat([tensors[name].flatten() for name in sorted(start)])
            for tensors in (gradients, {name: weight.grad for name, weight in plain.parameters.items()})
        )
        assert (found - expected).norm() <= 5e-6 * expected.norm()
        assert worker.optim_step().learning_rate == pytest.approx(rate)
        plain.step(rate)
    weights = dict(worker.scorer.named_weights())
    assert max((weights[name] - start[name]).abs().max() for name in start) >= 1e-3
    for name, weight in plain.parameters.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5, msg=name)


def test_a_new_head_gives_zero_and_learns_the_same_from_every_seed(tmp_path: Path):
    path = make_checkpoint(tmp_path)
    workers, batch = [critic(path, seed=seed) for seed in (0, 1)], critic_batch()
    for worker in workers:
        assert not worker.forward(batch, PLAN, temperature=1.0)["values"].any()
        worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
        worker.optim_step()
    first, second = (worker.forward(batch, PLAN, temperature=1.0)["values"] for worker in workers)
    assert first.any()
    assert first.equal(second)


def test_state_and_saved_model_hold_the_head(checkpoint: Path, tmp_path: Path):
    worker, batch = critic(checkpoint), critic_batch()
    worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
    worker.optim_step()
    trained_T = worker.forward(batch, PLAN, temperature=1.0)["values"]
    worker.save_state(tmp_path / "state")
    worker.save_model(tmp_path / "model")
    resumed, started = critic(checkpoint), critic(tmp_path / "model")
    assert not resumed.forward(batch, PLAN, temperature=1.0)["values"].equal(trained_T)
    resumed.load_state(tmp_path / "state")
    for other in (resumed, started):
        assert other.forward(batch, PLAN, temperature=1.0)["values"].equal(trained_T)
    for actor in (worker, resumed):
        actor.forward_backward(batch, PLAN, LOSS, temperature=1.0)
        actor.optim_step()
    next_values = [actor.forward(batch, PLAN, temperature=1.0)["values"] for actor in (worker, resumed)]
    assert next_values[0].equal(next_values[1])


def test_bfloat16_computes_values_from_float32_weights(checkpoint: Path):
    worker, batch = critic(checkpoint, bf16=True), critic_batch()
    assert {parameter.dtype for parameter in worker.scorer.parameters()} == {torch.float32}
    values_T, exact_T = (w.forward(batch, PLAN, temperature=1.0)["values"] for w in (worker, critic(checkpoint)))
    assert 1e-5 < (values_T - exact_T).abs().max() < 0.05


def test_recomputed_layers_give_the_same_gradient(checkpoint: Path):
    stored, recomputed = critic(checkpoint), critic(checkpoint, gradient_checkpointing=True)
    for worker in (stored, recomputed):
        worker.forward_backward(critic_batch(), PLAN, LOSS, temperature=1.0)
    expected = stored.gradients()
    assert all(gradient.equal(expected[name]) for name, gradient in recomputed.gradients().items())


def test_a_head_of_another_size_is_refused(checkpoint: Path, tmp_path: Path):
    path = make_checkpoint(tmp_path, hidden_size=64)
    (path / "value_head.safetensors").write_bytes((checkpoint / "value_head.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"value_head.weight in .*: got shape \[1, 32\]; expected shape \[1, 64\]"):
        critic(path)


def test_a_damaged_head_is_refused(tmp_path: Path):
    path = make_checkpoint(tmp_path)
    (path / "value_head.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"^trainer\.critic\.model\.path: .*value_head\.safetensors cannot be read"):
        critic(path)


def test_a_policy_loss_needs_what_a_critic_does_not_give(checkpoint: Path):
    with pytest.raises(ValueError, match="value of the current model 'logprobs'"):
        critic(checkpoint).forward_backward(critic_batch(), PLAN, LossSpec(name="ppo_clip"), temperature=1.0)
