"""What the package's author runs. Not collected with this repository's tests: it is installed first."""

from __future__ import annotations

from pathlib import Path

import torch
from drop_box.transport import drop_box

from rl_core.interfaces import Rendezvous
from rl_core.testing.transports import WeightTransportConformance


class TestDropBox(WeightTransportConformance):
    transport = drop_box

    def damage(self, rendezvous: Rendezvous) -> bool:
        file = Path(rendezvous.data["folder"], "0.pt")
        content = torch.load(file, weights_only=True)
        data = next(data for *_, data in content["buckets"] if len(data))
        data[0] ^= 1
        torch.save(content, file)
        return True
