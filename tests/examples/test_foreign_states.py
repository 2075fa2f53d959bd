"""A training backend refuses a state that another backend wrote, and keeps its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.errors import CheckpointError
from rl_core.interfaces import Worker
from rl_core.testing.tensors import require_equal
from rl_fsdp import FsdpOptions, fsdp
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import train_and_save
from rl_transformers.testing.cases import Variant, open_case
from rl_transformers.testing.ranks import RankGroup

BACKENDS: dict[str, tuple[Any, Any]] = {"fsdp": (fsdp, FsdpOptions()), "megatron": (megatron, MegatronOptions())}


@pytest.mark.parametrize(("writer", "reader"), [("megatron", "fsdp"), ("fsdp", "megatron")])
def test_a_state_of_the_other_backend_is_a_checkpoint_error(tmp_path: Path, writer: str, reader: str):
    backend, options = BACKENDS[writer]
    with open_case(backend, options, Variant(), tmp_path, timeout_s=120) as case:
        train_and_save(case, case.directory / "state")
        backend, options = BACKENDS[reader]
        spec = attrs.evolve(case.spec, options=options)
        group = RankGroup(backend, spec, 1, directory=case.directory, timeout_s=120)
        case.started.append(group)
        before = group.weights()
        with pytest.raises(CheckpointError, match="state: "):
            group.call(Worker.load_state, case.directory / "state")
        require_equal(group.weights(), before, "after another backend's state was refused")
