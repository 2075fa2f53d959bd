"""The keys of `generator.inference_engine` that only this engine reads. Imports neither vllm nor torch."""

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
    """Ranks of an engine that hold some of the layers."""
    data_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Copies of the model inside one engine."""
    expert_parallel_size: int = attrs.field(default=1, validator=at_least(1))
    """Ranks that share the experts; 1, or tensor_parallel_size × data_parallel_size."""
    max_num_batched_tokens: int = attrs.field(default=8192, validator=at_least(1))
    """Tokens that an engine computes in one step."""
    enable_prefix_caching: bool = True
    """A prompt that begins as an earlier one is computed from there on."""
    enable_chunked_prefill: bool = True
    """Long prompts are computed in parts, between other requests' tokens."""
    enforce_eager: bool | None = None
    """No compilation, no CUDA graphs. None: compiled on GPUs, eager on CPUs."""
    gpu_memory_utilization: float = attrs.field(default=0.8, validator=between(0, 1))
    """Part of a GPU's memory that an engine takes; without a GPU it means nothing."""
    served_model_name: str | None = None
    """The model's name in the OpenAI API; None: `trainer.policy.model.path`."""
    fully_sharded_loras: bool = False
    """Adapters that are sent alone are split over the tensor-parallel ranks as a whole, not only half of each."""
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = None
    """How an engine runs its ranks; None: processes of one machine, or Ray where one machine is too small."""
    external_server_urls: tuple[str, ...] | None = None
    """Servers that somebody else started (`python -m rl_rollout.vllm.serve`); num_engines is their number."""
    host: str | None = None
    """Address that servers listen on. None: loopback, or all of the machine's if Ray has several."""
    router_port: int | None = None
    """One address, with OpenAI's API, for agents that are no part of the run: this port of `host`, 0 for a free one;
    None: none. Agents show RL_SERVER_TOKEN, or where that is not set the text of `<run_dir>/agents_token`."""
    start_timeout_s: float = attrs.field(default=600.0, validator=above(0))
    """Longest wait for a server to be ready."""
    heartbeat_interval_s: float = attrs.field(default=5.0, validator=above(0))
    """Seconds between two questions whether a server is well."""
    hung_after_s: float = attrs.field(default=60.0, validator=above(0))
    """A server that gives no answer for so long is started again."""
