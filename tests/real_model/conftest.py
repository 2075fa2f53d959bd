"""The model, its text and what transformers says of it: once per run."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from tests.real_model.real_text import plain_logprobs, real_model, real_sequences


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """What backends and engines are compared with."""

    model: Path
    sequences: list[list[int]]
    logprobs_T: Tensor
    """[2000] in float32."""


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Plain transformers in float32."""
    model = real_model()
    sequences = real_sequences(model)
    return Reference(model=model, sequences=sequences, logprobs_T=plain_logprobs(model, sequences, torch.float32))
