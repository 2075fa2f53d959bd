"""Megatron passes the suite that every backend must pass, on every kind of mesh that it offers."""

from __future__ import annotations

from rl_core.testing import VARIANTS, BackendConformance, Variant
from rl_megatron import MegatronOptions, megatron

UNTIED = {"tie_word_embeddings": False}


def mesh(world_size: int, **options: int) -> Variant:
    """Untied embeddings on this mesh."""
    return Variant(world_size=world_size, checkpoint=UNTIED, options=MegatronOptions(**options))


DATA = Variant(world_size=2, checkpoint=UNTIED)
TENSOR = mesh(2, tensor_model_parallel_size=2)
PIPELINE = mesh(2, pipeline_model_parallel_size=2)
CONTEXT = mesh(2, context_parallel_size=2)


class TestMegatron(BackendConformance):
    backend = megatron
    options = MegatronOptions()
    variants = (*VARIANTS, DATA, TENSOR, PIPELINE, CONTEXT)
    preload = ("rl_megatron.worker",)
    timeout_s = 120.0
