"""The keys of `generator.inference_engine` that only vLLM engines read. Imports neither vllm nor torch."""

from __future__ import annotations

from typing import Literal

import attrs

from rl_core.interfaces import above, at_least, between


@attrs.frozen(kw_only=True)
class VLLMOptions:
    """vLLM servers: how each is split over devices, how it computes, where it listens, and when it is given up."""

    tensor_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Ranks of an engine that split every layer."""
    pipeline_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Pipeline stages of an engine; each has a part of the layers."""
    data_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Data-parallel copies of the model in one engine."""
    expert_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Ranks that split the experts; 1, or tensor_parallel_size × data_parallel_size."""
    max_num_batched_tokens: int = attrs.field(default=8192, validator=at_least(1))
    """Maximum number of tokens that an engine computes in one step."""
    enable_prefix_caching: bool = True
    """Reuse the key-value cache of a prefix that an earlier request shares."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks, batched with other requests' tokens."""
    enforce_eager: bool | None = None
    """True: no compilation and no CUDA graphs. None: compiled on GPUs, eager on CPUs."""
    gpu_memory_utilization: float = attrs.field(default=0.8, validator=between(0, 1))
    """Fraction of a GPU's memory that an engine takes; ignored without a GPU."""
    served_model_name: str | None = None
    """The model's name in the OpenAI API; None: `trainer.policy.model.path`."""
    fully_sharded_loras: bool = False
    """Split both matrices of an adapter over the tensor-parallel ranks, not only one of them. This applies to adapters
    that are sent without the model."""
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = None
    """How an engine runs its ranks; None: processes of one machine, or Ray where one machine is too small."""
    external_server_urls: tuple[str, ...] | None = None
    """URLs of servers started outside the run (`python -m rl_rollout.vllm.serve`); num_engines must equal the number of
    URLs."""
    host: str | None = None
    """Address that servers listen on. None: loopback, or all addresses of the machine if Ray has several machines."""
    router_port: int | None = attrs.field(default=None, validator=between(0, 65535))
    """Port at which OpenAI's API is served to agents outside the run; 0: a free port; None: agents are not served. It
    is a port of `host` or, if external_server_urls is set, of loopback. Agents authenticate with the token in
    RL_SERVER_TOKEN or, if that is not set, in `<run_dir>/agents_token`."""
    start_timeout_s: float = attrs.field(default=600.0, validator=above(0))
    """Longest wait for a server to be ready."""
    heartbeat_interval_s: float = attrs.field(default=5.0, validator=above(0))
    """Seconds between two health checks of a server."""
    hung_after_s: float = attrs.field(default=60.0, validator=above(0))
    """Seconds without an answer to a health check after which a server is given up."""
