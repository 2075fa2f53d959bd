"""Checks, for any backend, that tensors that are not trained are in a saved model unchanged."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rl_core.interfaces import Backend, Worker
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Case
from rl_transformers.testing.ranks import RankGroup

EXTRA = {"mtp.fc.weight": torch.ones(2, 3), "model.layers.9.mlp.up_proj.weight": torch.ones(2, dtype=torch.bfloat16)}


def require_kept_extras(case: Case, backend: Backend, world_size: int) -> None:
    """Adds tensors to the case's checkpoint, trains one step on it, and requires that they are saved unchanged."""
    file = Path(str(case.spec.model.path)) / "model.safetensors"
    before = load_file(file)
    save_file(before | EXTRA, file, {"format": "pt"})
    group = RankGroup(backend, case.spec, world_size, directory=case.directory, timeout_s=240)
    case.started.append(group)
    group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    group.optim_step()
    group.call(Worker.save_model, case.directory / "saved")
    after = load_file(case.directory / "saved" / "model.safetensors")
    assert after.keys() == before.keys() | EXTRA.keys()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in EXTRA.items())
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
