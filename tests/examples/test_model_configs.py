"""The shipped configurations of public models give the parameter counts that the models' makers publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import ConfigError, PluginError
from rl_core.plugins import require_plugin
from rl_core.rank_kit.model_shapes import ModelShape, model_shape
from rl_core.rank_kit.shipped_configs import known_config, shipped_config
from rl_examples.model_configs import directory

BILLION = 10**9
PUBLISHED: dict[str, tuple[str, str | None]] = {
    "Qwen/Qwen2.5-1.5B": ("1.54", None),
    "Qwen/Qwen2.5-1.5B-Instruct": ("1.54", None),
    "Qwen/Qwen2.5-3B": ("3.09", None),
    "Qwen/Qwen2.5-3B-Instruct": ("3.09", None),
    "Qwen/Qwen2.5-7B": ("7.61", None),
    "Qwen/Qwen2.5-7B-Instruct": ("7.61", None),
    "Qwen/Qwen3-1.7B": ("1.7", None),
    "Qwen/Qwen3-30B-A3B": ("30.5", "3.3"),
    "Qwen/Qwen3-235B-A22B": ("235", "22"),
    "moonshotai/Moonlight-16B-A3B": ("16", None),
    "moonshotai/Moonlight-16B-A3B-Instruct": ("16", None),
    "zai-org/GLM-4.7-Flash": ("30", None),
}
"""Published billions of parameters, total and active per token, as on the models' cards."""
WITHOUT_EMBEDDINGS: dict[str, tuple[str, str | None]] = {
    "Qwen/Qwen2.5-1.5B": ("1.31", None),
    "Qwen/Qwen2.5-3B": ("2.77", None),
    "Qwen/Qwen2.5-7B": ("6.53", None),
    "Qwen/Qwen3-1.7B": ("1.4", None),
    "Qwen/Qwen3-30B-A3B": ("29.9", None),
    "Qwen/Qwen3-235B-A22B": ("234", None),
    "moonshotai/Moonlight-16B-A3B": ("15.29", "2.24"),
    "zai-org/GLM-4.7-Flash": ("29", "3"),
}
"""Published billions without the embedding and the output layer. Sources: the cards of Qwen; for Moonlight, table 3 of
its report (arXiv 2502.16982). The card of GLM-4.7-Flash says 30B-A3B; 29 is 30 minus the 0.6 billion of these two
layers, rounded down."""


def shape_of(name: str) -> ModelShape:
    config = known_config(name)
    assert config is not None
    return model_shape(config, name)


def require_published(count: int, published: str | None, name: str) -> None:
    """Cards round to the nearest number or down, so the count may differ by one unit of their last digit."""
    if published is not None:
        unit = 10.0 ** -len(published.partition(".")[2])
        assert abs(count / BILLION - float(published)) <= unit, f"{name}: {count:,} counted, {published}B published"


def test_every_shipped_model_has_its_published_size():
    assert {str(file.parent.relative_to(directory)) for file in directory.rglob("config.json")} == set(PUBLISHED)
    for name, (total, active) in PUBLISHED.items():
        shape = shape_of(name)
        require_published(shape.num_parameters(), total, name)
        require_published(shape.num_active_parameters(), active, name)
    for name, (total, active) in WITHOUT_EMBEDDINGS.items():
        shape = shape_of(name)
        embeddings = shape.vocabulary_parameters() * (1 if shape.is_tied else 2)
        require_published(shape.num_parameters() - embeddings, total, name)
        require_published(shape.num_active_parameters() - embeddings, active, name)


@pytest.mark.parametrize("name", sorted(name for name in PUBLISHED if "Instruct" not in name))
def test_transformers_builds_as_many_parameters_as_are_counted(name: str):
    config = AutoConfig.from_pretrained(str(directory / name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape_of(name).num_parameters()


def test_shared_experts_and_biases_of_qwen2_moe_are_counted():
    config = AutoConfig.for_model("qwen2_moe", num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = model_shape(config.to_dict(), "qwen2_moe").num_parameters()
    num_gates = 2 * config.hidden_size  # of the shared experts
    assert sum(parameter.numel() for parameter in model.parameters()) == counted + num_gates


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gemma3n_text", r"^model: its config\.json has intermediate_size=\[.*; expected one number for all layers"),
        ("bloom", r"^model: its config\.json has no 'num_attention_heads'; expected the sizes of a transformer"),
    ],
)
def test_sizes_that_are_missing_or_differ_between_layers_are_refused(kind: str, message: str):
    with pytest.raises(ConfigError, match=message):
        model_shape(AutoConfig.for_model(kind).to_dict(), "model")


def test_a_local_directory_is_never_taken_for_a_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_config("Qwen/Qwen3-1.7B") == directory / "Qwen/Qwen3-1.7B"
    own = tmp_path / "Qwen" / "Qwen3-1.7B"
    own.mkdir(parents=True)
    assert shipped_config("Qwen/Qwen3-1.7B") is None
    (own / "config.json").write_text(json.dumps({"model_type": "mine"}))
    assert known_config("Qwen/Qwen3-1.7B") == {"model_type": "mine"}
    assert shipped_config("Qwen/unknown") is None
    assert shipped_config(None) is None


def test_a_package_that_ships_something_else_is_refused(tmp_path: Path):
    with pytest.raises(PluginError, match="is not a directory"):
        require_plugin("rl_core.model_configs", tmp_path / "missing", "theirs")
    with pytest.raises(PluginError, match=r"Expected a pathlib\.Path"):
        require_plugin("rl_core.model_configs", "somewhere", "theirs")
