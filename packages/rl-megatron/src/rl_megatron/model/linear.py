"""A linear layer whose weight is replicated on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class ReplicatedLinear(MegatronModule):
    """y = x Wᵀ on this rank's tokens, like Transformer Engine's `Linear` with `parallel_mode="duplicated"`.

    Under sequence parallelism every rank has different tokens, so the weight's gradients must be summed over tensor
    ranks; the attribute `sequence_parallel` makes Megatron do that.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        parallel_mode: str = "duplicated",
        bias: bool = False,
        **_unused: Any,
    ):
        super().__init__(config)
        assert parallel_mode == "duplicated"
        assert not bias
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Returns the product, and None for the bias."""
        return F.linear(input_, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the weight for a checkpoint, marked as replicated over tensor ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
