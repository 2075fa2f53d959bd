"""A real vLLM server passes the conformance suite of engines over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import attrs
import pytest

from rl_rollout.transports.files import FilesTransport
from rl_transformers.testing.inference import Bench, InferenceClientConformance, make_bench
from tests.rollout.vllm.servers import RunningServer, connect, publish

pytestmark = pytest.mark.slow


class TestVLLMServer(InferenceClientConformance):
    transport = FilesTransport(timeout_s=60.0)
    returns_kept_tokens = True

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, dense_server: RunningServer) -> Iterator[Bench]:
        """The bench of the shared server, with the model's own weights."""
        with asyncio.Runner() as runner:
            client = runner.run(connect(dense_server))
            bench = make_bench(client, cls.transport, dense_server.model_path, runner)
            version = runner.run(client.health()).version + 1
            tensors = {name: tensor.detach() for name, tensor in bench.model.named_parameters()}
            runner.run(publish(client, cls.transport, tensors, version))
            yield attrs.evolve(bench, version=version)
            runner.run(client.close())
