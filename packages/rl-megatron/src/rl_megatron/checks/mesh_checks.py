"""Finds parallel sizes that do not fit together, the model or the ranks, and names the nearest mesh that does fit.
Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import attrs

from rl_core.errors import ConfigError
from rl_megatron.checks.model_setup import SIZES, Check, Setup, first_complaint

_PRODUCTS = (
    ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"),
)
"""Sizes of dense layers and sizes of expert layers. The product of each tuple must divide the number of ranks."""
_END_COUNTS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def refuse_mesh(setup: Setup) -> None:
    """Raises ConfigError if the parallel sizes do not fit each other, the model or the number of ranks. If some mesh
    works, the message ends with the nearest one."""
    if (complaint := _sizes_are_positive(setup)) is not None:
        raise complaint
    if (complaint := first_complaint(_MESH_CHECKS, setup)) is not None:
        raise ConfigError(f"{complaint.text}. {_nearest_mesh(setup)}", key=complaint.key)


def _nearest_mesh(setup: Setup) -> str:
    """Returns a sentence for the error message. It names the sizes that pass the mesh checks and are nearest to the
    sizes of `setup`, or says that no sizes pass."""
    names = [name for name in SIZES if (setup.fields.get(name) or 1) > 1]
    best = min(
        (candidate for candidate in _meshes(setup, names) if first_complaint(_MESH_CHECKS, candidate) is None),
        key=lambda candidate: _distance(setup, candidate, names),
        default=None,
    )
    if best is None:
        return f"No mesh of {setup.world_size} ranks fits this model"
    changed = ", ".join(f"{name}={best.size(name)}" for name in names)
    data = best.mesh().data
    counts = "" if all(best.fields.get(n) == setup.fields.get(n) for n in _END_COUNTS) else ", without layer counts"
    return f"Nearest that works on {setup.world_size} ranks: {changed or 'all sizes 1'}{counts} (data parallel {data})"


def _meshes(setup: Setup, names: list[str]) -> Iterator[Setup]:
    """Yields setups with other sizes on the axes in use: every combination whose products divide the number of ranks,
    with and without virtual stages and layer counts."""
    divisors = [n for n in range(1, setup.world_size + 1) if setup.world_size % n == 0]
    virtual = "virtual_pipeline_model_parallel_size"
    fitting: list[dict[str, int]] = [{}]
    for name in names:
        choices = (setup.size(name), 1) if name == virtual else divisors
        larger = ({**sizes, name: size} for sizes in fitting for size in choices)
        # All combinations of the divisors would be millions on hundreds of ranks.
        fitting = [sizes for sizes in larger if _products_divide(sizes, setup.world_size)]
    even = dict.fromkeys(_END_COUNTS)
    for sizes in fitting:
        chosen = {**setup.fields, **sizes}
        yield attrs.evolve(setup, fields=chosen)
        if any(setup.fields.get(name) is not None for name in _END_COUNTS):
            yield attrs.evolve(setup, fields={**chosen, **even})


def _products_divide(sizes: Mapping[str, int], world_size: int) -> bool:
    return all(world_size % math.prod(sizes.get(name, 1) for name in names) == 0 for names in _PRODUCTS)


def _distance(setup: Setup, candidate: Setup, names: list[str]) -> tuple[float, bool, int]:
    steps = sum(abs(math.log2(candidate.size(name) / setup.size(name))) for name in names)
    gives_counts_up = any(candidate.fields.get(name) != setup.fields.get(name) for name in _END_COUNTS)
    return steps, gives_counts_up, candidate.mesh().data


def _sizes_are_positive(setup: Setup) -> ConfigError | None:
    for name in SIZES:
        value = setup.fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            return ConfigError(f"got {value!r}; expected a whole number of at least 1", key=setup.key(name))
    return None


def _ranks_divide(setup: Setup) -> ConfigError | None:
    for names in _PRODUCTS:
        sizes = {name: setup.size(name) for name in names if setup.size(name) > 1}
        if setup.world_size % math.prod(sizes.values()):
            product = " × ".join(f"{name} {size}" for name, size in sizes.items())
            total = f" = {math.prod(sizes.values())}" if len(sizes) > 1 else ""
            return ConfigError(f"{product}{total} does not divide the {setup.world_size} ranks", key=setup.where)
    return None


def _virtual_stages_have_stages(setup: Setup) -> ConfigError | None:
    virtual, stages = "virtual_pipeline_model_parallel_size", setup.size("pipeline_model_parallel_size")
    if setup.size(virtual) > 1 and stages == 1:
        return ConfigError(
            f"{setup.size(virtual)} model chunks per stage need more than one pipeline stage", key=setup.key(virtual)
        )
    return None


def _layers_split(setup: Setup) -> ConfigError | None:
    if setup.shape is None:
        return None
    num_layers, stages = setup.shape.num_layers, setup.size("pipeline_model_parallel_size")
    try:
        chunks = setup.chunks(num_layers)
    except ConfigError as error:
        said = str(error).replace("num_first", _END_COUNTS[0]).replace("num_last", _END_COUNTS[1]).rstrip(".")
        return ConfigError(f"the model's {num_layers} layers: {said}", key=setup.key("pipeline_model_parallel_size"))
    counts_ends = any(setup.fields.get(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    for index, chunk in enumerate(chunks):
        if chunk.num_layers == 0 and not (counts_ends and index in (0, len(chunks) - 1)):
            return ConfigError(
                f"{num_layers} layers on {stages} stages × {setup.size('virtual_pipeline_model_parallel_size')} chunks "
                f"leave chunk {index} without a layer",
                key=setup.key("pipeline_model_parallel_size"),
            )
    return None


def _tensor_ranks_divide(setup: Setup) -> ConfigError | None:
    if setup.shape is None:
        return None
    shape, tensor = setup.shape, setup.size("tensor_model_parallel_size")
    groups = shape.num_heads if shape.latent else shape.num_kv_heads
    sizes = {
        "attention heads": shape.num_heads,
        "key/value heads (each rank needs at least one)": groups,
        "feed-forward units": shape.ffn_hidden_size,
        "units of the shared experts": shape.shared_ffn_hidden_size,
    }
    return _indivisible(setup, "tensor_model_parallel_size", tensor, sizes)


def _expert_ranks_divide(setup: Setup) -> ConfigError | None:
    if setup.shape is None or not setup.shape.is_moe:
        return None
    shape, tensor = setup.shape, setup.size("expert_tensor_parallel_size")
    units = {"units of each expert": shape.expert_ffn_hidden_size}
    experts = {"experts": shape.num_experts}
    return _indivisible(setup, "expert_tensor_parallel_size", tensor, units) or _indivisible(
        setup, "expert_model_parallel_size", setup.size("expert_model_parallel_size"), experts
    )


def _indivisible(setup: Setup, name: str, size: int, sizes: Mapping[str, int]) -> ConfigError | None:
    for what, count in sizes.items():
        if count % size:
            return ConfigError(f"{size} does not divide the model's {count} {what}", key=setup.key(name))
    return None


def _experts_are_there(setup: Setup) -> ConfigError | None:
    name = "expert_model_parallel_size"
    if setup.shape is not None and not setup.shape.is_moe and setup.size(name) > 1:
        return ConfigError(f"got {setup.size(name)}, but the model has no experts", key=setup.key(name))
    return None


def _expert_gradients_are_summed(setup: Setup) -> ConfigError | None:
    """Refuses sizes with which megatron-core 0.16.1 (tensor_parallel/layers.py:829) sums experts' gradients wrongly.
    With `expert_model_parallel_size=1`, they are summed over the ranks that sum the gradients of dense layers. These
    are the wrong ranks if experts and dense layers are split differently; the error is as large as the gradient."""
    expert_tensor, tensor = setup.size("expert_tensor_parallel_size"), setup.size("tensor_model_parallel_size")
    has_experts = setup.shape is None or setup.shape.is_moe
    if has_experts and setup.size("expert_model_parallel_size") == 1 and expert_tensor != tensor:
        return ConfigError(
            f"{expert_tensor} with tensor_model_parallel_size={tensor} and expert_model_parallel_size=1: Megatron-Core "
            "0.16.1 then sums the experts' gradients over the wrong ranks. Leave it out, or split the experts "
            "(expert_model_parallel_size of 2 or more)",
            key=setup.key("expert_tensor_parallel_size"),
        )
    return None


def _two_stages_have_no_counts_with_chunks(setup: Setup) -> ConfigError | None:
    """Refuses layer counts for both stages of a two-stage pipeline with virtual stages. In megatron-core 0.16.1,
    `get_transformer_layer_offset` then divides by the number of stages without a count, which is 0."""
    has_both = all(setup.fields.get(name) is not None for name in _END_COUNTS)
    if has_both and setup.size("pipeline_model_parallel_size") == 2 and setup.is_interleaved:
        return ConfigError(
            "Megatron-Core 0.16.1 splits the layers wrongly with two stages, counts for both of them and virtual "
            "stages: set only one of the counts, or leave virtual_pipeline_model_parallel_size out",
            key=setup.key(_END_COUNTS[0]),
        )
    return None


_MESH_CHECKS: tuple[Check, ...] = (
    _ranks_divide,
    _virtual_stages_have_stages,
    _experts_are_there,
    _tensor_ranks_divide,
    _expert_ranks_divide,
    _expert_gradients_are_summed,
    _layers_split,
    _two_stages_have_no_counts_with_chunks,
)
