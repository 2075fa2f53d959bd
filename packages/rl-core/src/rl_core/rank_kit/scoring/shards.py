"""What a worker asks of the parameters it holds, whole or sharded, without knowing which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.perturbation import Piece
from rl_core.rank_kit.scoring.token_scorer import Scorer


class Shards(Protocol):
    """One rank's part of a scorer and of its optimizer. All methods are collective: every rank calls them in the same
    order."""

    scorer: Scorer
    module: nn.Module
    """What is called in place of the scorer: the wrapper that gathers its parameters, or the scorer itself."""
    optimizer: Any
    """None for a model that is never trained."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of the sum over all ranks of `loss`."""
        ...

    def let_go(self) -> None:
        """Frees what scoring has gathered."""
        ...

    def has_gradients(self) -> bool:
        """`backward` was called since the last step."""
        ...

    def step(self, settings: StepSettings) -> float:
        """Scales and clips the gradients, steps, and clears them; the global L2 norm before clipping.

        Where that is not finite, all but the last is left out.
        """
        ...

    def clear_gradients(self) -> None:
        """Clears all gradients."""
        ...

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names in the dtype that is computed in, whole, a few at a time."""
        ...

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Like `exported`, but without a critic's head."""
        ...

    def adapters(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """The adapters under peft's names, whole; None: in the dtype they are trained in."""
        ...

    def head(self) -> dict[str, Tensor]:
        """A critic's whole head, by the names in a model's files."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Whole, under Hugging Face names, on the CPU; zeros where there is none."""
        ...

    def state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """`model/<name>` and `optimizer/<name>/<moment>`: tensors, or what torch's distributed format takes for one."""
        ...

    def take(self, state: Mapping[str, Any], *, with_optimizer: bool, steps_done: int) -> None:
        """Continues with what was read into `state`, after so many optimizer steps."""
        ...

    def pieces(self) -> list[Piece]:
        """What this rank holds of every trained parameter, to be changed in place."""
        ...

    def take_pieces(self) -> None:
        """Continues with what `pieces` are now."""
        ...

    def move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        """To `device`: parameters with their gradients, and the optimizer's state. Only where there is an
        accelerator."""
        ...
