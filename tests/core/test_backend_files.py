"""Files that backends write: a model's weights, configuration and tokenizer, and the list that makes a saved state
complete."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig

from rl_core.errors import CheckpointError, DiskFullError
from rl_core.rank_kit.model_files import write_config, write_weights, writing_model
from rl_core.rank_kit.state_files import require_complete_state, write_state_list
from rl_transformers.pretrained import read_generation, write_tokenizer
from rl_transformers.testing.models import make_checkpoint

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def test_weights_that_fit_into_one_file_are_one_file(tmp_path):
    write_weights(WEIGHTS.items(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), WEIGHTS, rtol=0, atol=0)


def test_weights_of_several_files_are_found_by_their_index(tmp_path):
    write_weights(WEIGHTS.items(), tmp_path, max_file_bytes=16)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in WEIGHTS.values())
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    torch.testing.assert_close(found, WEIGHTS, rtol=0, atol=0)


def test_the_generation_config_of_a_model_is_read_by_directory_and_by_name(tmp_path, monkeypatch):
    snapshot, refs = (tmp_path / "models--some--model" / name for name in ("snapshots/" + "a" * 40, "refs"))
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for model in ("some/model", str(snapshot)):
        (snapshot / "generation_config.json").unlink(missing_ok=True)
        assert read_generation(model) is None
        (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
        assert read_generation(model).eos_token_id == [7, 8]


def test_a_generation_config_is_written_even_if_transformers_would_not_save_it(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}))
    generation = GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="temperature"):
        generation.save_pretrained(tmp_path / "refused")
    write_config(LlamaConfig(), tmp_path / "saved", dtype=torch.bfloat16, generation=generation)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    assert GenerationConfig.from_pretrained(tmp_path / "saved").to_diff_dict() == generation.to_diff_dict()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_running_out_of_disk_space_for_the_tokenizer_is_a_disk_full_error(file: str, tmp_path):
    """The tokenizers library writes tokenizer.json and raises a plain Exception; transformers writes the other file."""
    model, directory = make_checkpoint(tmp_path / "model"), tmp_path / "saved"
    directory.mkdir()
    (directory / file).symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="No space left on device"), writing_model(directory):
        write_tokenizer(str(model), directory)


def test_a_state_is_complete_only_if_all_its_files_are_as_written(tmp_path):
    (tmp_path / "rank0").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"state\.json: missing or incomplete"):
        require_complete_state(tmp_path)
    write_state_list(tmp_path, ["rank0"], steps_done=3)
    assert require_complete_state(tmp_path) == 3
    (tmp_path / "rank0").write_bytes(b"12245")
    with pytest.raises(CheckpointError, match="rank0 is not what was written: its checksum is"):
        require_complete_state(tmp_path)
    (tmp_path / "rank0").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="rank0 has 4 bytes; expected 5 bytes"):
        require_complete_state(tmp_path)
    (tmp_path / "rank0").unlink()
    with pytest.raises(CheckpointError, match="rank0 is missing; expected 5 bytes"):
        require_complete_state(tmp_path)
