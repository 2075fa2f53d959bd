"""Finds this rank's part of every trained parameter, so that noise can be added to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from rl_core.rank_kit.perturbation import Piece
from rl_megatron.model.chunks import is_vocabulary
from rl_megatron.rank.checkpoint import sharded_parameters


def trained_pieces(chunks: Sequence[Any]) -> Iterator[Piece]:
    """Yields the pieces of this rank's trained parameters, each once. Padding rows of a vocabulary are left out."""
    vocab_size = chunks[0].config.vocab_size
    shards = {id(parameter): shard for parameter, shard in sharded_parameters(chunks) if parameter.requires_grad}
    trained = {id(p) for chunk in chunks for p in chunk.parameters() if p.requires_grad}
    assert trained == shards.keys(), "a trained parameter has no place in a checkpoint"
    for shard in shards.values():
        for part in _parts(shard):
            assert part.data is not None
            num_prepended = part.prepend_axis_num  # number of leading axes that index experts
            experts, offset = part.global_offset[:num_prepended], part.global_offset[num_prepended:]
            tensor = part.data.detach()
            if is_vocabulary(part.key):
                tensor = tensor[: max(0, vocab_size - offset[0])]  # the rest is padding
            if tensor.numel():
                name = ".".join(map(str, (part.key, *experts)))
                yield Piece(tensor=tensor, name=name, offset=offset, shape=part.global_shape[num_prepended:])


def _parts(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """Yields `sharded` itself. For a fused parameter, yields its parts instead, because they have different offsets in
    the whole tensor."""
    if isinstance(sharded, ShardedTensor):
        yield sharded
    else:
        yield from (part for part in nested_values({"": sharded.build()}) if isinstance(part, ShardedTensor))
