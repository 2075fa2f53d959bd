"""Megatron passes the suite that every backend must pass, on every kind of mesh that it offers.

One rank and two data-parallel ones run all checks; other settings, the ways to split a model, and their mixtures, those
behind `docs/parity.md`. Mixture-of-Experts models follow given routes, since rounding could tip a router's own choice.
"""

from __future__ import annotations

from typing import Any

import attrs

from rl_core.testing import VARIANTS, BackendConformance, Variant
from rl_core.testing.backend import Tolerances
from rl_megatron import MegatronOptions, megatron

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
UNTIED = {"tie_word_embeddings": False}
FOUR_LAYERS = UNTIED | {"num_hidden_layers": 4}
QWEN_MOE = UNTIED | {"family": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK = UNTIED | {"family": "deepseek_v3", "num_hidden_layers": 4}


def mesh(world_size: int, checkpoint: dict[str, Any] = UNTIED, **options: int) -> Variant:
    """A dense model on this mesh."""
    return Variant(world_size=world_size, checkpoint=checkpoint, options=MegatronOptions(**options), parity_only=True)


def routed(world_size: int, checkpoint: dict[str, Any] = QWEN_MOE, **options: int) -> Variant:
    """A model with experts on this mesh."""
    return attrs.evolve(
        mesh(world_size, checkpoint),
        options=MegatronOptions(moe_enable_routing_replay=True, **options),
        forced_routes=True,
    )


ONE = Variant(checkpoint=UNTIED)
SETTINGS = tuple(attrs.evolve(variant, parity_only=True) for variant in VARIANTS if variant != ONE)
DATA = Variant(world_size=2, checkpoint=UNTIED)
TENSOR = mesh(2, **{TP: 2})
CONTEXT = mesh(2, **{CP: 2})
STAGES = mesh(2, **{PP: 2})
EIGHT = mesh(8, **{TP: 2, PP: 2, CP: 2})
DENSE = (
    TENSOR,
    attrs.evolve(TENSOR, checkpoint={}),
    CONTEXT,
    attrs.evolve(CONTEXT, spec={"use_sample_packing": False}),
    STAGES,
    attrs.evolve(STAGES, checkpoint={}),
    attrs.evolve(STAGES, spec={"use_sample_packing": False, "gradient_checkpointing": True}),
    mesh(2, FOUR_LAYERS, num_layers_in_first_pipeline_stage=1, **{PP: 2}),
    mesh(2, FOUR_LAYERS, **{PP: 2, VPP: 2}),
    mesh(4, FOUR_LAYERS, **{PP: 4}),
    EIGHT,
    attrs.evolve(EIGHT, checkpoint={}, spec={"gradient_checkpointing": True}),
)
EXPERTS = routed(4, **{TP: 2, PP: 2, EP: 2, ETP: 1})
SPARSE = (
    routed(1),
    routed(1, DEEPSEEK),
    routed(2, **{EP: 2}),
    routed(4, **{EP: 4}),
    routed(2, **{TP: 2}),
    routed(2, **{CP: 2}),
    routed(2, DEEPSEEK, **{TP: 2, EP: 2, ETP: 1}),
    EXPERTS,
    routed(8, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1}),
    routed(8, DEEPSEEK, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1}),
    routed(16, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 2}),
)


class TestMegatron(BackendConformance):
    backend = megatron
    options = MegatronOptions()
    variants = (ONE, *SETTINGS, DATA, *DENSE, *SPARSE)
    resumes = (
        (DATA, ONE),
        (ONE, TENSOR),
        (EIGHT, DATA),
        (EXPERTS, routed(2, **{CP: 2})),
        (EXPERTS, routed(1)),
        (routed(1), EXPERTS),
    )
    tolerances = Tolerances(gradient=1e-5, weight=2e-5)
    preload = ("rl_megatron.worker",)
    timeout_s = 120.0
