"""A critic: a language model whose output layer is replaced by one value per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor

from rl_core.rank_kit.model_files import read_head
from rl_megatron.place import pipeline_group


class ValueHead(torch.nn.Module):
    """Replaces Megatron's output layer: returns the hidden states unchanged, and holds the weights that turn them into
    values.

    A new head is zero, so all values are 0 before the first step, and initialisation is not random. Every tensor rank
    holds the whole head and all tokens, so the head's gradient is the same on each of them.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.is_sequence_parallel = model.config.sequence_parallel
        device = torch.cuda.current_device()
        self.value_head = torch.nn.Linear(model.config.hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Returns the hidden states of all tokens, and None for the bias."""
        if self.is_sequence_parallel:
            # Every tensor rank computes the same loss from all tokens, so gradients are split, not summed.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the head for a checkpoint, marked as replicated over tensor ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)


class ChunkValueScorer:
    """Computes for each token the value of the state before it. Like the token's log-prob, the value depends only on
    the tokens before it."""

    score_names = ("values",)

    def __init__(self, model: Any):
        self.head: torch.nn.Linear = model.output_layer.value_head

    def __call__(self, hidden_SH: Tensor, targets_S: Tensor, *, temperature: float) -> tuple[Tensor]:
        """Returns values [S] in float32, which depend neither on the targets nor on the temperature."""
        return (self.head(hidden_SH.to(self.head.weight.dtype)).squeeze(-1).float(),)


def put_heads(models: Sequence[Any]) -> None:
    """Replaces the output layer of the last stage's model by a value head."""
    for model in models:
        if model.post_process:
            model.output_layer = ValueHead(model)


def head_tensors(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the head's tensors on every rank; the last stage sends them to the others."""
    last = unwrap_model(list(chunks))[-1]
    group = pipeline_group()
    for name, shape in (("weight", (1, last.config.hidden_size)), ("bias", (1,))):
        if last.post_process:
            tensor = getattr(last.output_layer.value_head, name).data.float().clone()
        else:
            tensor = torch.empty(shape, device=torch.cuda.current_device())
        if group.size() > 1:
            dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        yield f"value_head.{name}", tensor


def load_head(models: Sequence[Any], directory: str, where: str) -> None:
    """Loads the value head from the base model's directory, if `save_model` wrote one there."""
    if not models[-1].post_process:
        return
    own = {f"value_head.{name}": weight for name, weight in models[-1].output_layer.value_head.named_parameters()}
    for name, weight in (read_head(directory, own, where) or {}).items():
        own[name].data.copy_(weight)
