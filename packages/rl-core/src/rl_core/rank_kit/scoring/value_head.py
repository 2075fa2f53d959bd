"""A critic: a Hugging Face base model with a linear head that gives one value per token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.rank_kit.model_files import read_head
from rl_core.rank_kit.scoring.lora import Making, as_they_are
from rl_core.rank_kit.scoring.micro_batch import ModelInput, predicting_states
from rl_core.rank_kit.scoring.rank_mesh import whole
from rl_core.rank_kit.scoring.weights import exported_weights, state_weights


class ValueScorer(nn.Module):
    """The value of the state in which each token is chosen: predicted from the tokens before it, as its log-prob is.

    The head starts at zero, so the first advantages are the plain returns and the first optimizer step moves the head
    only; nothing about it is random.
    """

    score_names = ("values",)
    choices = None
    """Routes are the policy's."""

    def __init__(self, model: PreTrainedModel, *, compute_dtype: torch.dtype):
        super().__init__()
        self.model = model.eval()
        self.compute_dtype = compute_dtype
        parameter = next(model.parameters())
        dtype = torch.promote_types(torch.float32, parameter.dtype)
        size = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(size, 1, device=parameter.device, dtype=dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, inputs: ModelInput, *, temperature: float) -> tuple[Tensor]:
        """Values [S], float32 (float64 for a float64 model) of a micro-batch; a value knows no temperature."""
        hidden_SH = predicting_states(self.model, inputs, self.compute_dtype)
        head = self.value_head
        # Not a view of [S, 1]: a sharding wrapper hooks its gathering for backward to this very tensor.
        dtype = torch.promote_types(torch.float32, head.weight.dtype)
        return (hidden_SH.to(dtype) @ head.weight[0].to(dtype) + head.bias.to(dtype),)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that a state holds: the base model's (or its adapters') and the head's."""
        yield from state_weights(self.model)
        for name, weight in self.value_head.named_parameters():
            yield f"value_head.{name}", weight

    def exported_weights(self, making: Making = as_they_are) -> Iterator[tuple[str, Tensor]]:
        """The base model under the names of its own checkpoint, in `compute_dtype`; the head as it is computed with."""
        yield from exported_weights(self.model, self.compute_dtype, making)
        for name, weight in self.value_head.named_parameters():
            yield f"value_head.{name}", whole(making([weight], weight.detach))


def head_tensors(scorer: ValueScorer) -> dict[str, Tensor]:
    """The head's parameters, or what stands for them on this rank, by the names in a model's files."""
    return {f"value_head.{name}": weight for name, weight in scorer.value_head.named_parameters()}


def load_head(scorer: ValueScorer, directory: str, where: str) -> None:
    """Takes the head that `save_model` wrote, where the directory of the base model has one."""
    expected = head_tensors(scorer)
    head = read_head(directory, expected, where)
    if head is None:
        return
    with torch.no_grad():
        for name, weight in expected.items():
            weight.copy_(head[name])
