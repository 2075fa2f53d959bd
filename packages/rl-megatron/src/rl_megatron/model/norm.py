"""RMS norm that works under sequence parallelism without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_core.errors import ConfigError


class RmsNorm(torch.nn.Module):
    """y = x / sqrt(mean(x²) + eps) · w over the last axis (Zhang & Sennrich 2019, arXiv 1910.07467).

    Megatron's own norm refuses sequence parallelism. There each tensor rank has different tokens, so the weight's
    gradients must be summed over the tensor ranks; the attribute `sequence_parallel` makes Megatron do that.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"the model uses {config.normalization}, but without Transformer Engine only RMSNorm is supported; "
                "install Transformer Engine (docs/install_gpu.md)"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns a tensor of the same shape."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class LatentNorm(RmsNorm):
    """Norm of the latents in DeepSeek's attention; in transformers its eps is 1e-6 whatever the configuration says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any):
        super().__init__(config, hidden_size)
