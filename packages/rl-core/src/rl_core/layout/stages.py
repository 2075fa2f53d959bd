"""Determines which transformer layers a pipeline stage holds, and which layers have experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rl_core.errors import ConfigError
from rl_core.layout.balancing import IntArray


class LayerRange(NamedTuple):
    """Consecutive transformer layers: start, start+1, …, start+num_layers−1. May be empty."""

    start: int
    num_layers: int


def pipeline_chunks(
    num_layers: int,
    pipeline: int,
    *,
    virtual_pipeline: int = 1,
    num_first: int | None = None,
    num_last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> list[LayerRange]:
    """Divides the layers into model chunks, and returns the chunks in the order in which data flows through them.

    Chunk c is on stage c % pipeline, so `chunks[stage::pipeline]` are a stage's chunks. Without virtual stages, there
    is one chunk per stage. The rules are those of Megatron-Core 0.16.

    Args:
        num_layers: number of transformer layers.
        pipeline: number of stages.
        virtual_pipeline: chunks per stage.
        num_first: total number of layers in the first stage's chunks; None: as many as on the middle stages.
        num_last: the same for the last stage.
        count_embedding: whether the embedding counts as a layer of the first chunk.
        count_loss: whether output layer and loss together count as a layer of the last chunk.

    Raises:
        ConfigError: the layers cannot be split this way. If they cannot be divided evenly, the message suggests a
            number of layers for the first or last stage, if any number works.
    """
    if (num_first is not None or num_last is not None) and (count_embedding or count_loss):
        raise ConfigError(
            "pipeline: got a set number of layers for the first or last stage although embedding or loss counts as a "
            "layer; remove the set numbers, or count neither embedding nor loss"
        )
    for name, value in (("num_layers", num_layers), ("pipeline", pipeline), ("virtual_pipeline", virtual_pipeline)):
        if value < 1:
            raise ConfigError(f"pipeline: got {name}={value}; expected at least 1")
    if pipeline == 1 and (virtual_pipeline > 1 or num_first is not None or num_last is not None):
        raise ConfigError(
            "pipeline: got 1 stage, with virtual stages or a number of layers for the first or last stage; these need "
            "at least 2 stages"
        )
    slots = num_layers + count_embedding + count_loss
    suggestion = (
        "" if count_embedding or count_loss else _fitting_end(slots, pipeline, virtual_pipeline, num_first, num_last)
    )
    per_stage = _slots_of_stages(slots, pipeline, num_first, num_last, suggestion)
    wrong = [stage for stage, count in enumerate(per_stage) if count % virtual_pipeline]
    if wrong:
        raise ConfigError(
            f"pipeline: stage {wrong[0]} has {per_stage[wrong[0]]} layers; expected a "
            f"multiple of its {virtual_pipeline} chunks"
        )
    counts = [count // virtual_pipeline for count in per_stage] * virtual_pipeline
    counts[0] -= count_embedding
    counts[-1] -= count_loss
    if min(counts) < 0:
        raise ConfigError(f"pipeline: {num_layers} layers are too few if embedding or loss count as layers")
    starts = np.cumsum([0, *counts]).tolist()
    return [LayerRange(start, count) for start, count in zip(starts, counts, strict=False)]


def _slots_of_stages(
    slots: int, pipeline: int, num_first: int | None, num_last: int | None, suggestion: str
) -> list[int]:
    ends = [count for count in (num_first, num_last) if count is not None]
    if any(count < 0 for count in ends):
        raise ConfigError(f"pipeline: got {min(ends)} layers for the first or last stage; expected at least 0")
    rest, middle = slots - sum(ends), pipeline - len(ends)
    if rest < 0 or (rest > 0 if middle == 0 else rest % middle):
        layers, fails = f"{slots} layers (including embedding and loss if counted)", "cannot be divided evenly over"
        if not ends:
            raise ConfigError(f"pipeline: {layers} {fails} {pipeline} stages{suggestion}")
        names = " and ".join(name for name, n in (("first", num_first), ("last", num_last)) if n is not None)
        raise ConfigError(
            f"pipeline: {sum(ends)} of {layers} are set for the {names} stage, and the remaining {rest} {fails} the "
            f"other {middle}{suggestion}"
        )
    counts = [rest // middle if middle else 0] * pipeline
    if num_first is not None:
        counts[0] = num_first
    if num_last is not None:
        counts[-1] = num_last
    return counts


def _fitting_end(slots: int, pipeline: int, virtual_pipeline: int, num_first: int | None, num_last: int | None) -> str:
    """Suggests the number of layers that is nearest to an even split: for the last stage if only the first stage's
    number is set, else for the first stage. Empty if no number works."""
    name, other = ("num_last", num_first) if num_last is None and num_first is not None else ("num_first", num_last)
    rest, middle = slots - (other or 0), pipeline - 1 - (other is not None)
    fitting = [
        n
        for n in range(virtual_pipeline, rest + 1, virtual_pipeline)
        if (n == rest if middle == 0 else n < rest and (rest - n) % (middle * virtual_pipeline) == 0)
        and (other or 0) % virtual_pipeline == 0
    ]
    best = min(fitting, key=lambda n: abs(n - slots / pipeline), default=None)
    return "" if best is None else f". Set {name}={best}"


def moe_layers(num_layers: int, *, num_dense_first: int = 0, frequency: int = 1) -> IntArray:
    """The transformer layers with experts, in ascending order: those whose index is at least `num_dense_first` and a
    multiple of `frequency`.

    Args:
        num_layers: number of transformer layers.
        num_dense_first: number of leading layers without experts.
        frequency: n, if every n-th layer has experts.
    """
    layers = np.arange(num_layers)
    return layers[(layers >= num_dense_first) & (layers % frequency == 0)]


def layers_in(chunk: LayerRange, layers: IntArray) -> IntArray:
    """The elements of `layers` that are in `chunk`. Router replay selects a stage's routes with them:
    `routed_experts[index][:, layers_in(chunk, layers)]`."""
    return layers[(layers >= chunk.start) & (layers < chunk.start + chunk.num_layers)]
