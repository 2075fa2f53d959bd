"""Estimates the memory of each rank of a sharded model, from the model's structure without its weights.

Memory that a rank holds from step to step is counted exactly. Temporary memory (activations and gathered parameters) is
estimated at the points of a step where it can peak:

- while the gradient of the output layer is computed;
- in a decoder layer's backward, which recomputes the layer's activations. Meanwhile the next layer of the backward
  pass is gathered, and the gradients of the previous one are reduced. The peak is in the second layer of the pass or,
  under hybrid sharding, in the last one;
- while the gradient of the embedding is computed;
- at the end, when the gradients of parameters outside the layers are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from torch import nn

from rl_core.interfaces import HeldKind, OptimizerConfig, RankPlan, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.model_shapes import model_shape
from rl_core.rank_kit.optimizers import is_elementwise, state_layout
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_fsdp.optimizers import matrices_of
from rl_fsdp.options import FsdpOptions, asked_replay_key
from rl_fsdp.sharding import DTYPES
from rl_transformers.rank.planned_memory import ActivationBytes, units_of
from rl_transformers.rank.token_scorer import Scorer, load_scorer

_ALIGNMENT_BYTES = 16
"""Alignment of each parameter in FSDP1's flat tensor, with `use_orig_params` (torch, `FlatParamHandle`)."""
_ALL: tuple[HeldKind, ...] = ("parameters", "gradients", "optimizer")


def plan_ranks(spec: WorkerSpec, mesh: Mesh, *, micro_batch_tokens: int) -> tuple[RankPlan, ...]:
    """Returns one entry per rank, as `Backend.plan` requires. A rank computes one micro-batch at a time.

    Args:
        spec: the model and how it is trained.
        mesh: the mesh of its ranks.
        micro_batch_tokens: tokens of the largest micro-batch, before Ulysses ranks split it.

    Raises:
        ConfigError: the model's directory cannot be read.
    """
    return _plan(spec, mesh, micro_batch_tokens, _split_parameters)


def plan_flat_ranks(spec: WorkerSpec, mesh: Mesh, *, micro_batch_tokens: int) -> tuple[RankPlan, ...]:
    """Like `plan_ranks`, for FSDP1: the parameters of a unit form one tensor, which the ranks share evenly."""
    return _plan(spec, mesh, micro_batch_tokens, _split_units)


@attrs.frozen
class _Held:
    """The parameters that one shard holds."""

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    elements_of: dict[nn.Parameter, int]
    """Trained parameter → number of its elements."""


_Split = Callable[[Scorer, int, int], _Held]


def _plan(spec: WorkerSpec, mesh: Mesh, micro_batch_tokens: int, split: _Split) -> tuple[RankPlan, ...]:
    scorer = load_scorer(spec, torch.device("meta"), routes_key=asked_replay_key(spec))
    where = f"{SECTIONS[spec.role]}.model.path"
    shape = model_shape(scorer.model.config.get_text_config().to_dict(), where)
    num_shards = mesh.world_size if spec.options.fsdp_size == -1 else spec.options.fsdp_size
    held = [split(scorer, shard, num_shards) for shard in range(num_shards)]
    largest = max(parameter.numel() for parameter in scorer.parameters())
    compute = 2 if spec.bf16 else 4
    whole = sum(parameter.numel() * parameter.element_size() for parameter in scorer.parameters())
    activations = ActivationBytes.of(spec, shape, micro_batch_tokens / mesh.sequence)
    fullest = _fullest_moment(spec, scorer, activations, mesh.world_size, num_shards)
    plans = []
    for rank in range(mesh.world_size):
        own = held[rank % num_shards]
        plans.append(
            RankPlan(
                rank=rank,
                data_part=mesh.data_rank(rank),
                layers=tuple(range(shape.num_layers)),
                experts=tuple(range(shape.num_experts)),
                place=f"shard {rank % num_shards} sequence {mesh.coordinates(rank).sequence}",
                num_parameters=own.num_parameters,
                parameter_bytes=own.parameter_bytes,
                gradient_bytes=own.gradient_bytes if spec.optimizer is not None else 0,
                optimizer_bytes=0 if spec.optimizer is None else _state_bytes(scorer, spec.optimizer, own, num_shards),
                activation_bytes=round(fullest.activations),
                gathered_bytes=round(fullest.gathered),
                # A whole tensor, and the checkpoint tensors made from it (one per expert).
                export_bytes=2 * largest * compute,
                frees_gradients=True,
                on_host=_ALL if spec.options.cpu_offload else (),
                loading_host_bytes=whole if rank == 0 and mesh.world_size > 1 else 0,
            )
        )
    return tuple(plans)


def _state_bytes(scorer: Scorer, config: OptimizerConfig, held: _Held, num_shards: int) -> int:
    """Bytes of the optimizer's state: of the shard's elements or, if the optimizer reads whole weights, of all."""
    matrices, layouts, total = matrices_of(scorer), {}, 0
    is_sharded = is_elementwise(config) or num_shards == 1
    for weight, num_elements in held.elements_of.items():
        kind = (weight.dim(), weight in matrices)
        if kind not in layouts:
            layouts[kind] = state_layout(config, num_axes=kind[0], is_matrix=kind[1])
        layout = layouts[kind]
        of_weight = layout.num_alike * num_elements if is_sharded else layout.num_elements(weight.shape)
        total += of_weight * weight.element_size()
    return total


def _split_parameters(scorer: Scorer, shard: int, num_shards: int) -> _Held:
    parameters = list(scorer.parameters())
    return _Held(
        sum(_shard_elements(p, shard, num_shards) for p in parameters),
        _shard_bytes(parameters, shard, num_shards),
        gradient_bytes=_shard_bytes((p for p in parameters if p.requires_grad), shard, num_shards),
        elements_of={p: _shard_elements(p, shard, num_shards) for p in parameters if p.requires_grad},
    )


def _shard_elements(parameter: nn.Parameter, shard: int, num_shards: int) -> int:
    """Returns the number of elements of a parameter that one shard holds. FSDP2 cuts the first axis into equal parts;
    the last parts may be smaller or empty."""
    rows = parameter.shape[0] if parameter.dim() else 1
    part = -(-rows // num_shards)
    held = max(0, min(part, rows - shard * part))
    return held * (parameter.numel() // rows if rows else 0)


def _shard_bytes(parameters: Iterable[nn.Parameter], shard: int, num_shards: int) -> int:
    return sum(_shard_elements(p, shard, num_shards) * p.element_size() for p in parameters)


def _split_units(scorer: Scorer, shard: int, num_shards: int) -> _Held:
    """Returns what a shard holds under FSDP1. All shards are equally large, because flat parameters are padded to
    equal parts. The gradient of a unit with trained parameters covers its frozen ones too."""
    elements = num_bytes = gradient_bytes = 0
    elements_of: dict[nn.Parameter, int] = {}
    for unit in units_of(scorer):
        size = unit[0].element_size()
        step, flat, places = _ALIGNMENT_BYTES // size, 0, {}
        for parameter in unit:
            start = -(-flat // step) * step
            flat = start + parameter.numel()
            places[parameter] = range(start, flat)
        part = -(-flat // num_shards)
        own = range(shard * part, (shard + 1) * part)
        trained = {
            p: len(range(max(own.start, t.start), min(own.stop, t.stop))) for p, t in places.items() if p.requires_grad
        }
        elements += part
        num_bytes += part * size
        gradient_bytes += part * size if trained else 0
        elements_of |= trained
    return _Held(elements, num_bytes, gradient_bytes, elements_of)


@attrs.frozen
class _Moment:
    """Bytes that a rank holds temporarily, at one moment of a step."""

    activations: float
    gathered: float

    @property
    def total(self) -> float:
        return self.activations + self.gathered


@attrs.frozen
class _Sizes:
    """Sizes of a model. `layer` (the largest), `layers`, `outside` and `output` count parameters; `element` and
    `reduced` are bytes per element in computation and in gradient sums over ranks."""

    layer: int
    layers: int
    outside: int
    output: int
    is_tied: bool
    element: int
    reduced: int

    @classmethod
    def of(cls, spec: WorkerSpec, scorer: Scorer) -> _Sizes:
        *layers, outside = [sum(p.numel() for p in unit) for unit in units_of(scorer)]
        output = None if spec.role == "critic" else scorer.model.get_output_embeddings()
        options: FsdpOptions = spec.options
        return cls(
            layer=max(layers),
            layers=sum(layers),
            outside=outside,
            output=0 if output is None else output.weight.numel(),
            is_tied=output is not None and output.weight is scorer.model.get_input_embeddings().weight,
            element=2 if spec.bf16 else 4,
            reduced=DTYPES[options.mixed_precision.reduce_dtype].itemsize if spec.bf16 else 4,
        )


def _fullest_moment(
    spec: WorkerSpec, scorer: Scorer, held: ActivationBytes, num_ranks: int, num_shards: int
) -> _Moment:
    """Returns the moment of a step with the most temporary memory. Which moment this is depends on the number of
    tokens and the size of the vocabulary.

    The candidates were found by rehearsals (`rl rehearse`), which run FSDP2 and the model's code and report which
    memory is in use at each point.
    """
    sizes = _Sizes.of(spec, scorer)
    whole, buffer = _whole_parameters(spec, scorer, sizes, num_ranks)
    if spec.optimizer is None:
        in_layer = _Moment(held.hidden + held.kept, whole + buffer)
        return max(in_layer, _Moment(held.scoring_output, whole), key=lambda moment: moment.total)
    if spec.model.lora.rank > 0:
        in_layer = _Moment(held.in_layer, whole + buffer)
        return max(in_layer, _Moment(held.at_output, whole), key=lambda moment: moment.total)
    split = num_ranks > 1
    # The output layer's gradient is summed over chunks in float32, and each chunk needs memory for its own product.
    output_sum = sizes.output * (4 + (sizes.element if spec.bf16 else 0))
    output_gradient = sizes.output * sizes.element
    summed = sizes.layer * sizes.reduced if split else 0
    # Under hybrid sharding each layer's gradient, summed over the shards, stays in memory until backward is done.
    all_summed = sizes.layers / num_shards * sizes.reduced if num_shards < num_ranks else 0
    outside = sizes.outside * sizes.element if split else 0
    at_the_output = _Moment(held.at_output + output_sum, whole)
    in_layer = _Moment(held.in_layer, whole + buffer + output_gradient + summed)
    in_first_layer = _Moment(held.in_first_layer, whole + output_gradient + summed + all_summed)
    # Gradients outside the layers are summed last; a rank then holds the whole gradient and a copy in the sum's dtype.
    embedding_gradients = sizes.outside * sizes.element + (2 * output_gradient if sizes.is_tied else 0)
    embedded = _Moment(2 * held.hidden, outside + embedding_gradients + summed + all_summed)
    reduced_outside = sizes.outside * (sizes.element + sizes.reduced * (1 + 1 / num_shards)) if split else 0
    at_the_end = _Moment(0, reduced_outside + all_summed)
    return max(at_the_output, in_layer, in_first_layer, embedded, at_the_end, key=lambda moment: moment.total)


def _whole_parameters(spec: WorkerSpec, scorer: Scorer, sizes: _Sizes, num_ranks: int) -> tuple[float, float]:
    """Returns the bytes of whole parameters, and the bytes of the buffer into which the next layer is gathered.

    The first number counts the parameters outside the layers and the parameters of one layer, or of all layers if they
    stay gathered until backward. A single rank gathers nothing, but autocast copies its weights.
    """
    if num_ranks == 1:
        # Autocast keeps a bfloat16 copy of every float32 weight of a matrix product until backward has used it.
        cast = [p for p in scorer.parameters() if p.dim() > 1 and p.dtype == torch.float32] if spec.bf16 else []
        return 2 * sum(p.numel() for p in cast), 0
    outside, layer = sizes.outside * sizes.element, sizes.layer * sizes.element
    if spec.options.reshard_after_forward:
        return outside + layer, layer
    return outside + sizes.layers * sizes.element, 0
