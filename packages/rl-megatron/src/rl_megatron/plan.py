"""Estimates the memory of each rank of a Megatron model from the sizes of model and mesh. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.errors import ConfigError
from rl_core.interfaces import RankPlan, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.stages import LayerRange
from rl_core.rank_kit.model_shapes import ModelShape
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.checks.model_setup import Setup, setup_of
from rl_megatron.checks.refusals import refuse_setup

_BYTES_OF_LOGITS = 3 * 4
"""Bytes per token and vocabulary entry in a chunk: logit, softmax and gradient, each in float32."""


def plan_ranks(
    spec: WorkerSpec, world_size: int, *, micro_batch_tokens: int, num_micro_batches: int
) -> tuple[RankPlan, ...]:
    """Returns one entry per rank, as `rl_core.interfaces.Backend.plan` requires. Raises ConfigError if the model's
    configuration is not on this machine, or if the model has adapters or is refused."""
    setup = setup_of(spec, world_size)
    refuse_setup(setup)
    section = SECTIONS[spec.role]
    if setup.shape is None:
        raise ConfigError(
            f"{spec.model.path} is not on this machine, so its sizes are unknown; set a directory, download the model, "
            "or let the recipe create it first",
            key=f"{section}.model.path",
        )
    if spec.model.lora.rank > 0:
        raise ConfigError(
            "the plan does not cover adapters; set it to 0 to plan the model", key=f"{section}.model.lora.rank"
        )
    if spec.model.trainable is not None:
        raise ConfigError(
            "the plan of Megatron does not cover frozen parameters; leave it out to plan for all, which is an upper "
            "bound",
            key=f"{section}.model.trainable",
        )
    mesh = setup.mesh()
    chunks = setup.chunks(setup.shape.num_layers)
    return tuple(
        _rank_plan(spec, setup, setup.shape, mesh, chunks, rank, micro_batch_tokens, num_micro_batches)
        for rank in range(world_size)
    )


def _rank_plan(
    spec: WorkerSpec,
    setup: Setup,
    shape: ModelShape,
    mesh: Mesh,
    chunks: Sequence[LayerRange],
    rank: int,
    micro_batch_tokens: int,
    num_micro_batches: int,
) -> RankPlan:
    at = mesh.coordinates(rank)
    own = chunks[at.pipeline :: mesh.pipeline]
    layers = tuple(layer for chunk in own for layer in range(chunk.start, chunk.start + chunk.num_layers))
    dense, experts = count_parameters(shape, mesh, layers, stage=at.pipeline, is_critic=spec.role == "critic")
    size = 2 if spec.bf16 else 4
    gradients = optimizer = 0
    if spec.optimizer is not None:
        ddp = spec.options.ddp_config
        gradients = (dense + experts) * (4 if ddp.grad_reduce_in_fp32 else size)
        # Adam's two moments and, with bfloat16, the float32 weights, sharded over the ranks that hold the same weights.
        shards = dense / (mesh.data * mesh.context) + experts / mesh.expert_data
        optimizer = round(shards * (12 if spec.bf16 else 8))
    num_local = shape.num_experts // mesh.expert
    has_experts = any(layer in shape.moe_layers for layer in layers)
    in_flight = _micro_batches_in_flight(mesh, at.pipeline, num_micro_batches) if spec.optimizer else 1
    return RankPlan(
        rank=rank,
        data_part=at.data,
        layers=layers,
        experts=tuple(range(at.expert * num_local, (at.expert + 1) * num_local)) if has_experts else (),
        place=f"tensor {at.tensor} context {at.context}",
        num_parameters=dense + experts,
        parameter_bytes=(dense + experts) * size,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        export_bytes=size * _exported_elements(shape, mesh),
        activation_bytes=round(
            size * _activation_elements(spec, setup, mesh, layers, micro_batch_tokens / mesh.context, in_flight)
            + _output_bytes(spec, shape, mesh, at.pipeline, micro_batch_tokens / mesh.context)
        ),
    )


def count_parameters(
    shape: ModelShape, mesh: Mesh, layers: Sequence[int], *, stage: int, is_critic: bool
) -> tuple[int, int]:
    """Counts the parameters of one rank; returns the number outside the experts and the number in the experts."""
    hidden = shape.hidden_size
    sizes = {"tensor": mesh.tensor, "expert": mesh.expert, "expert_tensor": mesh.expert_tensor}
    counts = [shape.layer_parameters(layer, **sizes) for layer in layers]
    dense, experts = sum(outside for outside, _ in counts), sum(inside for _, inside in counts)
    vocabulary = shape.vocabulary_parameters(mesh.tensor)
    is_first, is_last = stage == 0, stage == mesh.pipeline - 1
    dense += vocabulary if is_first else 0
    if is_last:
        # A tied output layer is the embedding itself if both are on one rank, else a copy of it.
        output = 0 if shape.is_tied and is_first else vocabulary
        dense += hidden + (hidden + 1 if is_critic else output)
    return dense, experts


def _exported_elements(shape: ModelShape, mesh: Mesh) -> int:
    """Counts the elements that a rank holds at the peak of an export: a gathered tensor, and as many again for the
    checkpoint tensors cut from it. The experts of one local number, one from each expert rank, are
    gathered together."""
    experts = 3 * shape.hidden_size * shape.expert_ffn_hidden_size * mesh.expert
    return 2 * max(shape.vocabulary_parameters(), 3 * shape.hidden_size * shape.ffn_hidden_size, experts)


def _micro_batches_in_flight(mesh: Mesh, stage: int, num_micro_batches: int) -> float:
    """Returns the largest number of micro-batches that have run forward but not yet backward on a stage. A micro-batch
    that has run through only one of the stage's n chunks counts as 1/n."""
    after = mesh.pipeline - stage
    if mesh.virtual_pipeline == 1:
        return min(num_micro_batches, after)
    chunks = 2 * (after - 1) + (mesh.virtual_pipeline - 1) * mesh.pipeline + 1
    return min(num_micro_batches, chunks / mesh.virtual_pipeline)


def _activation_elements(
    spec: WorkerSpec, setup: Setup, mesh: Mesh, layers: Sequence[int], tokens: float, in_flight: float
) -> float:
    """Counts the activation elements of the transformer layers that are in memory at a time. In training, these are the
    activations of all layers or, with recomputation, the inputs of all layers and everything in the largest layer.
    Without an optimizer, they are only the activations of the largest layer."""
    shape = setup.shape
    assert shape is not None
    sizes = {"tensor": mesh.tensor, "expert_tensor": mesh.expert_tensor}
    full = [tokens * shape.activation_elements(layer, **sizes) for layer in layers]
    if spec.optimizer is None:
        return max(full, default=0.0)
    if not spec.gradient_checkpointing and setup.fields.get("recompute_granularity") != "full":
        return in_flight * sum(full)
    inputs = len(layers) * tokens * shape.hidden_size / mesh.tensor
    return in_flight * inputs + max(full, default=0.0)


def _output_bytes(spec: WorkerSpec, shape: ModelShape, mesh: Mesh, stage: int, tokens: float) -> float:
    """Counts the bytes of the output on the last stage: hidden states, whole on every tensor rank, and the logits of
    one chunk of tokens."""
    if stage != mesh.pipeline - 1:
        return 0.0
    chunk = min(tokens, spec.logprobs_chunk_size)
    rows = 1 if spec.role == "critic" else -(-shape.vocab_size // mesh.tensor)
    return 2 * tokens * shape.hidden_size * (2 if spec.bf16 else 4) + chunk * rows * _BYTES_OF_LOGITS
