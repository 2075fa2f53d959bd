"""A critic: a Hugging Face base model with a linear head that gives one value per token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_core.rank_kit.model_files import read_head
from rl_transformers.kept_tensors import KeptTensors
from rl_transformers.rank.lora import Making, as_they_are
from rl_transformers.rank.micro_batch import ModelInput, predicting_states
from rl_transformers.rank.rank_mesh import whole
from rl_transformers.rank.weights import exported_weights, trained_or_all


class ValueScorer(nn.Module):
    """Predicts for each token the value of the state before the token, from the hidden state that predicts the token.

    A new head is zero. The first advantages therefore equal the returns, the first gradient of the base model is zero,
    and initialisation is not random.
    """

    score_names = ("values",)
    choices = None
    """A critic always chooses its own experts, because recorded routes are the policy's."""
    kept = KeptTensors(files={})
    """A saved critic has a value head in place of the checkpoint's output layer, and no other tensors."""

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
        """Values [S] of a micro-batch, float32 (float64 for a float64 model). Ignores the temperature."""
        hidden_SH = predicting_states(self.model, inputs, self.compute_dtype)
        head = self.value_head
        # A sharding wrapper attaches a backward hook to the result, so the result must not be a view, such as the
        # head's squeezed output [S, 1]. The product with the head's only row is not a view.
        dtype = torch.promote_types(torch.float32, head.weight.dtype)
        return (hidden_SH.to(dtype) @ head.weight[0].to(dtype) + head.bias.to(dtype),)

    def named_weights(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters in a saved state, of the base model and of the head: see `trained_or_all`."""
        return trained_or_all([*self.model.named_parameters(), *head_tensors(self).items()])

    def exported_weights(
        self, making: Making = as_they_are, *, only_trained: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The base model under the names of a Hugging Face checkpoint, in `compute_dtype`, and the head in the dtype in
        which it is trained."""
        yield from exported_weights(self.model, self.compute_dtype, making, only_trained=only_trained)
        for name, weight in self.value_head.named_parameters():
            yield f"value_head.{name}", whole(making([weight], weight.detach))


def head_tensors(scorer: ValueScorer) -> dict[str, nn.Parameter]:
    """The head's parameters, or their shards on this rank, under the names in `HEAD_FILE`."""
    return {f"value_head.{name}": weight for name, weight in scorer.value_head.named_parameters()}


def load_head(scorer: ValueScorer, directory: str, where: str) -> None:
    """Loads the head that `save_model` wrote, if the directory of the base model has one."""
    expected = head_tensors(scorer)
    head = read_head(directory, expected, where)
    if head is None:
        return
    with torch.no_grad():
        for name, weight in expected.items():
            weight.copy_(head[name])
