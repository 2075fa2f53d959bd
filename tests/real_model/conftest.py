"""The model, its text, and the log-probs of transformers, prepared once per run."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from tests.real_model.real_text import plain_logprobs, real_model, real_sequences


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """The model, its input, and the log-probs that backends must compute."""

    model: Path
    sequences: list[list[int]]
    logprobs_T: Tensor
    """Log-probs of all scored tokens, in float32: [2000]."""


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The reference of plain transformers in float32."""
    model = real_model()
    sequences = real_sequences(model)
    return Reference(model=model, sequences=sequences, logprobs_T=plain_logprobs(model, sequences, torch.float32))
