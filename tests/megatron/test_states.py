"""Training with FusedAdam continues from a saved state, up to rounding. Only the first data-parallel rank gathers the
optimizer's state. If one rank cannot write, all ranks raise the same error and stay usable.

Transformer Engine's FusedAdam runs on GPUs only, so a stand-in replaces it (`fused_adam.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.errors import DiskFullError, StorageError, WorkerError
from rl_core.interfaces import Worker
from rl_megatron import MegatronOptions
from rl_transformers.testing.backend import PRELOADED, backward
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case
from rl_transformers.testing.rank_process import SuiteHost
from rl_transformers.testing.ranks import RankGroup
from tests.megatron.probes import probed
from tests.megatron.test_needed import start, step

PRELOADED["rl_megatron.rank.worker"] = None
TP = "tensor_model_parallel_size"
WEIGHT_ERROR = 2e-5
"""As in the conformance suite: float32 rounding, which Adam enlarges where gradients are small."""


def error_of_weights(case: Case, group: RankGroup) -> float:
    found = group.weights()
    expected = {name: p.detach() for name, p in case.reference.model.named_parameters()}
    return max(float((found[name] - weight).abs().max()) for name, weight in expected.items())


def error_after_resume(change: str, tmp_path: Path, request: pytest.FixtureRequest) -> float:
    """The error of the weights after ranks train, load the state from before their first step, and train again."""
    case, group = start(change, tmp_path, request, **{TP: 2})
    group.call(Worker.save_state, case.directory / "state")
    for _ in range(3):
        step(group, case)
    group.call(Worker.load_state, case.directory / "state")
    for _ in range(2):
        step(group, case)
        backward(case.reference, case.batch, LOSS)
        case.reference.optim_step()
    return error_of_weights(case, group)


def test_fused_adam_resumes_with_its_own_count_of_steps(tmp_path, request):
    assert error_after_resume("use_fused_adam", tmp_path, request) < WEIGHT_ERROR


def test_without_its_step_count_fused_adam_continues_differently(tmp_path, request):
    assert error_after_resume("use_fused_adam_without_steps", tmp_path, request) > 10 * WEIGHT_ERROR


def test_without_moments_fused_adam_is_not_saved_before_its_first_step(tmp_path, request):
    with pytest.raises(WorkerError, match="KeyError: 'exp_avg'"):
        error_after_resume("use_fused_adam_without_states", tmp_path, request)


def test_only_the_first_data_parallel_rank_gathers_the_optimizer_state(tmp_path):
    with open_case(probed, MegatronOptions(), Variant(world_size=2), tmp_path, timeout_s=120) as case:
        group = case.start()
        sizes = group.call(SuiteHost.ask, "gathered_optimizer_bytes")
        num_elements = sum(p.numel() for p in case.reference.model.parameters())
    assert sizes == [3 * 4 * num_elements, 0], (
        "the first rank must gather main parameters and two moments in float32, the second nothing"
    )


def test_if_one_rank_cannot_write_every_rank_raises_and_the_next_state_is_written(tmp_path, request):
    case, group = start("write_to_two_bad_disks", tmp_path, request, **{TP: 2})
    bad = case.directory / "lost" / "state", case.directory / "full"
    for save in (Worker.save_state, Worker.start_saving):
        for directory, error in zip(bad, (StorageError, DiskFullError), strict=True):
            with pytest.raises(error, match=f"{directory.name}: could not be written"):
                group.call(save, directory)
    group.call(Worker.save_state, case.directory / "state")
    assert (case.directory / "state" / "state.json").is_file()
