"""The arrangement of one model's ranks, the part of a batch that each rank receives, and the ranks that return results.

Ranks are numbered as in Megatron (order tp-cp-ep-dp-pp), with the first axis varying fastest:

    dense layers    rank = tensor + T·(sequence + S·(context + C·(data + D·pipeline)))
    expert layers   rank = expert_tensor + ET·(expert + E·(expert_data + ED·pipeline))

Both formulas describe the same ranks: an expert layer regroups the T·S·C·D ranks of a pipeline stage into ET·E·ED.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from rl_core.errors import ConfigError

Axis = Literal["tensor", "sequence", "context", "data", "pipeline", "expert_tensor", "expert", "expert_data"]
_DENSE: tuple[Axis, ...] = ("tensor", "sequence", "context", "data", "pipeline")
_EXPERT: tuple[Axis, ...] = ("expert_tensor", "expert", "expert_data", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """A rank's index on each axis of its mesh."""

    tensor: int
    sequence: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Parallel sizes of one model; `Mesh(world_size=n)` is pure data parallelism.

    Raises:
        ConfigError: a size is below 1; the product of the dense sizes, or of the expert sizes, does not divide
            `world_size`; or `virtual_pipeline` is above 1 with a single stage. For a product, the message names the
            nearest sizes that fit.
    """

    world_size: int
    tensor: int = 1
    """Ranks that split each matrix; with sequence parallelism, they also split the tokens between matrix products."""
    pipeline: int = 1
    """Ranks that split the layers."""
    context: int = 1
    """Ranks that split each sequence for ring attention; each holds two mirrored chunks of every sequence."""
    sequence: int = 1
    """Ulysses: ranks that split a micro-batch's tokens outside attention, and the heads inside attention."""
    expert: int = 1
    """Ranks that split the experts of a mixture-of-experts layer."""
    expert_tensor: int = 0
    """Ranks that split each expert's matrices; 0 means `tensor`, as in Megatron."""
    virtual_pipeline: int = 1
    """Model chunks per pipeline stage (interleaved schedule)."""

    def __post_init__(self) -> None:
        if self.expert_tensor == 0:
            object.__setattr__(self, "expert_tensor", self.tensor)
        for name in ("world_size", *_DENSE[:3], "pipeline", "expert", "expert_tensor", "virtual_pipeline"):
            if getattr(self, name) < 1:
                raise ConfigError(f"mesh: {name} is {getattr(self, name)}, expected at least 1")
        dense = {"tensor": self.tensor, "sequence": self.sequence, "context": self.context, "pipeline": self.pipeline}
        _require_divisor(self.world_size, dense)
        _require_divisor(
            self.world_size, {"expert_tensor": self.expert_tensor, "expert": self.expert, "pipeline": self.pipeline}
        )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                f"mesh: virtual_pipeline {self.virtual_pipeline} needs pipeline > 1: set pipeline, or set "
                "virtual_pipeline to 1"
            )

    @property
    def data(self) -> int:
        """Data-parallel ranks: the number of parts of a batch."""
        return self.world_size // (self.tensor * self.sequence * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches per rank must be a multiple of this, because an interleaved schedule runs them in
        rounds of `pipeline` micro-batches."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def sequence_multiple(self) -> int:
        """Each sequence is padded to a multiple of this, so that `tensor` ranks can split each of its 2·context
        chunks."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)

    def micro_batch_tokens_multiple(self, *, rows_multiple: int = 1) -> int:
        """The number of tokens of a packed micro-batch is padded to a multiple of this, so that all ranks hold equal
        slices.

        Args:
            rows_multiple: the number of tokens per rank must be a multiple of this: 16 for fp8, 32 for mxfp8, 128 for
                blockwise fp8 matrix products; else 1.
        """
        return math.lcm(self.sequence_multiple, self.tensor * self.context * self.sequence * rows_multiple)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"mesh: rank {rank} is outside 0…{self.world_size - 1}")
        place: dict[str, int] = {}
        for axes in (_DENSE, _EXPERT):
            rest = rank
            for axis in axes:
                rest, place[axis] = divmod(rest, getattr(self, axis))
        return Coordinates(**place)

    def rank(self, *, tensor: int = 0, sequence: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """The rank with these coordinates in dense layers; the inverse of `coordinates`."""
        at = {"tensor": tensor, "sequence": sequence, "context": context, "data": data, "pipeline": pipeline}
        rank = 0
        for axis in reversed(_DENSE):
            size = getattr(self, axis)
            if not 0 <= at[axis] < size:
                raise ConfigError(f"mesh: {axis} coordinate {at[axis]} is outside 0…{size - 1}")
            rank = rank * size + at[axis]
        return rank

    def groups(self, axis: Axis) -> list[list[int]]:
        """All groups of ranks whose coordinates differ only on `axis`. Each group is in ascending order, and every rank
        is in exactly one group."""
        axes = _DENSE if axis in _DENSE else _EXPERT
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            members.setdefault(tuple(getattr(place, other) for other in axes if other != axis), []).append(rank)
        return list(members.values())

    def data_rank(self, rank: int) -> int:
        """Index of the part of a batch that `rank` receives; the same for all ranks of a model replica."""
        return self.coordinates(rank).data

    def returns_results(self, rank: int) -> bool:
        """Whether `rank` returns results. Only one rank per replica does. It is on the last pipeline stage, which has
        the logits, and has index 0 on the tensor, sequence and context axes."""
        place = self.coordinates(rank)
        return place.pipeline == self.pipeline - 1 and place.tensor == place.sequence == place.context == 0


def _require_divisor(world_size: int, sizes: dict[str, int]) -> None:
    """Raises ConfigError unless the product of sizes divides `world_size`. The message names the nearest sizes that
    fit."""
    if world_size % math.prod(sizes.values()) == 0:
        return
    used = {name: size for name, size in sizes.items() if size > 1}
    product = " × ".join(f"{name} {size}" for name, size in used.items())
    total = f" = {math.prod(used.values())}" if len(used) > 1 else ""
    raise ConfigError(
        f"mesh: {product}{total} does not divide the {world_size} ranks. "
        f"Nearest that fit: {', '.join(_nearest(world_size, used))}."
    )


def _nearest(world_size: int, sizes: dict[str, int]) -> list[str]:
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    fitting = [c for c in itertools.product(divisors, repeat=len(sizes)) if world_size % math.prod(c) == 0]

    def distance(choice: tuple[int, ...]) -> tuple[float, int]:
        steps = [abs(math.log2(new / old)) for new, old in zip(choice, sizes.values(), strict=True)]
        return sum(steps), -math.prod(choice)

    best = sorted(fitting, key=distance)[:2]
    return [" × ".join(f"{name} {size}" for name, size in zip(sizes, choice, strict=True)) for choice in best]
