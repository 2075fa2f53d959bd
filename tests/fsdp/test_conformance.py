"""FSDP2 and FSDP1 pass the suite that every backend must pass.

All checks run with parameters sharded over two ranks, and for FSDP2 also with Ulysses and with routed experts. All
other variants run only the checks behind `docs/parity.md`. `make test` leaves out the variants made by
`parity_variant`; `make parity` runs all variants.
"""

from __future__ import annotations

from typing import Any

import attrs

from rl_fsdp import FsdpOptions, fsdp, fsdp1
from rl_transformers.testing import VARIANTS, BackendConformance, Variant
from rl_transformers.testing.cases import OPTIMIZER

PADDED = {"use_sample_packing": False}
RECOMPUTED, SELECTIVE = {"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}
UNTIED = {"tie_word_embeddings": False}
FULL = Variant(world_size=2, checkpoint=UNTIED)
REPLICAS = Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(fsdp_size=1), parity_only=True)
ULYSSES = Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=2))
FOUR = Variant(world_size=4, checkpoint=UNTIED, options=FsdpOptions(fsdp_size=2), parity_only=True)
SHARED = {"share_prefixes": True}
ONE = Variant(checkpoint=UNTIED, parity_only=True)


def parity_variant(variant: Variant, **changes: Any) -> Variant:
    """A variant that only `make parity` runs."""
    return attrs.evolve(variant, parity_only=True, marks=("parity",), **changes)


MOE = {"family": "qwen3_moe"}
FOLLOWING = {"moe_enable_routing_replay": True}
DENSE_FIRST = MOE | {"num_hidden_layers": 3, "mlp_only_layers": [0]}


def experts(world_size: int, **options: Any) -> list[Variant]:
    """Variants of Qwen3-MoE: the routers' own choices and forced routes, each packed, and each padded with
    recomputation."""
    own = Variant(world_size=world_size, checkpoint=MOE, options=FsdpOptions(**options), parity_only=True)
    forced = attrs.evolve(own, options=FsdpOptions(**FOLLOWING, **options), forced_routes=True)
    return [
        own,
        forced,
        parity_variant(own, spec=PADDED | RECOMPUTED),
        parity_variant(forced, spec=PADDED | RECOMPUTED, checkpoint=DENSE_FIRST),
    ]


FORCED = 1
"""Index into `experts` of the variant that detects sharding errors. The other variants test routers, which do not
depend on the sharding mode."""
ROUTED = Variant(checkpoint=DENSE_FIRST, options=FsdpOptions(**FOLLOWING), forced_routes=True, spec=RECOMPUTED)
"""Two ranks run all checks on this variant, a single rank only the parity checks."""


def mixtures(variant: Variant) -> list[Variant]:
    """Tied embeddings, padding and recomputation all at once; for `make parity` also each of them alone, and the last
    two together."""
    differences = ({"checkpoint": {}}, {"spec": PADDED}, {"spec": RECOMPUTED}, {"spec": PADDED | RECOMPUTED})
    all_at_once = attrs.evolve(variant, parity_only=True, checkpoint={}, spec=PADDED | RECOMPUTED)
    return [all_at_once, *(parity_variant(variant, **difference) for difference in differences)]


MUON = [
    parity_variant(variant, spec={"optimizer": attrs.evolve(OPTIMIZER, name="muon")})
    for variant in (ONE, FULL, attrs.evolve(FOUR, options=FsdpOptions()))
]
"""Muon, whose matrices are gathered, on one, two and four ranks."""


IN_BFLOAT16 = (FULL, ULYSSES, attrs.evolve(ROUTED, world_size=2))
"""Variants on which `make test` measures the error in bfloat16. On the others only `make parity` does
(`tests/conftest.py`)."""


class TestFsdp(BackendConformance):
    backend = fsdp
    options = FsdpOptions()
    variants = (
        ONE,
        *(parity_variant(variant) for variant in VARIANTS if variant.checkpoint != UNTIED),
        FULL,
        *mixtures(FULL),
        parity_variant(FULL, options=FsdpOptions(fsdp_size=2)),
        parity_variant(FULL, options=FsdpOptions(reshard_after_forward=False)),
        attrs.evolve(FULL, options=FsdpOptions(cpu_offload=True), parity_only=True),
        REPLICAS,
        ULYSSES,
        *mixtures(ULYSSES),
        FOUR,
        parity_variant(FOUR, options=FsdpOptions()),
        attrs.evolve(FULL, spec=SHARED | SELECTIVE, parity_only=True),
        attrs.evolve(ULYSSES, spec=SHARED, parity_only=True),
        parity_variant(ONE, spec=SHARED),
        parity_variant(FOUR, spec=SHARED),
        attrs.evolve(FOUR, options=FsdpOptions(fsdp_size=2, sequence_parallel_size=2)),
        parity_variant(FOUR, options=FsdpOptions(sequence_parallel_size=4)),
        attrs.evolve(ROUTED, parity_only=True),
        attrs.evolve(ROUTED, world_size=2),
        *experts(2),
        parity_variant(experts(2, fsdp_size=1)[FORCED]),
        experts(2, sequence_parallel_size=2)[FORCED],
        attrs.evolve(experts(2)[FORCED], spec=SHARED),
        parity_variant(ROUTED, world_size=4, options=FsdpOptions(fsdp_size=2, **FOLLOWING)),
        parity_variant(ROUTED, world_size=2, spec=SELECTIVE),
        parity_variant(ULYSSES, spec=SELECTIVE),
        *MUON,
        parity_variant(MUON[2], options=FsdpOptions(fsdp_size=2)),
        parity_variant(MUON[1], checkpoint=MOE),
        *(parity_variant(variant, spec={"optimizer": attrs.evolve(OPTIMIZER, name="adafactor")}) for variant in MUON),
    )
    resumes = (
        *((FULL, ONE), (FULL, FOUR), (ONE, FULL), (FOUR, FULL), (FULL, ULYSSES)),
        *((MUON[1], MUON[0]), (MUON[1], MUON[2]), (MUON[0], MUON[1])),
    )
    preload = ("rl_fsdp.worker", "rl_fsdp.sharding", "rl_fsdp.fsdp1")


class TestFsdp1(BackendConformance):
    backend = fsdp1
    options = FsdpOptions()
    variants = (
        ONE,
        FULL,
        *mixtures(FULL),
        parity_variant(FULL, options=FsdpOptions(reshard_after_forward=False)),
        attrs.evolve(ULYSSES, parity_only=True),
        parity_variant(FOUR),
        parity_variant(FULL, spec=SHARED),
        parity_variant(FULL, spec=SELECTIVE),
        experts(2)[FORCED],
        *MUON[1:],
        parity_variant(MUON[1], checkpoint=MOE),
    )
    resumes = (
        *((FULL, ONE), (FULL, parity_variant(FOUR)), (ONE, FULL)),
        *((MUON[1], MUON[0]), (MUON[1], MUON[2]), (MUON[0], MUON[1])),
    )
    preload = ("rl_fsdp.worker", "rl_fsdp.sharding", "rl_fsdp.fsdp1")
