"""With `trainable`, Megatron trains like transformers whose other parameters are frozen, on meshes that split the model
and on stages without a trained parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import Variant, open_case
from tests.megatron import test_conformance
from tests.megatron.test_conformance import CP, EP, ETP, FOUR_LAYERS, PP, QWEN_MOE, TP, UNTIED, VPP, mesh, routed

PRELOADED["rl_megatron.rank.worker"] = None
LAYER = (r"layers\.1\.",)
RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("variant", "trainable"),
    [
        pytest.param(mesh(2, **{TP: 2}), (r"layers\.1\.", "norm"), id="tensor"),
        pytest.param(mesh(2, **{PP: 2}), LAYER, id="a stage without trained parameters"),
        pytest.param(mesh(2, **{PP: 2}), (r"layers\.0\.",), id="a last stage without trained parameters"),
        pytest.param(mesh(2, {}, **{PP: 2}), ("lm_head",), id="a tied embedding, named as the output layer"),
        pytest.param(mesh(2, {}, **{PP: 2}), ("down_proj",), id="a frozen tied embedding"),
        pytest.param(attrs.evolve(mesh(1), spec=RECOMPUTED), LAYER, id="recomputation"),
        pytest.param(attrs.evolve(mesh(2, **{TP: 2}), spec=RECOMPUTED), LAYER, id="recomputation, tensor"),
        pytest.param(mesh(2, FOUR_LAYERS, **{PP: 2, VPP: 2}), (r"layers\.2\.",), id="virtual stages"),
        pytest.param(mesh(2), (r"^model\.norm\.",), id="a data rank without trained parameters"),
        pytest.param(routed(4, **{TP: 2, PP: 2, EP: 2, ETP: 1}), (r"experts", "gate.weight"), id="experts"),
        pytest.param(routed(2, **{CP: 2}), (r"layers\.1\..*_proj",), id="context"),
    ],
)
def test_only_the_named_parameters_are_trained(variant: Variant, trainable: tuple[str, ...], tmp_path: Path):
    with open_case(megatron, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        test_conformance.TestMegatron().check_frozen(case, trainable)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainable": ("q_proj",)}, r"q_proj\.weight is trained and .*k_proj\.weight is frozen.*in one parameter"),
        ({"trainable": (r"experts\.5\.",)}, r"experts\.5\..* is trained and .*experts\.0\..* is frozen"),
        ({"trainable": (r"layers\.7\.",)}, r"model\.trainable: .*matches no parameter.*near names are model\.layers\."),
    ],
)
def test_expressions_that_do_not_fit_megatrons_parameters_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    variant = routed(2, **{EP: 2}) if "experts" in message else Variant(checkpoint=UNTIED)
    with open_case(megatron, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        model = attrs.evolve(case.spec.model, **changes)
        with pytest.raises(ConfigError, match=message):
            case.start(attrs.evolve(case.spec, model=model))


def test_a_frozen_router_is_named_once(tmp_path: Path):
    with open_case(megatron, MegatronOptions(), Variant(checkpoint=QWEN_MOE), tmp_path) as case:
        model = ModelConfig(path=case.spec.model.path, trainable=LAYER)
        spec = attrs.evolve(case.spec, model=model, options=MegatronOptions(freeze_moe_router=True))
        with pytest.raises(ConfigError, match=r"freeze_moe_router: got true, but .*model\.trainable decides"):
            megatron.validate(spec, 1)
