"""The gradient norm counts each weight once, however Transformer Engine's modules mark their weights."""

from __future__ import annotations

import pytest

from rl_core.interfaces import Worker
from rl_megatron import DdpOptions, MegatronOptions
from rl_transformers.testing.backend import LIMITS, PRELOADED, backward
from rl_transformers.testing.cases import LOSS, TEMPERATURE, Variant, open_case
from tests.megatron.changed import ChangedBackend

PRELOADED["rl_megatron.rank.worker"] = None
MESH = MegatronOptions(
    tensor_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
    # In this model, buckets then have far more padding than gradients.
    ddp_config=DdpOptions(pad_buckets_for_high_nccl_busbw=True),
)


def relative_error(change: str, directory) -> float:
    """The relative error of the gradient norm. The model has latent attention and experts, so that tensor ranks hold
    both replicated weights and whole experts."""
    backend = ChangedBackend(change=change)
    variant = Variant(world_size=2, options=MESH, checkpoint={"family": "deepseek_v3"})
    with open_case(backend, MegatronOptions(), variant, directory, timeout_s=120) as case:
        group = case.start()
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        backward(case.reference, case.batch, LOSS)
        expected = case.reference.optim_step().grad_norm
        return abs(group.call(Worker.optim_step)[0].grad_norm / expected - 1)


@pytest.mark.parametrize("change", ["_nothing", "mark_as_transformer_engine"])
def test_the_gradient_norm_is_that_of_one_process(tmp_path, change):
    assert relative_error(change, tmp_path) < 1e-5


def test_transformer_engines_marks_give_a_wrong_gradient_norm(tmp_path):
    assert relative_error("keep_transformer_engines_marks", tmp_path) > 1e-3
