"""Sends weights through GPU memory shared by ranks and engines of one host (CUDA IPC).

This transport is for colocated training: an engine copies each bucket directly from the rank's GPU memory. Weights are
copied to host memory only to compute their checksums. A sync is not staged: engines load buckets as they arrive. At
most two buckets of a rank wait for engines at a time.

vLLM's own IPC transfer uses the same handles, but it needs all names and shapes before the first tensor, needs a client
of vLLM's server in the training rank, and does not report what arrived. So this transport sends handles and checksums
as messages through the sync's store (`transports.channel`), and uses vLLM only to load the weights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import Rendezvous, WeightTransport

if TYPE_CHECKING:
    from rl_rollout.transports.cuda_ipc_ends import CudaIpcSender


@attrs.frozen
class CudaIpcTransport(WeightTransport):
    """Implements `WeightTransport` between processes that can see the same GPUs."""

    timeout_s: float = 600.0
    """Seconds that a rank and an engine wait for each other's next message or bucket."""
    join_timeout_s: float = 30.0
    """Seconds that a rank, before it sends its first bucket, waits for all engines to join; see
    `BroadcastTransport`."""
    name: str = "cuda_ipc"
    is_staged: bool = False
    receiver: str = "rl_rollout.transports.cuda_ipc_ends:CudaIpcReceiver"

    def validate(self) -> None:
        """Raises ConfigError if CUDA is unavailable: torch was built without it, or this machine has no GPU and the run
        joins no Ray cluster."""
        import torch

        if torch.version.cuda is None:
            missing = f"this torch ({torch.__version__}) was built without CUDA"
        elif not torch.cuda.is_available() and "RAY_ADDRESS" not in os.environ:  # another node may have a GPU
            missing = "this machine has none"
        else:
            return
        raise ConfigError(
            f"cuda_ipc shares memory of NVIDIA GPUs, but {missing}; use shared_memory",
            key="generator.inference_engine.weight_sync_backend",
        )

    def validate_nodes(self, num_nodes: int) -> None:
        """Raises ConfigError if the policy trains on several machines, because they cannot share GPU memory."""
        if num_nodes > 1:
            raise ConfigError(
                f"cuda_ipc works only within one machine, but the policy trains on {num_nodes} machines "
                "(trainer.placement.policy_num_nodes): choose broadcast",
                key="generator.inference_engine.weight_sync_backend",
            )

    def open(self, *, num_ranks: int, num_engines: int) -> Rendezvous:
        """Starts the sync's store in this process, the controller, which may be on another host than ranks and engines.
        Raises ConfigError if CUDA is unavailable."""
        from rl_rollout.transports.broadcast import controller_address
        from rl_rollout.transports.channel import open_store

        self.validate()
        data = open_store(
            controller_address(),
            num_ranks=num_ranks,
            num_receivers=num_engines,
            timeout_s=self.timeout_s,
            join_timeout_s=self.join_timeout_s,
        )
        return Rendezvous(transport=self.name, receiver=self.receiver, data=data)

    def sender(self, rendezvous: Rendezvous, rank: int, world_size: int) -> CudaIpcSender:
        from rl_rollout.transports.cuda_ipc_ends import CudaIpcSender

        if world_size != rendezvous.data["num_ranks"]:
            raise WeightSyncError(f"the sync was opened for {rendezvous.data['num_ranks']} ranks, not {world_size}")
        return CudaIpcSender(rendezvous, rank)

    def close(self, rendezvous: Rendezvous) -> None:
        from rl_rollout.transports.channel import close_store

        close_store(rendezvous.data["port"])


cuda_ipc = CudaIpcTransport()
