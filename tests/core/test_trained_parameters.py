"""Which parameters the regular expressions of `model.trainable` select, and which expressions are refused."""

from __future__ import annotations

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig, ModelConfig
from rl_core.rank_kit.trained_parameters import require_expressions, trained_parameters
from rl_core.rank_kit.worker_specs import require_training_settings
from tests.fsdp.conftest import spec_of

KEY = "trainer.policy.model.trainable"
PARAMETERS = {
    "embedding": [("model.embed_tokens.weight", "lm_head.weight")],
    "qkv": [("model.layers.0.self_attn.q_proj.weight",), ("model.layers.0.self_attn.k_proj.weight",)],
    "down": [("model.layers.0.mlp.down_proj.weight",)],
    "later down": [("model.layers.10.mlp.down_proj.weight",)],
}


@pytest.mark.parametrize(
    ("expressions", "trained"),
    [
        (["."], set(PARAMETERS)),
        (["lm_head"], {"embedding"}),
        (["embed"], {"embedding"}),
        ([r"layers\.0\."], {"qkv", "down"}),
        ([r"layers\.0\..*[qk]_proj", "^lm_head"], {"qkv", "embedding"}),
        ([r"layers\.(?!0\.)"], {"later down"}),
    ],
)
def test_a_tensor_is_trained_if_an_expression_matches_one_of_its_names(expressions: list[str], trained: set[str]):
    assert trained_parameters(expressions, PARAMETERS, KEY) == trained


@pytest.mark.parametrize(
    ("expressions", "message"),
    [
        (
            ["lm_head", r"layers\.1\.mlp\.down"],
            r"'layers.*' matches no parameter.*near names are model\.layers\.10\.mlp",
        ),
        (["^embed_tokens"], r"matches no parameter of the model; near names are model\.embed_tokens\.weight"),
        (["q_proj"], r"q_proj\.weight is trained and model.*k_proj\.weight is frozen.*one parameter \(qkv\)"),
    ],
)
def test_expressions_that_do_not_fit_the_model_are_refused(expressions: list[str], message: str):
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*{message}"):
        trained_parameters(expressions, PARAMETERS, KEY)


def test_an_empty_list_and_an_invalid_expression_are_refused_without_a_model():
    require_expressions(["a.b"], KEY)
    with pytest.raises(ConfigError, match="empty list, which would freeze every parameter"):
        require_expressions([], KEY)
    with pytest.raises(ConfigError, match=r"'layers\.\(1' is not a regular expression: missing \)"):
        require_expressions(["layers.(1"], KEY)


def test_adapters_beside_trained_parameters_are_refused():
    model = ModelConfig(path="model", lora=LoraConfig(rank=2), trainable=("norm",))
    with pytest.raises(ConfigError, match=r"trainable: with adapters \(lora\.rank=2\)"):
        require_training_settings(spec_of("model", model=model))
