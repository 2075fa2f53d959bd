"""Estimates the memory that one device of a vLLM engine needs, without importing vllm."""

from __future__ import annotations

from rl_core.errors import ConfigError
from rl_core.interfaces import EnginePlan, EngineSpec
from rl_core.rank_kit.model_shapes import ModelShape
from rl_rollout.memory import BYTES_OF, sampling_bytes, shape_of
from rl_rollout.vllm.engine_arguments import ranks_per_engine
from rl_rollout.vllm.options import VLLMOptions

_SECTION = "generator.inference_engine"
_GRAPH_BYTES = 3 << 29
"""Estimated size of the CUDA graphs: 1.5 GiB. They stay in memory while the engine sleeps."""
_LEFT_ASLEEP_BYTES = 1 << 29
"""Estimated size of the buffers that a sleeping engine does not release: 0.5 GiB."""


def plan_engine(spec: EngineSpec) -> EnginePlan:
    """Estimates the memory that each device of an engine needs; if the devices differ, the largest amount.

    Raises ConfigError if the model's sizes are unknown, if the tensor-parallel size does not divide the number of
    attention heads, or if expert parallelism is on but the model has no experts.
    """
    options: VLLMOptions = spec.options
    shape = shape_of(spec)
    _require_divisible(options, shape)
    size, tensor = BYTES_OF[spec.dtype], options.tensor_parallel_size
    layers = range(-(-shape.num_layers // options.pipeline_parallel_size))
    split = tensor * options.data_parallel_size
    shares_experts = options.expert_parallel_size > 1
    experts = {"expert": split if shares_experts else 1, "expert_tensor": 1 if shares_experts else split}
    # Counts as many of the model's last layers as the largest stage has, because layers with experts come last. The
    # last stage may have one layer fewer, so the count is an upper bound.
    counts = [shape.layer_parameters(shape.num_layers - 1 - layer, tensor=tensor, **experts) for layer in layers]
    vocabularies = 1 if shape.is_tied or options.pipeline_parallel_size > 1 else 2
    parameters = sum(map(sum, counts)) + shape.hidden_size + vocabularies * shape.vocabulary_parameters(tensor)
    in_a_layer = max(shape.activation_elements(layer, tensor=tensor, expert_tensor=tensor) for layer in layers)
    graphs = 0 if options.enforce_eager else _GRAPH_BYTES
    return EnginePlan(
        num_devices=ranks_per_engine(options),
        weight_bytes=parameters * size,
        kv_bytes_per_token=len(layers) * shape.key_value_elements(tensor=tensor) * size,
        computing_bytes=round(options.max_num_batched_tokens * in_a_layer * size)
        + sampling_bytes(spec, shape)
        + graphs,
        asleep_bytes=graphs + _LEFT_ASLEEP_BYTES,
        # The engine sleeps at vLLM's level 1, which copies the weights to the host.
        asleep_host_bytes=parameters * size,
        memory_share=options.gpu_memory_utilization,
        can_sleep=True,
    )


def _require_divisible(options: VLLMOptions, shape: ModelShape) -> None:
    tensor = options.tensor_parallel_size
    if shape.num_heads % tensor:
        raise ConfigError(
            f"got {tensor}, which does not divide the model's {shape.num_heads} attention heads; set it to a divisor",
            key=f"{_SECTION}.tensor_parallel_size",
        )
    if options.expert_parallel_size > 1 and shape.num_experts == 0:
        raise ConfigError(
            f"got {options.expert_parallel_size}, but the model has no experts; set it to 1",
            key=f"{_SECTION}.expert_parallel_size",
        )
