"""DeepSpeed passes the suite that every backend must pass: all ZeRO stages, offloading, Ulysses, router replay."""

from __future__ import annotations

from typing import Any

import attrs

from rl_deepspeed import DeepSpeedOptions, OffloadOptimizer, OffloadParam, ZeroOptimization, deepspeed
from rl_transformers.testing.backend import BackendConformance, Variant

PADDED = {"use_sample_packing": False}
RECOMPUTED = {"gradient_checkpointing": True}
UNTIED = {"tie_word_embeddings": False}
MOE = {"family": "qwen3_moe"}


def zero(stage: int, *, others: dict[str, Any] | None = None, **settings: Any) -> DeepSpeedOptions:
    """Options with buckets so small that even tiny models fill several."""
    settings = {"reduce_bucket_size": 5_000, "stage3_param_persistence_threshold": 100} | settings
    return DeepSpeedOptions(zero_optimization=ZeroOptimization(stage=stage, **settings), **(others or {}))  # pyright: ignore[reportArgumentType]


def parity_variant(variant: Variant, **changes: Any) -> Variant:
    """A variant that only `make parity` runs, and only with the checks behind docs/parity.md."""
    return attrs.evolve(variant, parity_only=True, marks=("parity",), **changes)


def whole(variant: Variant) -> Variant:
    """A variant with every check. Only `make parity` runs it, because each start of DeepSpeed takes seconds."""
    return attrs.evolve(variant, marks=("parity",))


ON_CPU = {"offload_optimizer": OffloadOptimizer(device="cpu")}
ALL_ON_CPU = {"offload_param": OffloadParam(device="cpu"), **ON_CPU}
ULYSSES = {"sequence_parallel_size": 2}
ONE = Variant(checkpoint=UNTIED, options=zero(3))
TWO = {stage: Variant(world_size=2, checkpoint=UNTIED, options=zero(stage)) for stage in (1, 2, 3)}
FOUR = Variant(world_size=4, checkpoint=UNTIED, options=zero(3))
BRIEFLY = attrs.evolve(TWO[3], checkpoint={}, spec=PADDED | RECOMPUTED, parity_only=True)
"""The variant that `make test` runs: stage 3 with tied embeddings, padding and recomputation."""
ROUTED = Variant(
    world_size=2,
    checkpoint=MOE,
    options=zero(3, others={"moe_enable_routing_replay": True}),
    forced_routes=True,
)


class TestDeepSpeed(BackendConformance):
    backend = deepspeed
    options = DeepSpeedOptions()
    variants = (
        BRIEFLY,
        whole(ONE),
        *(whole(variant) for variant in TWO.values()),
        *(parity_variant(TWO[stage], options=zero(stage, **ON_CPU)) for stage in (1, 2, 3)),
        parity_variant(TWO[3], options=zero(3, **ALL_ON_CPU)),
        parity_variant(TWO[2], checkpoint={}, spec=PADDED | RECOMPUTED),
        *(parity_variant(TWO[stage], options=zero(stage, others=ULYSSES)) for stage in (2, 3)),
        parity_variant(ONE, options=zero(1)),
        parity_variant(FOUR),
        parity_variant(FOUR, options=zero(1)),
        parity_variant(TWO[3], spec={"share_prefixes": True}),
        parity_variant(TWO[2], spec={"gradient_checkpointing": "selective"}),
        parity_variant(TWO[2], spec={"share_prefixes": True}, options=zero(2, others=ULYSSES)),
        parity_variant(ROUTED),
    )
    resumes = tuple(
        (attrs.evolve(a, marks=("parity",)), attrs.evolve(b, marks=("parity",)))
        for a, b in ((TWO[3], ONE), (ONE, TWO[1]), (TWO[2], FOUR), (FOUR, TWO[3]))
    )
    preload = ("rl_deepspeed.worker",)
