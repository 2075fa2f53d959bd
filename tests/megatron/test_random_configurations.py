"""Random configurations, sensible or not: each is refused with a reason before anything starts, or gives the loss and
gradient of plain transformers. None crashes or hangs."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch

from rl_core.errors import ConfigError
from rl_core.workers import MicroBatchLimits
from rl_megatron import MegatronOptions, megatron
from rl_megatron.checks.refusals import refuse
from rl_transformers.testing.backend import PRELOADED, TEMPERATURE, backward
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker"]))
NUM_QUICK, NUM_ALL = 16, 200
"""The quick seeds include 15, with which a recomputed pipeline stage returns a transposed view."""
LIMITS = MicroBatchLimits(max_tokens=72)
"""The suite's limit of 70 tokens is too small where six ranks split sequences, because they pad the longest sequence to
72."""
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
"""Relative, in float32, the same as in the conformance suite."""
PASSED: tuple[dict[str, Any], ...] = (
    {"sequence_parallel": False},
    {"batch_p2p_comm": True},
    {"calculate_per_token_loss": False},
    {"attention_dropout": 0.1},
    {"moe_router_fusion": True},
    {"moe_expert_capacity_factor": 1.5},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"account_for_loss_in_pipeline_split": True},
    {"num_layers": 3},
    {"no_such_field": 1},
)
"""Values of `transformer_config_kwargs`. Some run; most are wrong, always or on some meshes."""


@attrs.frozen(kw_only=True)
class Drawn:
    """A random configuration."""

    world_size: int
    options: dict[str, Any]
    passed: dict[str, Any]
    spec: dict[str, Any]
    checkpoint: dict[str, Any]

    @property
    def has_experts(self) -> bool:
        return self.checkpoint["family"] in ("qwen3_moe", "deepseek_v3")


def draw(seed: int) -> Drawn:
    """Draws a configuration. Most mesh sizes divide the remaining ranks, so about a third of all configurations run."""
    rng = random.Random(seed)
    world_size = left = rng.choice([1, 2, 2, 4, 4, 4, 6, 8])

    def size(ranks: int) -> int:
        fits = [n for n in (1, 2, 3, 4, 6, 8) if ranks % n == 0]
        return rng.choice(fits) if rng.random() < 0.9 else rng.choice([2, 3, 4])

    sizes = {}
    for name in rng.sample(["tensor", "pipeline", "context"], 3):
        sizes[name] = size(left)
        left = max(1, left // sizes[name])
    stages = sizes["pipeline"]
    options: dict[str, Any] = {
        "tensor_model_parallel_size": sizes["tensor"],
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": sizes["context"],
        "virtual_pipeline_model_parallel_size": 2 if rng.random() < (0.3 if stages > 1 else 0.05) else None,
        "num_layers_in_first_pipeline_stage": rng.choice([1, 2]) if rng.random() < 0.2 and stages > 1 else None,
    }
    family = rng.choice(["qwen3", "llama", "qwen2", "qwen3_moe", "qwen3_moe", "deepseek_v3"])
    if family in ("qwen3_moe", "deepseek_v3"):
        options |= {
            "expert_model_parallel_size": size(world_size // min(stages, world_size)),
            "expert_tensor_parallel_size": rng.choice([None, 1, 1, 2]),
            "moe_enable_routing_replay": True,
        }
    elif rng.random() < 0.1:
        options["expert_model_parallel_size"] = 2
    return Drawn(
        world_size=world_size,
        options=options,
        passed=rng.choice(PASSED) if rng.random() < 0.25 else {},
        spec={"use_sample_packing": rng.random() < 0.7, "gradient_checkpointing": rng.random() < 0.3},
        checkpoint={
            "family": family,
            "num_hidden_layers": rng.choice([4, 4, 4, 5]),
            "tie_word_embeddings": family != "deepseek_v3" and rng.random() < 0.5,
        },
    )


SOAK_SEEDS = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(NUM_QUICK, NUM_ALL)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(NUM_QUICK), *SOAK_SEEDS])
def test_a_random_configuration_is_refused_or_right(seed, tmp_path):
    drawn = draw(seed)
    options = MegatronOptions(**drawn.options, transformer_config_kwargs=drawn.passed)
    variant = Variant(
        world_size=drawn.world_size,
        options=options,
        spec=drawn.spec,
        checkpoint=drawn.checkpoint,
        forced_routes=drawn.has_experts,
    )
    with open_case(megatron, MegatronOptions(), variant, tmp_path, timeout_s=240.0) as case:
        if complaint_about(case) is None:
            require_loss_and_gradient_of_the_reference(case)


def complaint_about(case: Case) -> str | None:
    """The message that refuses the configuration, which must start with a key; None if it is accepted."""
    complaint = None
    try:
        refuse(case.spec, case.world_size)
    except ConfigError as error:
        complaint = str(error)
    assert complaint is None or complaint.startswith("trainer.policy.")
    return complaint


def require_loss_and_gradient_of_the_reference(case: Case) -> None:
    group = case.start()
    loss = group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)["loss"][0]
    expected = backward(case.reference, case.batch, LOSS)
    assert abs(loss - expected) <= LOSS_TOLERANCE * max(1.0, abs(expected)), f"loss {loss}, expected {expected}"
    gradients, expected_gradients = group.gradients(), case.reference.gradients()
    whole = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    errors = torch.stack([(gradients[name] - gradient).norm() for name, gradient in expected_gradients.items()])
    assert errors.norm() <= GRADIENT_TOLERANCE * whole, f"gradients differ by {float(errors.norm() / whole):.1e}"
    assert not group.optim_step().skipped


def test_some_drawn_configurations_are_refused_and_others_are_accepted(tmp_path):
    """Starts no ranks."""
    refused = [seed for seed in range(NUM_QUICK) if is_refused(draw(seed), tmp_path / str(seed))]
    assert NUM_QUICK // 5 <= len(refused) <= NUM_QUICK * 4 // 5


def is_refused(drawn: Drawn, directory) -> bool:
    options = MegatronOptions(**drawn.options, transformer_config_kwargs=drawn.passed)
    directory.mkdir()
    variant = Variant(world_size=drawn.world_size, options=options, spec=drawn.spec, checkpoint=drawn.checkpoint)
    with open_case(megatron, MegatronOptions(), variant, directory) as case:
        return complaint_about(case) is not None
