"""Ranks and their coordinates, and the layers of pipeline stages."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.layout import Mesh, layers_in, moe_layers, pipeline_chunks

DENSE = ("tensor", "sequence", "context", "data", "pipeline")
EXPERT = ("expert_tensor", "expert", "expert_data", "pipeline")


@st.composite
def meshes(draw) -> Mesh:
    """Any mesh of at most 64 ranks without virtual stages."""
    world_size = draw(st.integers(1, 64))

    def divisor_of(n: int) -> int:
        return draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))

    pipeline = divisor_of(world_size)
    stage = world_size // pipeline
    sizes, left = {}, stage
    for axis in ("tensor", "context", "sequence"):
        sizes[axis] = divisor_of(left)
        left //= sizes[axis]
    expert = divisor_of(stage)
    expert_tensor = divisor_of(stage // expert)
    return Mesh(world_size=world_size, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, **sizes)


def test_a_world_size_alone_is_pure_data_parallel():
    mesh = Mesh(world_size=8)
    assert mesh.data == 8
    assert [mesh.data_rank(rank) for rank in range(8)] == list(range(8))
    assert all(mesh.returns_results(rank) for rank in range(8))
    assert mesh.micro_batch_multiple == mesh.sequence_multiple == mesh.micro_batch_tokens_multiple() == 1


def test_sixteen_ranks_have_the_coordinates_that_megatron_gives_them():
    mesh = Mesh(world_size=16, tensor=2, context=2, pipeline=2, expert=4, expert_tensor=1)
    assert mesh.groups("tensor")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("context")[:2] == [[0, 2], [1, 3]]
    assert mesh.groups("data")[:2] == [[0, 4], [1, 5]]
    assert mesh.groups("pipeline")[:2] == [[0, 8], [1, 9]]
    assert mesh.groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert mesh.groups("expert_data")[:2] == [[0, 4], [1, 5]]
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank in range(16) if mesh.returns_results(rank)] == [8, 12]


@given(meshes())
def test_coordinates_are_the_index_into_an_array_of_ranks(mesh):
    for axes in (DENSE, EXPERT):
        ranks = np.arange(mesh.world_size).reshape([getattr(mesh, axis) for axis in reversed(axes)])
        for rank in range(mesh.world_size):
            place = mesh.coordinates(rank)
            assert ranks[tuple(getattr(place, axis) for axis in reversed(axes))] == rank


@given(meshes())
def test_the_coordinates_of_a_rank_give_the_rank_back(mesh):
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert mesh.rank(**{axis: getattr(place, axis) for axis in DENSE}) == rank


@given(meshes(), st.sampled_from(sorted({*DENSE, *EXPERT})))
def test_groups_of_an_axis_partition_the_ranks_and_have_its_size(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {getattr(mesh, axis)}
    assert all([getattr(mesh.coordinates(rank), axis) for rank in group] == list(range(len(group))) for group in groups)


@given(meshes())
def test_one_last_stage_rank_per_part_of_the_batch_returns_results(mesh):
    returning = [rank for rank in range(mesh.world_size) if mesh.returns_results(rank)]
    assert [mesh.data_rank(rank) for rank in returning] == list(range(mesh.data))
    assert all(mesh.coordinates(rank).pipeline == mesh.pipeline - 1 for rank in returning)


def test_the_error_for_an_impossible_mesh_names_the_sizes_at_fault():
    with pytest.raises(ConfigError) as error:
        Mesh(world_size=16, tensor=2, pipeline=3, context=2)
    assert "tensor 2 × context 2 × pipeline 3 = 12 does not divide the 16 ranks" in str(error.value)
    assert "tensor 2 × context 2 × pipeline 4, tensor 2 × context 2 × pipeline 2" in str(error.value)
    with pytest.raises(ConfigError, match=r"mesh: expert 3 does not divide the 8 ranks"):
        Mesh(world_size=8, expert=3)
    with pytest.raises(ConfigError, match="tensor is -1"):
        Mesh(world_size=8, tensor=-1)
    with pytest.raises(ConfigError, match="virtual_pipeline 2 needs pipeline > 1"):
        Mesh(world_size=8, virtual_pipeline=2)


def test_experts_are_split_like_dense_matrices_by_default():
    assert Mesh(world_size=8, tensor=4).expert_tensor == 4
    assert Mesh(world_size=8, tensor=4, expert_tensor=1, expert=8).expert_data == 1


def test_multiples_follow_from_the_parallel_sizes():
    assert Mesh(world_size=8, tensor=4).sequence_multiple == 4
    assert Mesh(world_size=8, tensor=2, context=4).sequence_multiple == 16
    assert Mesh(world_size=8, sequence=4).micro_batch_tokens_multiple() == 4
    assert Mesh(world_size=8, tensor=2, context=2).micro_batch_tokens_multiple(rows_multiple=16) == 64
    assert Mesh(world_size=8, pipeline=4).micro_batch_multiple == 1
    assert Mesh(world_size=8, pipeline=4, virtual_pipeline=2).micro_batch_multiple == 4


# --- pipeline stages ------------------------------------------------------------------------------------------------


def test_the_middle_stages_share_the_layers_that_uneven_end_stages_leave():
    assert pipeline_chunks(27, 2, num_first=13) == [(0, 13), (13, 14)]
    assert pipeline_chunks(28, 4, num_first=6, num_last=6) == [(0, 6), (6, 8), (14, 8), (22, 6)]


def test_embedding_and_loss_take_the_place_of_a_layer():
    assert pipeline_chunks(6, 4, count_embedding=True, count_loss=True) == [(0, 1), (1, 2), (3, 2), (5, 1)]
    assert pipeline_chunks(3, 4, count_embedding=True) == [(0, 0), (0, 1), (1, 1), (2, 1)]


def test_virtual_stages_alternate():
    chunks = pipeline_chunks(8, 2, virtual_pipeline=2)
    assert chunks[0::2] == [(0, 2), (4, 2)]
    assert chunks[1::2] == [(2, 2), (6, 2)]


def test_moe_layers_of_a_stage_exclude_its_dense_layers():
    layers = moe_layers(8, num_dense_first=3)
    first, second = pipeline_chunks(8, 2)
    assert layers_in(first, layers).tolist() == [3]
    assert layers_in(second, layers).tolist() == [4, 5, 6, 7]
    assert moe_layers(6, frequency=2).tolist() == [0, 2, 4]


@given(
    num_layers=st.integers(1, 64),
    pipeline=st.integers(2, 16),
    virtual_pipeline=st.integers(1, 4),
    num_first=st.none() | st.integers(0, 12),
    num_last=st.none() | st.integers(0, 12),
    count_embedding=st.booleans(),
    count_loss=st.booleans(),
)
def test_chunks_hold_every_layer_once_in_order_or_the_split_is_refused(
    num_layers, pipeline, virtual_pipeline, **options
):
    try:
        chunks = pipeline_chunks(num_layers, pipeline, virtual_pipeline=virtual_pipeline, **options)
    except ConfigError:
        return
    assert len(chunks) == pipeline * virtual_pipeline
    assert [layer for start, count in chunks for layer in range(start, start + count)] == list(range(num_layers))
    per_stage = [sum(count for _, count in chunks[stage::pipeline]) for stage in range(pipeline)]
    per_stage[0] += options["count_embedding"]
    per_stage[-1] += options["count_loss"]
    for stage, given_count in ((0, options["num_first"]), (-1, options["num_last"])):
        assert given_count is None or per_stage[stage] == given_count
    middle = per_stage[options["num_first"] is not None : pipeline - (options["num_last"] is not None)]
    assert len(set(middle)) <= 1


def test_layers_are_split_evenly_if_and_only_if_the_chunks_divide_them():
    for num_layers, pipeline, virtual_pipeline in itertools.product(range(1, 25), range(2, 6), range(1, 4)):
        exists = num_layers % (pipeline * virtual_pipeline) == 0
        if exists:
            assert len(pipeline_chunks(num_layers, pipeline, virtual_pipeline=virtual_pipeline)) > 0
        else:
            with pytest.raises(ConfigError):
                pipeline_chunks(num_layers, pipeline, virtual_pipeline=virtual_pipeline)


def test_the_error_for_an_impossible_split_says_what_would_fit():
    with pytest.raises(ConfigError, match=r"27 layers .* over 2 stages.*Set num_first=13$"):
        pipeline_chunks(27, 2)
    with pytest.raises(ConfigError, match=r"Set num_last=6$"):
        pipeline_chunks(28, 4, num_first=6)
    with pytest.raises(ConfigError, match="stage 0 has 4 layers; expected a multiple of its 3 chunks"):
        pipeline_chunks(8, 2, virtual_pipeline=3)
    with pytest.raises(ConfigError, match="remove the set numbers, or count neither"):
        pipeline_chunks(8, 2, num_first=4, count_loss=True)
    with pytest.raises(ConfigError, match="got 1 stage, with virtual stages"):
        pipeline_chunks(8, 1, num_first=4)


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "sizes"),
    [
        (27, 2, {}),
        (28, 4, {"num_first": 6}),
        (28, 4, {"num_last": 5}),
        (28, 4, {"num_first": 6, "num_last": 5}),
        (9, 2, {"num_first": 4, "num_last": 4}),
        (10, 4, {"virtual_pipeline": 2}),
    ],
)
def test_the_split_that_the_error_suggests_is_possible(num_layers, pipeline, sizes):
    with pytest.raises(ConfigError) as error:
        pipeline_chunks(num_layers, pipeline, **sizes)
    ((name, suggested),) = re.findall(r"Set (num_first|num_last)=(\d+)$", str(error.value))
    chunks = pipeline_chunks(num_layers, pipeline, **{**sizes, name: int(suggested)})
    assert sum(count for _, count in chunks) == num_layers


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "sizes"),
    [
        (6, 4, {"count_embedding": True}),
        (6, 4, {"count_loss": True}),
        (5, 2, {"virtual_pipeline": 2}),
        (9, 2, {"virtual_pipeline": 2, "num_first": 3, "num_last": 4}),
    ],
)
def test_the_error_suggests_no_split_if_none_is_possible(num_layers, pipeline, sizes):
    with pytest.raises(ConfigError, match=r"cannot be divided evenly over (\d+ stages|the other \d+)$"):
        pipeline_chunks(num_layers, pipeline, **sizes)
