"""The interface between a worker and its parameters, which may be whole or sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.perturbation import Piece
from rl_transformers.rank.token_scorer import Scorer


class Shards(Protocol):
    """One rank's part of a scorer and of its optimizer. All methods are collective: all ranks must call them in the
    same order."""

    scorer: Scorer
    module: nn.Module
    """The module to call for scores: a wrapper that gathers the scorer's parameters, or the scorer itself."""
    optimizer: Any
    """The optimizer; None if the model is never trained."""

    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients: adds the gradient of one loss, the sum of all ranks' `loss`."""
        ...

    def let_go(self) -> None:
        """Frees parameters that scoring has gathered."""
        ...

    def has_gradients(self) -> bool:
        """Whether `backward` was called since the gradients were last cleared."""
        ...

    def step(self, settings: StepSettings) -> float:
        """Scales and clips the gradients, takes a step, and clears the gradients. Returns the global L2 norm of the
        scaled gradients before clipping.

        If the norm is not finite, only clears the gradients.
        """
        ...

    def clear_gradients(self) -> None:
        """Clears all gradients."""
        ...

    def exported(self, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields whole weights under Hugging Face names, in the compute dtype (a critic's head in its own dtype): all,
        or only those of `trained_units`. Only a few exist at a time."""
        ...

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Like `exported`, but without a critic's head."""
        ...

    def adapters(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole adapters under peft's names, in `dtype`; None: in the dtype in which they are trained."""
        ...

    def head(self) -> dict[str, Tensor]:
        """A critic's whole head, under the names in `HEAD_FILE`."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients under Hugging Face names, on the CPU; zeros for parameters without a gradient."""
        ...

    def state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Returns the state by name (`model/<name>`, `optimizer/<name>/<moment>`). Each value is a tensor, or an
        object that torch's distributed checkpoint format accepts in place of a tensor."""
        ...

    def take(self, state: Mapping[str, Any], *, with_optimizer: bool, steps_done: int) -> None:
        """Loads `state`, which was saved after `steps_done` optimizer steps."""
        ...

    def pieces(self) -> list[Piece]:
        """This rank's pieces of every trained parameter. The caller may change them in place, and must then call
        `take_pieces`."""
        ...

    def take_pieces(self) -> None:
        """Updates everything that is derived from the parameters. Called after `pieces` were changed in place."""
        ...

    def move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters (with their gradients) and optimizer state to `device`. Called only with an accelerator."""
        ...
