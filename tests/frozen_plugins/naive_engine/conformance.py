"""What the package's author runs. Not collected with this repository's tests: it is installed first."""

from __future__ import annotations

import pytest
from naive_engine.engine import NaiveEngine
from naive_engine.plugin import naive

from rl_core.config import from_mapping
from rl_core.errors import ConfigError
from rl_core.interfaces import InferenceClient, InferencePlugin
from rl_core.testing.inference import InferenceClientConformance
from rl_core.testing.reference_transport import MemoryTransport


class TestNaiveEngine(InferenceClientConformance):
    transport = MemoryTransport()

    async def create_client(self, model_path: str) -> InferenceClient:
        return NaiveEngine.from_checkpoint(model_path)


def test_the_plug_in_refuses_what_the_engine_cannot_do():
    assert isinstance(naive, InferencePlugin)
    naive.validate(from_mapping({}))
    with pytest.raises(ConfigError, match="num_engines: 2"):
        naive.validate(from_mapping({"generator.inference_engine.num_engines": 2}))
