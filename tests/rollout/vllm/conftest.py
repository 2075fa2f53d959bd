"""One server per kind of model for the whole test run: it starts in about a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.rollout.vllm.servers import RunningServer, make_spec, start_servers, stop_servers, write_model


@pytest.fixture(scope="session")
def ray_for_servers() -> Iterator[None]:
    """Ray, which the tests of tests/ray may have started already."""
    if ray.is_initialized():
        yield
        return
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def dense_server(ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serves a tiny Qwen3 in float32; its run's transport is no installed one. Tests may publish weights, by any
    transport; each brings its own first."""
    directory = tmp_path_factory.mktemp("dense")
    transport = "tests.rollout.vllm.other_transport:other"
    running = start_servers(make_spec(write_model(directory / "model"), directory, weight_sync_backend=transport))
    yield running[0]
    stop_servers(running)


@pytest.fixture(scope="session")
def moe_server(ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serves a tiny Qwen3-MoE (8 experts, 2 per token) in float32 and returns routed experts."""
    directory = tmp_path_factory.mktemp("moe")
    spec = make_spec(write_model(directory / "model", num_experts=8), directory, enable_return_routed_experts=True)
    running = start_servers(spec)
    yield running[0]
    stop_servers(running)


@pytest.fixture(scope="session")
def adapter_server(ray_for_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serves adapters, two of them in a batch, over the frozen weights of a tiny Qwen3 in float32."""
    directory = tmp_path_factory.mktemp("adapters")
    lora = {"rank": 4, "merge_lora": False, "max_loras": 2}
    running = start_servers(make_spec(write_model(directory / "model"), directory, lora=lora))
    yield running[0]
    stop_servers(running)
