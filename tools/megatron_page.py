"""docs/megatron.md: how data, layers, experts and routes lie over sixteen ranks, drawn by `rl_core.layout` itself.

python -m tools.megatron_page > docs/megatron.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from rl_core.layout import (
    Mesh,
    context_positions,
    even_slice,
    layers_in,
    moe_layers,
    packed_layout,
    pipeline_chunks,
    plan_micro_batches,
)
from rl_core.layout.ranges import ranges
from rl_megatron.checks.accepted_models import ACCEPTED, EVERY_TYPE, REFUSED
from rl_megatron.checks.model_checks import as_json, given
from rl_megatron.checks.refusals import FIXED_FIELDS
from rl_megatron.routes.route_layout import deal_padding, router_order

MESH = Mesh(world_size=16, tensor=2, pipeline=2, context=2, expert=4, expert_tensor=1, virtual_pipeline=2)
NUM_LAYERS, NUM_DENSE, NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2, 8, 2
LENGTHS = (7, 3, 10, 5)
"""Of the batch that is drawn."""

_INTRODUCTION = """\
# Megatron: what lies where

`trainer.strategy=megatron` trains through Megatron-Core 0.16.1, with every parallelism alone or together. This page is
written by `make docs` from `rl_core.layout`, the functions that a run lays its batches out with: what it draws is what
happens. `rl plan RECIPE` shows the same for a model and mesh of yours, with bytes, and starts nothing. Installing it on
GPUs: [install_gpu.md](install_gpu.md).

| key in `trainer.policy.megatron_config` | splits | here |
|---|---|---|
"""
_KEYS = {
    "tensor_model_parallel_size": ("every matrix, and between matrices the tokens (sequence parallelism)", "tensor"),
    "pipeline_model_parallel_size": ("the layers", "pipeline"),
    "virtual_pipeline_model_parallel_size": ("a stage's layers into chunks", "virtual_pipeline"),
    "context_parallel_size": ("every sequence", "context"),
    "expert_model_parallel_size": ("the experts of a layer", "expert"),
    "expert_tensor_parallel_size": ("every expert's matrices", "expert_tensor"),
    "": ("the batch, and the optimizer's state", "data"),
}

_MODELS = """\
## Models

A model is trained if tests have compared what Megatron-Core 0.16.1 and Megatron-Bridge 0.3.1 make of it with what
transformers computes: a type of this table, as its configuration (`config.json`) says. `trainer.strategy=fsdp` trains
the others. The configuration is checked before any process is started, in a dry run too, if the model is a local
directory or in the cache of the hub; else by the rank that fetches it.
"""
_MODEL_RULES = """\
- `llama3` has Llama 3's own numbers: `low_freq_factor` 1, `high_freq_factor` 4, `original_max_position_embeddings` 8192
- `yarn` of latent attention has both `mscale` and `mscale_all_dim` or neither, no `attention_factor`, no
  `truncate=false`
- a `deepseek_v3` router that chooses from `topk_group` of `n_group` groups has `topk_group = n_group`, or
  `num_experts_per_tok // topk_group = 2`: Megatron sums that many scores of a group, transformers always two. It
  chooses at least two experts, beside at least one shared one
- a `qwen3_moe` router with `norm_topk_prob=true` chooses at least two experts

Fields of every type, and why. Log-probs are those of tiny random models in float32, where rounding is 1e-6:
"""

_REFUSED = """\
## What is refused

Before any process is started, with the key, the numbers and the nearest mesh that works:

- sizes whose product does not divide the ranks; layers, attention heads, key/value heads, feed-forward units, experts
  or their units that the sizes do not divide; a chunk without a layer; a token budget below the longest sequence as it
  is padded
- `expert_tensor_parallel_size` other than `tensor_model_parallel_size` without expert parallelism: Megatron-Core 0.16.1
  sums the experts' gradients over the wrong ranks
- `sequence_parallel=false` with tensor parallelism: gradients of some norms are summed twice
- two pipeline stages with virtual stages and batched sends, or with both a first and a last count
- `seq_aux_loss` with tensor parallelism (its gradients are not one rank's), or with packed sequences (it takes a
  micro-batch for a sequence)
- router replay with a fused router, with a capacity factor, or on a model without experts; routes that arrive without
  replay, replay without routes, and routes of another shape or with an expert that does not exist
- models other than those above; `norm_topk_prob=false` of Qwen3-MoE without `moe_router_pre_softmax=true`, which makes
  Megatron's routers do the same

Fields of `transformer_config_kwargs` that can have one value only:
"""


def page() -> str:
    """The whole page."""
    drawn = (_ranks(), _layers(), _data(), _tokens(), _experts(), _routes())
    models = (_MODELS, _accepted(), _MODEL_RULES, _fields_of_models(), _refused_types())
    sections = (*drawn, *models, _REFUSED, _fixed_fields())
    return _INTRODUCTION + _keys() + "\n" + "\n".join(sections)


def _keys() -> str:
    return "".join(
        f"| {f'`{key}`' if key else '(what is left of the ranks)'} | {what} | {getattr(MESH, size)} |\n"
        for key, (what, size) in _KEYS.items()
    )


def _ranks() -> str:
    rows = [
        [
            f"stage {stage}, data {data}",
            *(str(MESH.rank(tensor=t, context=c, data=data, pipeline=stage)) for c, t in _ct()),
        ]
        for stage in range(MESH.pipeline)
        for data in range(MESH.data)
    ]
    columns = ["", *(f"context {c} tensor {t}" for c, t in _ct())]
    return _section(
        "Ranks",
        "Neighbouring ranks differ by tensor, then context, then data, then pipeline: what talks most sits closest.",
        _table(columns, rows),
    )


def _layers() -> str:
    chunks = pipeline_chunks(NUM_LAYERS, MESH.pipeline, virtual_pipeline=MESH.virtual_pipeline)
    experts = moe_layers(NUM_LAYERS, num_dense_first=NUM_DENSE)
    rows = []
    for number, chunk in enumerate(chunks):
        layers = range(chunk.start, chunk.start + chunk.num_layers)
        drawn = " ".join(f"{layer}{'*' if layer in experts else ''}" for layer in layers)
        stage = number % MESH.pipeline
        first, last = "embedding " * (number == 0), " output" * (number == len(chunks) - 1)
        replayed = " ".join(map(str, layers_in(chunk, experts).tolist())) or "none"
        ranks = _ranges(rank for rank in range(MESH.world_size) if MESH.coordinates(rank).pipeline == stage)
        rows.append([str(number), str(stage), ranks, f"{first}{drawn}{last}", replayed])
    return _section(
        "Layers",
        f"{NUM_LAYERS} layers, those with experts marked `*` (the first {NUM_DENSE} are dense). Data flows through the "
        "chunks in order and passes each stage twice. A stage replays the routes of its own layers, by their number in "
        "the whole model.",
        _table(["chunk", "stage", "ranks", "layers", "routes of layers"], rows),
    )


def _plan() -> list[list[np.ndarray]]:
    return plan_micro_batches(
        LENGTHS,
        num_data_ranks=MESH.data,
        max_sequences=1,
        multiple=MESH.micro_batch_multiple,
        sequence_multiple=MESH.sequence_multiple,
    )


def _data() -> str:
    plan = _plan()
    rows = []
    for data, micro_batches in enumerate(plan):
        ranks = _ranges(rank for rank in range(MESH.world_size) if MESH.data_rank(rank) == data)
        drawn = "; ".join(
            " + ".join(f"{_name(s)} ({LENGTHS[s]})" for s in micro_batch.tolist()) for micro_batch in micro_batches
        )
        rows.append([str(data), ranks, drawn])
    lengths = ", ".join(f"{_name(i)} {length}" for i, length in enumerate(LENGTHS))
    return _section(
        "Data",
        f"A mini-batch of {len(LENGTHS)} sequences (tokens: {lengths}). Every rank runs as many micro-batches, "
        f"a multiple of {MESH.micro_batch_multiple} because stages are interleaved; one without sequences is padding.",
        _table(["data part", "ranks", "micro-batches"], rows),
    )


def _layout():
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    return packed_layout(
        offsets,
        [1, 3],
        sequence_multiple=MESH.sequence_multiple,
        total_multiple=MESH.micro_batch_tokens_multiple(),
    )


def _cells(index: Iterable[int]) -> str:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    cells = []
    for token in index:
        sequence = int(np.searchsorted(offsets, token, side="right")) - 1
        cells.append(" ." if token < 0 else f"{_name(sequence)}{token - offsets[sequence]}")
    return " ".join(cells)


def _name(sequence: int) -> str:
    return "abcdefgh"[sequence]


def _tokens() -> str:
    layout = _layout()
    lines = [f"whole micro-batch       {_cells(layout.index)}"]
    for context in range(MESH.context):
        held = context_positions(layout.boundaries, context, MESH.context)
        lines += ["", f"context {context}               {_cells(layout.index[held])}"]
        for tensor in range(MESH.tensor):
            part = layout.index[held][even_slice(len(held), tensor, MESH.tensor)]
            lines.append(f"context {context} tensor {tensor}      {_cells(part)}")
    return _section(
        "Tokens",
        f"Sequences b and d as one packed micro-batch; `.` is padding, to a multiple of {MESH.sequence_multiple} (two "
        "chunks for each context rank, each of which the tensor ranks can split). Context rank r takes chunks r and "
        f"{2 * MESH.context - 1} − r of every sequence; tensor ranks enter the same tokens and hold contiguous parts "
        "between matrices.",
        "\n".join(["```", *lines, "```\n"]),
    )


def _experts() -> str:
    local = NUM_EXPERTS // MESH.expert
    rows = [
        [
            str(expert),
            _ranges(range(expert * local, (expert + 1) * local)),
            *(_ranges(r for r in range(MESH.world_size) if _holds(r, expert, stage)) for stage in range(MESH.pipeline)),
        ]
        for expert in range(MESH.expert)
    ]
    return _section(
        "Experts",
        f"In a layer with experts the {MESH.world_size // MESH.pipeline} ranks of a stage are regrouped: "
        f"{MESH.expert} expert ranks hold {local} of the {NUM_EXPERTS} experts each. Ranks in one cell hold the same "
        "ones and sum their gradients.",
        _table(["expert rank", "experts", *(f"ranks of stage {stage}" for stage in range(MESH.pipeline))], rows),
    )


def _holds(rank: int, expert: int, stage: int) -> bool:
    place = MESH.coordinates(rank)
    return place.expert == expert and place.pipeline == stage


def _routes() -> str:
    layout = _layout()
    rows = []
    for context, tensor in _ct():
        rank = MESH.rank(tensor=tensor, context=context)
        held = context_positions(layout.boundaries, context, MESH.context)
        index = router_order(layout.index[held][None], tensor, MESH.tensor)
        dealt = deal_padding(
            int((index < 0).sum()),
            first=tensor + MESH.tensor * context,
            num_experts=NUM_EXPERTS,
            expert_ranks=MESH.expert,
            experts_per_token=EXPERTS_PER_TOKEN,
        )
        padding = ", ".join("+".join(map(str, experts)) for experts in dealt.tolist()) or "none"
        rows.append([str(rank), _cells(index[index >= 0]) or "none", padding])
    return _section(
        "Routes",
        "With `moe_enable_routing_replay` a rank's routers take, of `routed_experts` [token, layer, choice], the rows "
        "of the tokens that they see and the layers that the rank holds. A token whose route is not known (the last "
        "one of a sequence was never an input of the engine) goes where the router sends it, and in recomputation "
        f"there again. Padding is dealt over expert ranks and their experts, {EXPERTS_PER_TOKEN} for each token, and "
        "counts in no statistic. The ranks of stage 0 and data part 0, for the micro-batch above:",
        _table(["rank", "routes of", "padding goes to"], rows),
    )


def _section(title: str, text: str, drawing: str) -> str:
    return f"## {title}\n\n{textwrap.fill(text, 120)}\n\n{drawing}"


def _accepted() -> str:
    rows = []
    for name, model_type in ACCEPTED.items():
        fixed = (given(field, rule.values[0]) for field, rule in model_type.fixed.items())
        rows.append(
            [
                f"`{name}`",
                f"`{model_type.architecture}`",
                ", ".join(f"`{kind}`" for kind in model_type.rotary),
                ", ".join(f"`{field}`" for field in fixed),
            ]
        )
    return _table(["`model_type`", "class", "rotary scaling", "with"], rows)


def _fields_of_models() -> str:
    return _table(
        ["field", "value", "because"],
        ([f"`{name}`", f"`{as_json(rule.values[0])}`", rule.reason] for name, rule in EVERY_TYPE.items()),
    )


def _refused_types() -> str:
    types: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        types.setdefault(reason, []).append(f"`{name}`")
    lines = [
        textwrap.fill(f"- which {why}: {', '.join(names)}", 120, subsequent_indent="  ") for why, names in types.items()
    ]
    return "\n".join(["Of other types it is known why they are refused:", "", *lines, ""])


def _fixed_fields() -> str:
    rows = ([f"`{name}`", f"`{value}`", reason] for name, (value, reason) in FIXED_FIELDS.items())
    return _table(["field", "value", "because"], rows)


def _ct() -> list[tuple[int, int]]:
    return [(context, tensor) for context in range(MESH.context) for tensor in range(MESH.tensor)]


def _ranges(numbers: Iterable[int]) -> str:
    return ranges(numbers, dash="–", separator=", ")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
