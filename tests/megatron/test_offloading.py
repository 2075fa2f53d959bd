"""Memory that is given back comes back with what was in it, and every view of it is whole again."""

from __future__ import annotations

import torch

from rl_megatron.rank.offloading import HostCopy


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
    assert gradients.equal(torch.zeros(5)), "what was only dropped is zero, as after a step"


def test_coming_back_twice_does_nothing():
    tensor, copy = torch.ones(3), HostCopy()
    copy.take_out([tensor])
    copy.bring_back()
    tensor += 1
    copy.bring_back()
    assert tensor.equal(torch.full((3,), 2.0))
