"""CUDA IPC is refused with a clear error without a GPU; with a GPU it carries weights to two other processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import Manifest, Rendezvous
from rl_core.rank_kit.weight_buckets import pack_buckets, require_same, tensor_record, unpack_bucket
from rl_core.testing.transports import sample_tensors
from rl_rollout.transports.channel import Channel, close_store, open_store
from rl_rollout.transports.cuda_ipc import cuda_ipc
from rl_rollout.transports.cuda_ipc_ends import CudaIpcReceiver, CudaIpcSender

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the errors of a machine without a GPU")


@pytest.fixture
def rendezvous():
    """A rendezvous that both sides accept, made without `open`, which needs a GPU."""
    data = open_store("127.0.0.1", num_ranks=1, num_receivers=1, timeout_s=120.0, join_timeout_s=120.0)
    yield Rendezvous(transport="cuda_ipc", receiver="", data=data)
    close_store(data["port"])


@without_gpu
def test_without_cuda_the_error_names_a_transport_to_use():
    with pytest.raises(
        ConfigError, match=r"weight_sync_backend: cuda_ipc .* was built without CUDA; use shared_memory"
    ):
        cuda_ipc.open(num_ranks=1, num_engines=1)


@without_gpu
def test_weights_on_the_cpu_are_drained_and_refused_with_a_message_to_the_receivers(rendezvous):
    channel = Channel(rendezvous.data)
    channel.register_receiver({"version": 0})
    buckets = pack_buckets(sample_tensors().items(), 64)
    with pytest.raises(WeightSyncError, match="shares GPU memory, but the weights are on the cpu; use shared_memory"):
        CudaIpcSender(rendezvous, 0).send(buckets, 0)
    assert next(buckets, None) is None, "the buckets must be drained, or the other ranks would wait for this one"
    assert channel.read(0)["kind"] == "failed"


@without_gpu
def test_an_engine_without_a_gpu_is_refused(rendezvous):
    with pytest.raises(WeightSyncError, match="reached an engine without a GPU"):
        list(CudaIpcReceiver(rendezvous).receive(0))


def receive_on_gpu(rendezvous: Rendezvous, version: int) -> Manifest:
    buckets = CudaIpcReceiver(rendezvous).receive(version)
    tensors = {name: tensor_record(tensor) for bucket in buckets for name, tensor in unpack_bucket(bucket)}
    return Manifest(version=version, tensors=tensors)


@pytest.mark.gpu
def test_two_engines_copy_what_a_rank_shares():
    rendezvous = cuda_ipc.open(num_ranks=1, num_engines=2)
    on_gpu = [(name, tensor.cuda()) for name, tensor in sample_tensors().items()]
    with (
        ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as engines,
        ThreadPoolExecutor(1) as rank,
    ):
        receiving = [engines.submit(receive_on_gpu, rendezvous, 3) for _ in range(2)]
        sending = rank.submit(cuda_ipc.sender(rendezvous, 0, 1).send, pack_buckets(on_gpu, 64), 3)
        for engine in receiving:
            require_same(sending.result(120), engine.result(120))
    cuda_ipc.close(rendezvous)
