"""Megatron passes the suite that every backend must pass, on every kind of mesh that it offers.

Two data-parallel ranks run all checks. A single rank, each way to split a model, and combinations of these run only the
checks behind `docs/parity.md`. `make test` leaves out the variants made by `parity_variant`; `make parity` runs all
variants.
In models with experts, routes are forced, because rounding could change a router's choice.
"""

from __future__ import annotations

from typing import Any

import attrs

from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing import VARIANTS, BackendConformance, Variant
from rl_transformers.testing.backend import Tolerances

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
UNTIED = {"tie_word_embeddings": False}
FOUR_LAYERS = UNTIED | {"num_hidden_layers": 4}
QWEN_MOE = UNTIED | {"family": "qwen3_moe", "num_hidden_layers": 4}
DEEPSEEK = UNTIED | {"family": "deepseek_v3", "num_hidden_layers": 4}


def mesh(world_size: int, checkpoint: dict[str, Any] = UNTIED, **options: int) -> Variant:
    """A variant on a mesh of these sizes; the model is dense unless `checkpoint` has experts."""
    return Variant(world_size=world_size, checkpoint=checkpoint, options=MegatronOptions(**options), parity_only=True)


def routed(world_size: int, checkpoint: dict[str, Any] = QWEN_MOE, **options: int) -> Variant:
    """A variant with experts and forced routes on a mesh of these sizes."""
    return attrs.evolve(
        mesh(world_size, checkpoint),
        options=MegatronOptions(moe_enable_routing_replay=True, **options),
        forced_routes=True,
    )


def parity_variant(variant: Variant, **changes: Any) -> Variant:
    """A variant that only `make parity` runs."""
    return attrs.evolve(variant, parity_only=True, marks=("parity",), **changes)


ONE = Variant(checkpoint=UNTIED, parity_only=True)
SETTINGS = tuple(parity_variant(variant) for variant in VARIANTS if variant.checkpoint != UNTIED)
DATA = Variant(world_size=2, checkpoint=UNTIED)
TENSOR = mesh(2, **{TP: 2})
CONTEXT = mesh(2, **{CP: 2})
STAGES = mesh(2, **{PP: 2})
FOUR = mesh(4, **{TP: 2, PP: 2})
EIGHT = mesh(8, **{TP: 2, PP: 2, CP: 2})
DENSE = (
    attrs.evolve(TENSOR, checkpoint={}),
    parity_variant(TENSOR),
    CONTEXT,
    parity_variant(CONTEXT, spec={"use_sample_packing": False}),
    attrs.evolve(STAGES, checkpoint={}, spec={"use_sample_packing": False, "gradient_checkpointing": True}),
    parity_variant(STAGES),
    parity_variant(STAGES, checkpoint={}),
    parity_variant(STAGES, spec={"use_sample_packing": False, "gradient_checkpointing": True}),
    parity_variant(mesh(2, FOUR_LAYERS, num_layers_in_first_pipeline_stage=1, **{PP: 2})),
    mesh(2, FOUR_LAYERS, **{PP: 2, VPP: 2}),
    parity_variant(mesh(4, FOUR_LAYERS, **{PP: 4})),
    FOUR,
    parity_variant(EIGHT),
    parity_variant(EIGHT, checkpoint={}, spec={"gradient_checkpointing": True}),
)
EXPERTS = routed(4, **{TP: 2, PP: 2, EP: 2, ETP: 1})
SPARSE = (
    parity_variant(routed(1)),
    parity_variant(routed(1, DEEPSEEK)),
    parity_variant(routed(2, **{EP: 2})),
    parity_variant(routed(4, **{EP: 4})),
    parity_variant(routed(2, **{TP: 2})),
    parity_variant(routed(2, **{CP: 2})),
    routed(2, DEEPSEEK, **{TP: 2, EP: 2, ETP: 1}),
    EXPERTS,
    parity_variant(routed(8, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1})),
    parity_variant(routed(8, DEEPSEEK, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1})),
    parity_variant(routed(16, **{TP: 2, PP: 2, CP: 2, EP: 2, ETP: 2})),
)
IN_BFLOAT16 = (DATA, EXPERTS)
"""Variants on which `make test` measures the error in bfloat16. On the others only `make parity` does
(`tests/conftest.py`)."""


class TestMegatron(BackendConformance):
    backend = megatron
    options = MegatronOptions()
    variants = (ONE, *SETTINGS, DATA, *DENSE, *SPARSE)
    resumes = (
        (DATA, ONE),
        (parity_variant(ONE), TENSOR),
        (FOUR, DATA),
        (parity_variant(EIGHT), DATA),
        (EXPERTS, routed(2, **{CP: 2})),
        (parity_variant(EXPERTS), routed(1)),
        (parity_variant(routed(1)), EXPERTS),
    )
    tolerances = Tolerances(gradient=1e-5, weight=2e-5)
    preload = ("rl_megatron.rank.worker",)
