"""Which device copies go through page-locked memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_core.rank_kit.device_copies import is_pinned_first, on_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_only_copies_from_host_memory_to_a_gpu_are_pinned():
    tensor = torch.arange(3)
    assert is_pinned_first(tensor, GPU)
    assert is_pinned_first(tensor, torch.device("cuda", 1))
    assert not is_pinned_first(tensor, CPU)
    assert not is_pinned_first(tensor, torch.device("meta"))
    assert not is_pinned_first(torch.empty(0), GPU)
    assert not is_pinned_first(torch.empty(3, device="meta"), GPU)
    with FakeTensorMode():
        assert not is_pinned_first(torch.empty(3), GPU)


def test_a_tensor_already_on_the_device_is_not_copied():
    tensor = torch.arange(3)
    assert on_device(tensor, CPU) is tensor


@pytest.mark.gpu
def test_copies_are_correct_although_their_sources_are_freed_at_once():
    busy = torch.randn(4096, 4096, device=GPU)
    for _ in range(20):
        busy = busy @ busy
    copies = [on_device(torch.full((1 << 20,), number), GPU) for number in range(8)]
    assert [int(copy.min()) == int(copy.max()) == number for number, copy in enumerate(copies)] == [True] * 8
