"""Parts of this backend and its fixes of other libraries are needed: if one is removed, training fails or is wrong.

`rl_megatron.patches` names the two fixes that are not tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import WorkerError
from rl_core.interfaces import Worker
from rl_megatron import MegatronOptions
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE, backward
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case
from rl_transformers.testing.ranks import RankGroup
from tests.forced_numbers import gradient_error
from tests.megatron.changed import ChangedBackend

PRELOADED["rl_megatron.rank.worker"] = None
TP, CP, EP = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
DENSE = {"tie_word_embeddings": False}
QWEN_MOE = DENSE | {"family": "qwen3_moe"}
DEEPSEEK = DENSE | {"family": "deepseek_v3"}
OTHER_BASE = DENSE | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}


def start(
    change: str, tmp_path: Path, request: pytest.FixtureRequest, checkpoint: dict[str, Any] = DENSE, **options: Any
) -> tuple[Case, RankGroup]:
    """Starts one rank, or two if there are `options`, with the change that `change` names."""
    world_size = 2 if options else 1
    variant = Variant(world_size=world_size, checkpoint=checkpoint)
    opened = open_case(ChangedBackend(change=change), MegatronOptions(**options), variant, tmp_path, timeout_s=120.0)
    case = opened.__enter__()
    request.addfinalizer(lambda: opened.__exit__(None, None, None))
    return case, case.start()


def backward_error(case: Case, group: RankGroup) -> float:
    """The error of the gradients after one backward pass by the ranks and by transformers."""
    group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    backward(case.reference, case.batch, LOSS)
    return gradient_error(group.gradients(), case.reference.gradients())


@pytest.mark.parametrize(
    ("change", "checkpoint", "sizes"),
    [
        ("split_contiguously", DENSE, {CP: 2}),
        ("leave_out_scatter", DENSE, {TP: 2}),
        ("leave_out_rotary_base", OTHER_BASE, {}),
        ("leave_out_rotary_base", DEEPSEEK, {}),
        ("leave_out_padding_token", DENSE, {}),
    ],
)
def test_gradients_are_wrong_without_the_fix(change, checkpoint, sizes, tmp_path, request):
    case, group = start(change, tmp_path, request, checkpoint, **sizes)
    assert backward_error(case, group) > 0.01


def test_gradients_of_norms_without_their_mark_differ_between_ranks(tmp_path, request):
    case, group = start("leave_out_norm_mark", tmp_path, request, **{TP: 2})
    with pytest.raises(AssertionError, match="rank 1 has a different gradient"):
        backward_error(case, group)


def test_without_initialisation_the_gradient_norm_misses_other_ranks(tmp_path, request):
    case, group = start("leave_out_initialisation", tmp_path, request, **{TP: 2})
    assert backward_error(case, group) < 1e-5
    found, expected = group.optim_step().grad_norm, case.reference.optim_step().grad_norm
    assert found < 0.95 * expected


def test_without_global_expert_numbers_scores_are_wrong(tmp_path, request):
    case, group = start("leave_out_expert_names", tmp_path, request, QWEN_MOE, **{EP: 2})
    scores = group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
    own = case.reference.forward(case.batch, [range(case.batch.num_sequences)], temperature=TEMPERATURE)["logprobs"]
    assert (scores - own).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "checkpoint", "fault", "call"),
    [
        ("leave_out_expert_gathering", QWEN_MOE, "invalid literal for int", RankGroup.weights),
        ("leave_out_router_gating", QWEN_MOE, "te_general_gemm", backward_error),
    ],
)
def test_megatron_fails_without_the_fix(change, checkpoint, fault, call, tmp_path, request):
    case, group = start(change, tmp_path, request, checkpoint)
    with pytest.raises(WorkerError, match=fault):
        call(case, group) if call is backward_error else call(group)


def test_deepseek_needs_an_apex_kernel_without_the_fix(tmp_path, request):
    with pytest.raises(WorkerError, match="gradient_accumulation_fusion set to True"):
        start("leave_out_gradient_kernel_check", tmp_path, request, DEEPSEEK)


def test_latent_attention_is_not_built_without_the_fix(tmp_path, request):
    with pytest.raises(WorkerError, match=r"isinstance\(\) arg 2|linear_kv_down_proj|linear_q_down_proj"):
        start("leave_out_latent_attention", tmp_path, request, DEEPSEEK)


def test_without_the_fix_a_rank_without_sequences_makes_the_balancing_gradient_nan(tmp_path, request):
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    case, group = start("leave_out_balancing_without_tokens", tmp_path, request, QWEN_MOE, **balanced)
    group.forward_backward(case.batch.select([1]), LIMITS, LOSS, temperature=TEMPERATURE)
    assert group.optim_step().skipped


def test_without_the_fix_a_state_of_torchs_optimizer_is_not_read(tmp_path, request):
    case, group = start("leave_out_loading_of_torch_adam", tmp_path, request)
    step(group, case)
    group.call(Worker.save_state, case.directory / "state")
    with pytest.raises(WorkerError, match="KeyError: 'step'"):
        group.call(Worker.load_state, case.directory / "state")


def test_without_the_number_of_steps_torchs_adam_fails(tmp_path, request):
    case, group = start("leave_out_steps", tmp_path, request)
    with pytest.raises(WorkerError, match="KeyError: 'step'"):
        step(group, case)


def step(group: RankGroup, case: Case) -> None:
    group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    group.optim_step()
