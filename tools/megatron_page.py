"""Writes docs/megatron.md: how data, layers, experts and routes are distributed over sixteen ranks.

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
from rl_megatron.checks.refusals import FIXED_FIELDS
from rl_megatron.checks.refused_models import FIXED, REFUSED, as_json
from rl_megatron.rank.route_layout import deal_padding, router_order

MESH = Mesh(world_size=16, tensor=2, pipeline=2, context=2, expert=4, expert_tensor=1, virtual_pipeline=2)
NUM_LAYERS, NUM_DENSE, NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2, 8, 2
LENGTHS = (7, 3, 10, 5)
"""Lengths of the sequences in the drawn batch."""

_INTRODUCTION = """\
# Megatron: how models and data are distributed

`trainer.strategy=megatron` trains with Megatron-Core 0.16.1 and any combination of its kinds of parallelism that is not
[refused](#what-is-refused). `make docs` generates this page with `rl_core.layout`, the functions that a run uses, so it
shows the actual layout. `rl plan RECIPE` shows the layout of your own model and mesh, with bytes, without starting a
run. [install_gpu.md](install_gpu.md) has the installation on GPUs.

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

A model is trained if Megatron-Core 0.16.1 and Megatron-Bridge 0.3.1 compute it as transformers does. This is verified
for each model: Megatron and transformers both run a small copy of the model with random weights, and their log-probs
(to 2e-5) and gradients are compared. The copy has the model's configuration, but fewer and narrower layers. This check
runs before any rank loads the model, also in a dry run and in `rl plan`. Its result is cached in `~/.cache/rl` (or
`RL_CACHE_DIR`) for the same configuration, options, versions and code. The check may be impossible before the start:
the model has not been created or downloaded, or Transformer Engine is installed but there is no GPU. In these cases a
dry run reports the obstacle, and rank 0 runs the check before any rank loads the model. `trainer.strategy=fsdp` trains
transformers' own models, so models that are refused here train there.

Cost (24 November 2026, two cores under a load of 40): a dry run of the quick start with SmolLM2-135M takes 19.1 s of
processor time the first time and 6.8 s the second (130 s and 47 s of wall-clock time on this busy machine). The check's
process takes 11 s of processor time for Qwen3-8B and 12 s for DeepSeek-V3. `make soak` tests that this process stays
below 15 s, and that a second start runs no check.

Tests compare these model types with transformers, also with 300 random configurations (of these seven types and of
three types that must be refused):

"""
_SCALINGS = "none, `linear`, `llama3`, `yarn`"
_COMPARED = {
    "llama": (_SCALINGS, "Llama, SmolLM2"),
    "mistral": ("none, `linear`, `llama3`", "Mistral without sliding windows"),
    "qwen2": (_SCALINGS, "Qwen2, Qwen2.5"),
    "qwen3": (_SCALINGS, "Qwen3"),
    "qwen3_moe": (_SCALINGS, "Qwen3-MoE, every layer with experts"),
    "deepseek_v2": (_SCALINGS, "DeepSeek-V2, V2-Lite"),
    "deepseek_v3": (_SCALINGS, "DeepSeek-V3, Moonlight, without quantisation"),
}
_MODEL_RULES = """\

This package corrects what Megatron or Bridge computes wrongly for these types: rotary frequencies of scalings (from
transformers' own functions), the score of a group of experts, the eps of latent norms, and whether Qwen3-MoE's routers
normalise before or after they choose experts. Not supported, and detected by the check: frequencies that depend on the
length of the sequence (`dynamic`, `longrope`), partial rotary embeddings, sliding windows, biases that a type does not
have by default, models whose layers differ (except DeepSeek's first dense layers), a single expert per token with
normalised weights, DeepSeek-V3 with `rope_interleave=false` or `norm_topk_prob=false`. Models of other types run if the
check passes. On GPUs, whose kernels round differently, mean differences are compared with wider limits, which have not
been calibrated on a GPU.

Refused without this check, because a small copy cannot show the problem:

"""

_REFUSED = """\
## What is refused

Settings are refused before any rank loads a model, and wrong routes when a batch arrives. The message names the key and
the numbers and, if parallel sizes do not fit, the nearest mesh that works. Refused are:

- parallel sizes whose product does not divide the number of ranks, or that do not divide the layers, attention heads,
  key/value heads, feed-forward units, experts or their units; empty chunks; a token budget smaller than the longest
  padded sequence
- `expert_tensor_parallel_size` other than `tensor_model_parallel_size` without expert parallelism: Megatron-Core 0.16.1
  sums the experts' gradients over the wrong ranks
- `sequence_parallel=false` with tensor parallelism: gradients of some norms are summed twice
- two pipeline stages with virtual stages, if sends are batched or do not overlap, or if both stages have layer counts
- the dispatcher `allgather` with pipeline stages; options whose kernels (Transformer Engine, Apex, DeepEP) are not
  installed
- adapters on latent attention's query, key and value projections, and on experts that are split, in grouped products,
  or beside dense layers or shared experts
- load-balancing losses other than `aux_loss`: the gradient of `seq_aux_loss` depends on the number of sequences in a
  micro-batch, that of `global_aux_loss` on the order of the micro-batches; `moe_z_loss_coeff` with tensor or context
  parallelism, which would scale its gradient down; losses of routers on a model without experts, or with a fused router
- router replay with a fused router or on a model without experts; routes that arrive without replay, replay without
  routes, and routes of another shape or with an expert that does not exist
- models that fail the comparison with transformers, and models that are refused without a comparison

Fields of `transformer_config_kwargs` that can have only one value:
"""


_COMPOSITION = """
## Known upstream bugs in combinations of features

[Megatron-LM issue 7452](https://github.com/NVIDIA/Megatron-LM/issues/7452) lists combinations of Megatron-Core's
features that run without an error but compute wrong results. This package does not use the following ones:

- 1 (label smoothing over a split vocabulary), 2 (labels with gathered logits): Megatron's cross entropy is not called.
  Log-probs are computed from hidden states (`model/parallel_logprobs.py`), and tests compare meshes with transformers
- 3, 4 (multi-token prediction: normalisation, recomputation): `mtp_num_layers` is refused
- 5 (padding masks of routers), 10 (their token count): `aux_loss` and the z-loss leave padding out and are weighted by
  the mini-batch's tokens here (`tests/megatron/test_auxiliary_losses.py`)
- 6 (cross attention in its own groups): all models are decoder-only, and there is one set of process groups
- 8 (the norm of attention sinks' gradients): `softmax_type` is refused, and so are models with sinks
- 9 (losses divided by one context rank's tokens): `calculate_per_token_loss=false` is refused, and losses are sums. The
  gradient of a token does not depend on its context rank, even if it is the only trained token
  (`tests/megatron/test_composition.py`)
- 11 (the output norm of gated delta nets): `qwen3_next` is refused
- 12 (layers' names in Megatron-FSDP's checkpoints): Megatron-FSDP is not used. A state has each layer's number in the
  whole model, and the conformance suite reads states on other pipeline meshes

Findings 7 and 13 and the issue's appendix could not be read when this page was written, so it is not known whether they
affect this package.

The check of a model before a run uses a small copy of the model on one rank, so it cannot detect errors that only a
combination of parallelism kinds causes. Known errors of this kind are refused ([what is refused](#what-is-refused)),
and tests compare meshes with transformers in one process: the meshes of the conformance suite ([parity.md](parity.md))
and random ones (`make soak`). A mesh that is neither refused nor compared is not verified.

Pull request 5916 fixes another bug in versions newer than the pinned one. With Transformer Engine, the pinned version's
gradient norm omits experts that tensor ranks hold unsharded, and counts the down-projections of latent attention once
per tensor rank. `rank/shard_marks.py` corrects the parameter attributes from which the norm is computed
(`tests/megatron/test_gradient_norm.py`).
"""


def page() -> str:
    """The whole page."""
    drawn = (_ranks(), _layers(), _data(), _tokens(), _experts(), _routes())
    models = (_MODELS + _compared() + _MODEL_RULES + _fields_of_models(), _refused_types())
    sections = (*drawn, *models, _REFUSED, _fixed_fields(), _COMPOSITION)
    return _INTRODUCTION + _keys() + "\n" + "\n".join(sections)


def _keys() -> str:
    return "".join(
        f"| {f'`{key}`' if key else '(the remaining ranks)'} | {what} | {getattr(MESH, size)} |\n"
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
        "Rank numbers vary fastest along tensor, then context, data and pipeline, so the ranks that communicate most "
        "are closest.",
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
        "chunks in order and passes each stage twice. A stage gets and replays the routes of its own layers, "
        "which are numbered as in the whole model.",
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
        f"A mini-batch of {len(LENGTHS)} sequences (tokens: {lengths}). All ranks run the same number of "
        f"micro-batches, a multiple of {MESH.micro_batch_multiple} because stages are interleaved. A micro-batch "
        "without sequences contains only padding.",
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
        f"{2 * MESH.context - 1} − r of every sequence; tensor ranks get the same input tokens and hold contiguous "
        "slices of the activations between matrix products (sequence parallelism).",
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
        "experts and sum their gradients.",
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
        "With `moe_enable_routing_replay`, a rank's routers use the entries of `routed_experts` [token, layer, "
        "choice] for the rank's tokens and layers. A token without a known route follows the router's own choice, and "
        "recomputation repeats that choice. The last token of a sequence has no route, because it was never an input "
        "of the engine. Padding tokens are "
        f"spread evenly over expert ranks and their experts, {EXPERTS_PER_TOKEN} experts per token, and are excluded "
        "from all statistics. The ranks of stage 0 and data part 0, for the micro-batch above:",
        _table(["rank", "routes of", "padding goes to"], rows),
    )


def _section(title: str, text: str, drawing: str) -> str:
    return f"## {title}\n\n{textwrap.fill(text, 120)}\n\n{drawing}"


def _compared() -> str:
    return _table(
        ["`model_type`", "rotary scaling", "models"], [[f"`{kind}`", *row] for kind, row in _COMPARED.items()]
    )


def _fields_of_models() -> str:
    return _table(
        ["field", "value", "because"],
        ([f"`{name}`", f"`{as_json(rule.values[0])}`", rule.reason] for name, rule in FIXED.items()),
    )


def _refused_types() -> str:
    types: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        types.setdefault(reason, []).append(f"`{name}`")
    lines = [
        textwrap.fill(f"- types that {why}: {', '.join(names)}", 120, subsequent_indent="  ")
        for why, names in types.items()
    ]
    return "\n".join(["Model types that are known to fail:", "", *lines, ""])


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
