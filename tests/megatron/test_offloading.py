"""Offloaded tensors return with their contents, dropped ones with zeros, and every view is valid again."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from rl_core.interfaces import Worker
from rl_core.testing.tensors import require_equal
from rl_megatron import MegatronOptions
from rl_megatron.rank.offloading import HostCopy
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Variant, open_case
from rl_transformers.testing.rank_process import SuiteHost
from tests.megatron.probes import probed

PRELOADED["rl_megatron.rank.worker"] = None


def test_views_of_one_memory_are_copied_once_and_stay_valid():
    buffer, gradients = torch.arange(12.0), torch.ones(5)
    views = [buffer[:4].view(2, 2), buffer[4:]]
    copy = HostCopy()
    copy.take_out(views, [gradients])
    assert copy.is_out
    assert buffer.untyped_storage().size() == gradients.untyped_storage().size() == 0
    copy.bring_back()
    assert not copy.is_out
    assert views[0].tolist() == [[0, 1], [2, 3]]
    assert views[1].equal(torch.arange(4.0, 12.0))
    assert gradients.equal(torch.zeros(5)), "memory that was dropped without a copy must be zero, as after a step"


def test_bringing_tensors_back_a_second_time_does_nothing():
    tensor, copy = torch.ones(3), HostCopy()
    copy.take_out([tensor])
    copy.bring_back()
    tensor += 1
    copy.bring_back()
    assert tensor.equal(torch.full((3,), 2.0))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_offloading_the_optimizer_keeps_the_models_parameters(tmp_path: Path, bf16: bool):
    """In float32 the optimizer's parameters are views of the model's parameters, which stay in use; in bfloat16 they
    are copies and are offloaded."""
    weights = []
    with open_case(probed, MegatronOptions(), Variant(), tmp_path, timeout_s=120) as case:
        for leaves in (False, True):
            group = case.start(attrs.evolve(case.spec, bf16=bf16))
            before = group.weights()
            ((parameter_bytes, optimizer_bytes),) = group.call(SuiteHost.ask, "bytes_of_parameters_and_optimizer")
            assert optimizer_bytes > 0
            if leaves:
                group.call(SuiteHost.ask, "give_back_optimizer")
                assert group.call(SuiteHost.ask, "bytes_of_parameters_and_optimizer") == [(parameter_bytes, 0)]
                require_equal(group.weights(), before, "while the optimizer is out")
            group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
            group.call(Worker.onload, parameters=False, optimizer=True)
            group.call(Worker.optim_step)
            weights.append(group.weights())
            group.close()
    require_equal(weights[1], weights[0], "after a step whose gradient was taken while the optimizer was out")
