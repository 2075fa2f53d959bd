"""What vLLM gets wrong about loading weights again, repaired. Imported in every worker, before it loads its model.

Each fix names version and fault, says when it can go, and fails loudly where vLLM no longer has what it wraps.
"""

from __future__ import annotations

import functools
from typing import Any

from rl_core.errors import WeightSyncError

_MARK = "_rl_repacks_experts"


def apply() -> None:
    """Applies all fixes; a second call does nothing."""
    repack_moe_experts_on_cpu()


def repack_moe_experts_on_cpu() -> None:
    """vllm 0.30.0, fused_moe/unquantized_fused_moe_method.py: on CPU every reload leaves the old experts in place.

    The CPU kernel computes with a packed copy of the experts, which `_setup_kernel` makes on the first load only, so a
    reload reports success and log-probs are off by nats. Here it packs again on every later load.
    Shown by tests/rollout/vllm/test_weights.py::test_moe_five_syncs_pass_and_without_the_moe_fix_verification_fails.
    Can go when that fails.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if original is None:
        raise WeightSyncError(
            "this version of vLLM has no UnquantizedFusedMoEMethod._setup_kernel: whether it packs MoE experts again "
            "when weights are reloaded is not known; use vllm 0.30"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_reload and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_kernel, _MARK, True)
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def repack_tied_heads_on_cpu(model: Any) -> None:
    """vllm 0.30.0, model_loader/reload: on CPU every reload leaves a tied output layer with the old weights.

    It shares the embedding's tensor, so no weight comes for it and a reload passes it over; but the CPU kernel computes
    with a packed copy, made on the first load only. To be called after every reload.
    Shown by tests/rollout/vllm/test_server_conformance.py::TestVLLMServer::test_new_weights_are_served_and_named, whose
    model is tied. Can go when that passes without.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads: list[Any] = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


def undo_repack_moe_experts_on_cpu() -> None:
    """Takes the fix away: how a test shows that it is still needed."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup_kernel: Any = UnquantizedFusedMoEMethod._setup_kernel
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel.__wrapped__
