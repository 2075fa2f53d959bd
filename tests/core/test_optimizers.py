"""Each optimizer steps as its paper says, and is refused before the run if a run cannot use it."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from torch import nn

from rl_core.config.optimizer_checks import require_usable_optimizer
from rl_core.errors import ConfigError, PluginError
from rl_core.interfaces import OptimizerConfig, OptimizerUpdate
from rl_core.rank_kit.optimizer_steps import step_settings
from rl_core.rank_kit.optimizers import (
    hidden_matrices,
    make_states,
    new_optimizer,
    orthogonalized,
    state_layout,
    state_tensors,
)

KEY = "trainer.policy.optimizer_config"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CONFIGS = [
    OptimizerConfig(name="adamw", lr=1e-2),
    OptimizerConfig(name="muon", lr=1e-2),
    OptimizerConfig(name="sgd", lr=1e-2),
    OptimizerConfig(name="sgd", lr=1e-2, params={"momentum": 0.9, "nesterov": True}),
    OptimizerConfig(name="adafactor", lr=1e-2),
    OptimizerConfig(name="torch.optim:RMSprop", lr=1e-2, params={"alpha": 0.9}),
]


def weights_of(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def steps(optimizer, weights, num_steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16), (1, 7)])
def test_the_iteration_is_its_polynomial_of_the_singular_values(shape):
    """The matrix has rank 1 less than full, as gradients of few tokens have, so that an iteration that rounds to
    bfloat16 would fail."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[0] = matrix[-1]
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = COEFFICIENTS[0] * s + COEFFICIENTS[1] * s**3 + COEFFICIENTS[2] * s**5
    found = orthogonalized(matrix, coefficients=COEFFICIENTS, num_steps=5, eps=1e-7)
    torch.testing.assert_close(found, ((u * s) @ v).float(), atol=3e-5, rtol=0)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_steps_as_torchs_up_to_bfloat16(adjust):
    own, other = weights_of((24, 10), (10, 24)), weights_of((24, 10), (10, 24))
    before = torch.cat([weight.detach().clone().flatten() for weight in own])
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1, params={"adjust_lr_fn": adjust})
    steps(new_optimizer(config, own, own), own)
    steps(torch.optim.Muon(other, lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust), other)
    found, expected = (torch.cat([weight.detach().flatten() for weight in each]) for each in (own, other))
    error = (found - expected).norm() / (expected - before).norm()
    assert 0 < error < 0.02, "torch's iteration rounds to bfloat16, so results must be close, but not equal"


def test_muon_steps_each_matrix_of_a_stack_by_itself_and_all_else_with_adamw():
    config = OptimizerConfig(name="muon", lr=1e-2)
    stack, bias = weights_of((3, 4, 6), (5,))
    generator = torch.Generator().manual_seed(2)
    stack.grad, bias.grad = torch.randn(3, 4, 6, generator=generator), torch.randn(5, generator=generator)
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    same_bias = nn.Parameter(bias.detach().clone())
    same_bias.grad = bias.grad.clone()
    for matrix, gradient in zip(alone, stack.grad, strict=True):
        matrix.grad = gradient.clone()
    new_optimizer(config, [stack, bias], [stack]).step()
    new_optimizer(config, alone, alone).step()
    torch.optim.AdamW([same_bias], lr=1e-2, weight_decay=0.01).step()
    torch.testing.assert_close(stack.detach(), torch.stack([m.detach() for m in alone]))
    torch.testing.assert_close(bias, same_bias)


def test_hidden_matrices_leave_out_embeddings_convolutions_outputs_and_vectors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.tied = nn.Linear(4, 11, bias=False)
            self.tied.weight = self.embedding.weight
            self.head = nn.Linear(4, 1)
            self.convolution = nn.Conv1d(4, 4, 3)
            self.hidden = nn.Linear(4, 4)
            self.experts = nn.Parameter(torch.zeros(3, 4, 4))
            self.norm = nn.LayerNorm(4)

    model = Model()
    assert hidden_matrices(model, [model.head], lambda weight: weight.shape) == {model.hidden.weight, model.experts}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name} {dict(config.params)}")
def test_states_made_before_the_first_step_change_no_weight_and_no_later_step(config):
    shapes = ((4, 6), (5,), (2, 3, 4))
    early, late = weights_of(*shapes), weights_of(*shapes)
    optimizer = new_optimizer(config, early, {early[0], early[2]})
    gradient = early[0].grad = torch.ones(4, 6)
    make_states(optimizer)
    assert early[0].grad is gradient
    assert all(torch.equal(*pair) for pair in zip(early, late, strict=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    steps(optimizer, early)
    steps(new_optimizer(config, late, {late[0], late[2]}), late)
    assert all(torch.equal(*pair) for pair in zip(early, late, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name} {dict(config.params)}")
@pytest.mark.parametrize("shape", [(6,), (4, 10), (6, 6), (2, 5, 8)])
def test_the_layout_of_a_state_is_known_for_every_shape(config, shape):
    [weight] = weights_of(shape)
    optimizer = new_optimizer(config, [weight], [weight] if len(shape) > 1 else [])
    make_states(optimizer)
    layout = state_layout(config, num_axes=len(shape), is_matrix=len(shape) > 1)
    assert layout.num_elements(shape) == sum(t.numel() for t in state_tensors(optimizer.state[weight]).values())


def blocks(weights, *, lr, weight_decay):
    """An optimizer whose state has one number for every two elements."""

    class Blocks(torch.optim.SGD):
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                self.state[weight]["scales"] = torch.zeros(-(-weight.numel() // 2))

    return Blocks(weights, lr=lr)


def counting(weights, *, lr, weight_decay, in_group: bool = False):
    """An optimizer that counts its steps with an int, in the state of each weight or in its groups."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                if in_group:
                    group["num_steps"] = group.get("num_steps", 0) + 1
                for weight in group["params"]:
                    self.state[weight]["step"] = self.state[weight].get("step", 0) + 1

    return Counting(weights, lr=lr)


def drifting(weights, *, lr, weight_decay):
    """An optimizer that changes weights even with the learning rate 0."""

    class Drifting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.9)

    return Drifting(weights, lr=lr)


HERE = "tests.core.test_optimizers"


def test_a_state_whose_size_follows_no_axis_is_not_planned():
    with pytest.raises(ConfigError, match="'scales'"):
        state_layout(OptimizerConfig(name=f"{HERE}:blocks"), num_axes=2, is_matrix=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_optimizer_passes_the_check_before_the_run(config):
    require_usable_optimizer(config, KEY)


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        ({"name": "moun"}, ".name", "adamw, muon, sgd, adafactor.*Did you mean 'muon'"),
        ({"name": "tests.core.absent:made"}, ".name", "importing tests.core.absent failed"),
        ({"name": "math:pi"}, ".name", "is float; expected a function"),
        ({"name": "muon", "params": {"momentun": 0.9}}, ".params.momentun", "Did you mean 'momentum'"),
        ({"name": "muon", "params": {"momentum": "high"}}, ".params.momentum", "got 'high'; expected float"),
        ({"name": "muon", "params": {"adjust_lr_fn": "none"}}, ".params.adjust_lr_fn", "match_rms_adamw | original"),
        ({"name": "muon", "params": {"lr": 1.0}}, ".params.lr", "no such parameter"),
        ({"name": "muon", "params": {"momentum": 1.5}}, "", "momentum=1.5"),
        ({"name": "sgd", "params": {"nesterov": True}}, "", "Nesterov"),
        ({"name": "sgd", "params": {"dampening": 0.1}}, ".params.dampening", "it has momentum, nesterov"),
        ({"params": {"momentum": 0.9}}, ".params.momentum", "Use adam_betas"),
        ({"name": "torch.optim:LBFGS", "weight_decay": 0.0}, "", "closure"),
        ({"name": "torch.optim:LBFGS"}, ".weight_decay", "set it to 0"),
        ({"name": f"{HERE}:counting"}, ".name", "keeps 'step' as int"),
        ({"name": f"{HERE}:counting", "params": {"in_group": True}}, ".name", "changes its param_groups"),
        ({"name": f"{HERE}:drifting"}, ".name", "with the learning rate 0"),
        ({"name": f"{HERE}:weights_of", "weight_decay": 0.0}, ".name", "no parameter `lr`"),
    ],
)
def test_an_optimizer_that_a_run_cannot_use_is_refused_with_its_key(fields, key, message):
    with pytest.raises((ConfigError, PluginError), match=message) as caught:
        require_usable_optimizer(OptimizerConfig(**fields), KEY)
    assert caught.value.key == f"{KEY}{key}"


def test_a_step_with_settings_of_adamw_is_refused_by_other_optimizers():
    settings = partial(step_settings, scheduled_rate=1.0)
    update = OptimizerUpdate(adam_betas=(0.5, 0.6))
    assert settings(OptimizerConfig(name="muon"), update).adam_betas == (0.5, 0.6)
    with pytest.raises(ConfigError, match="sgd reads neither"):
        settings(OptimizerConfig(name="sgd"), update)


def test_the_settings_of_a_step_reach_every_group_that_has_them():
    matrix, bias = weights_of((4, 4), (4,))
    config = OptimizerConfig(name="muon")
    own, adamw = (optimizer := new_optimizer(config, [matrix, bias], [matrix])).param_groups
    update = OptimizerUpdate(adam_betas=(0.5, 0.6), eps=0.1, weight_decay=0.3)
    step_settings(config, update, scheduled_rate=2.0).put_into(optimizer.param_groups)
    assert (own["lr"], own["weight_decay"], "betas" in own) == (2.0, 0.3, False)
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"], adamw["eps"]) == (2.0, 0.3, (0.5, 0.6), 0.1)
    betas = new_optimizer(other := attrs.evolve(config, name="torch.optim:NAdam"), [bias], []).param_groups
    step_settings(other, None, scheduled_rate=2.0).put_into(betas)
    assert betas[0]["betas"] == (0.9, 0.999), "adam_betas must not replace the betas of another optimizer"
