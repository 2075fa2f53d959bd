"""docs/first_gpu_run.md shows only existing commands, and its benchmark measures nothing without a GPU."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from rl_core import config as configuration
from rl_core.errors import ConfigError
from tests.gpu.page import PAGE, ROOT, published_rows, steps
from tests.gpu.test_first_run import SAYS, activation


def require_real(words: list[str]) -> None:
    """Fails unless the command and what it names exist: a script and its options, a recipe and its keys, or a target of
    `make`. A command of pip must be in docs/install_gpu.md."""
    command, *arguments = Path(words[0]).name, *words[1:]
    if command == "python":
        script, *options = arguments
        text = (ROOT / script).read_text()
        assert all(f'"{option}"' in text for option in options if option.startswith("--")), words
    elif command == "pip":
        assert shlex.join(words) in (ROOT / "docs/install_gpu.md").read_text(), words
    elif command == "rl" and arguments[0] == "train":
        configuration.load(arguments[1], arguments[2:])
    elif command == "make":
        assert re.search(rf"^{re.escape(arguments[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    else:
        assert [command, *arguments] == ["rl", "doctor"] or words[:3] == ["python3.11", "-m", "venv"], words


def test_every_command_of_the_page_is_real():
    found = [shlex.split(command) for commands in steps().values() for command in commands]
    assert len(found) == 11
    for words in found:
        require_real(words)


def test_the_gpu_tests_run_the_steps_of_the_page():
    assert list(steps()) == [1, *SAYS]
    assert len(steps()[6]) == 4
    assert activation() == ["source ../gpu-env/bin/activate"]
    renumbered = PAGE.replace("  # 8\n", "  # 9\n")
    assert list(steps(renumbered)) != [1, *SAYS]


@pytest.mark.parametrize(
    "line",
    [
        "python benchmarks/none.py",
        "python benchmarks/gpu_train_step.py --none",
        "pip install rl",
        "rl train quickstart no.key=1",
        "rl doktor",
        "lr doctor",
        "make none",
        "python3.11 -m none",
    ],
)
def test_a_command_that_does_not_exist_fails_this_check(line: str):
    with pytest.raises((AssertionError, ConfigError, FileNotFoundError)):
        require_real(shlex.split(line))


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    path = ROOT / "benchmarks/gpu_published_times.py"
    spec = importlib.util.spec_from_file_location("gpu_published_times", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_published_times"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_shows_the_rows_of_the_benchmark(benchmark_module: ModuleType):
    rows = [f"| `{r.name}` | {r.num_gpus} | {r.training_s:g} s | {r.scoring_s:g} s |" for r in benchmark_module.ROWS]
    assert [line for line in PAGE.splitlines() if re.match(r"\| `qwen", line)] == rows
    assert published_rows() == [row.name for row in benchmark_module.ROWS]


@pytest.mark.slow
def test_without_a_gpu_the_benchmark_is_skipped(benchmark_module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(benchmark_module.main, [])
    assert result.exit_code == 0
    assert result.output.startswith("skipped: needs CUDA")


@pytest.mark.slow
def test_one_model_is_refused_for_rows_of_several_recipes(benchmark_module: ModuleType, tmp_path: Path):
    result = CliRunner().invoke(benchmark_module.main, ["--tiny", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "--model is the model of one recipe; choose the rows of this recipe with --row" in result.output


@pytest.mark.slow
def test_a_row_of_several_machines_is_not_run_on_one(benchmark_module: ModuleType, tmp_path: Path):
    row = benchmark_module.ROWS[-1]
    said = benchmark_module.line_of(row, 8, 1, None, None, False, tmp_path)
    assert said.startswith("skipped: needs --gpus 32 of a Ray cluster")


@pytest.mark.slow
def test_the_benchmark_runs_on_a_tiny_model(benchmark_module: ModuleType):
    result = CliRunner().invoke(benchmark_module.main, ["--tiny", "--steps", "1", "--row", "qwen2_5_3b:fsdp"])
    assert re.search(r"qwen2_5_3b:fsdp +runs: \d+ tokens, nothing is measured", result.output), result.output
