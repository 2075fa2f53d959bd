"""Only the first export of weights finds out how tensors are assembled; later exports reuse the result. Frozen routers
have no gradients."""

from __future__ import annotations

import attrs
import pytest

from rl_core.interfaces import LoraConfig
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Variant, open_case
from rl_transformers.testing.rank_process import SuiteHost
from tests.kept_extras import require_kept_extras
from tests.megatron.probes import probed

PRELOADED["rl_megatron.rank.worker"] = None
MOE = {"family": "qwen3_moe", "tie_word_embeddings": False}
STAGES = MegatronOptions(pipeline_model_parallel_size=2)
ATTENTION = LoraConfig(rank=2, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.mark.parametrize("lora", [LoraConfig(), ATTENTION], ids=["full", "adapters"])
def test_stages_exchange_objects_in_the_first_export_only(tmp_path, lora):
    variant = Variant(world_size=2, checkpoint=MOE, options=STAGES)
    with open_case(probed, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        group = case.start(attrs.evolve(case.spec, model=attrs.evolve(case.spec.model, lora=lora)))
        for first, *later in group.call(SuiteHost.ask, "object_collectives_of_exports", 3):
            assert first > 20, f"control: got {first} exchanges of objects in the first export; expected more than 20"
            assert later == [0, 0]


def test_routers_that_are_not_trained_have_no_gradients(tmp_path):
    frozen = MegatronOptions(freeze_moe_router=True)
    with open_case(probed, frozen, Variant(checkpoint=MOE), tmp_path, timeout_s=120) as case:
        group = case.start()
        before = group.weights()
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        gradients = group.gradients()
        group.optim_step()
        after = group.weights()
    assert all(gradient.any() for gradient in gradients.values())
    assert gradients.keys() == {name for name in after if "mlp.gate." not in name} < after.keys()
    for name, weight in after.items():
        assert weight.equal(before[name]) == (name not in gradients), name


def test_later_exports_of_weights_and_gradients_reuse_the_first_exports_layout(tmp_path):
    """Runs in bfloat16, where gradients are float32 but weights are bfloat16."""
    variant = Variant(world_size=2, checkpoint=MOE, options=STAGES)
    with open_case(probed, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        group = case.start(attrs.evolve(case.spec, bf16=True))
        before = group.weights()
        for _ in range(2):
            group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
            gradients = group.gradients()
            assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "norm" in name)
            group.optim_step()
        after = group.weights()
        assert any(not after[name].equal(before[name]) for name in after)
        assert group.call(SuiteHost.ask, "stale_export_tensors") == [[], []]


@pytest.mark.parametrize("is_tied", [True, False])
def test_tensors_that_are_not_trained_are_saved_unchanged(is_tied, tmp_path):
    variant = Variant(world_size=2, checkpoint={"tie_word_embeddings": is_tied}, options=STAGES)
    with open_case(megatron, STAGES, variant, tmp_path, timeout_s=120) as case:
        require_kept_extras(case, megatron, 2)
