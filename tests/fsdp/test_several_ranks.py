"""Several ranks against one: the same suite, sharded in every way that the backend offers."""

from __future__ import annotations

from rl_core.testing.backend import BackendConformance, Variant
from rl_fsdp import FsdpOptions, fsdp

UNTIED = {"tie_word_embeddings": False}
UNPACKED = {"use_sample_packing": False}
class TestFsdp(BackendConformance):
    backend = fsdp
    options = FsdpOptions()
    preload = ("rl_fsdp.worker",)
    variants = (
    Variant(world_size=2, checkpoint=UNTIED),
    Variant(world_size=2, checkpoint=UNTIED, spec=UNPACKED),
    Variant(world_size=2, checkpoint=UNTIED, spec={"gradient_checkpointing": True}),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(fsdp_size=1)),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(fsdp_size=2)),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(reshard_after_forward=False)),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(cpu_offload=True)),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=2)),
    Variant(world_size=2, options=FsdpOptions(sequence_parallel_size=2)),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=2), spec=UNPACKED),
    Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=2), spec={"gradient_checkpointing": True}),
    Variant(world_size=4, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=2, fsdp_size=2)),
    Variant(world_size=4, checkpoint=UNTIED, options=FsdpOptions(sequence_parallel_size=4)),
    Variant(world_size=4),
)
