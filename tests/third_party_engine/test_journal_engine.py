"""An engine, a generator and a command in a third-party package are checked, listed, documented, and used to train."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_examples.arithmetic import write_data, write_model
from tests.installing import COMMANDS, installed_in, run

HERE = Path(__file__).parent
ENGINE = "generator.inference_engine"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that make the package importable, in addition to all installed packages."""
    return {**os.environ, **installed_in(tmp_path_factory.mktemp("package"), HERE)}


def refusal(arguments: list[str], environment: dict[str, str]) -> str:
    """Runs `rl`, requires that it refuses the arguments, and returns its message."""
    result = subprocess.run(
        [COMMANDS / "rl", *arguments], cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, ""), result
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_plug_in_imports_only_documented_names():
    for file in sorted((HERE / "journal_engine").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_"):
                module = importlib.import_module(str(node.module))
                promised = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
                assert {name.name for name in node.names} <= set(promised), (
                    f"{file.name} imports a name that {node.module} does not export"
                )
                assert str(node.module).count(".") <= 1, f"{file.name}: {node.module} is not a documented module"


def test_the_plug_ins_parts_are_listed_with_their_package(environment: dict[str, str]):
    listed = " ".join(run([COMMANDS / "rl", "plugins"], environment, HERE).split())
    for name in ("journal", "short"):
        assert f"{name} journal-engine 1.0 journal_engine." in listed
    assert re.search(r"journal +\(of journal-engine 1\.0\)", run([COMMANDS / "rl", "--help"], environment, HERE))


REFUSED = {
    "journal_every=x": f"error: {ENGINE}.journal_every: got 'x' (str, command line); expected int.",
    "journal_every=0": f"error: {ENGINE}.journal_every: got 0; expected at least 1",
    "journal_evry=2": f"error: {ENGINE}.journal_evry: unknown key (command line, with backend=journal). Did you mean "
    f"{ENGINE}.journal_every?",
    "journal=/tmp/x": f"error: {ENGINE}.journal: got /tmp/x; expected a name in the run's directory",
    "num_engines=2": f"error: {ENGINE}.num_engines: got 2, but there is only one local engine",
}
"""Override → the message that refuses it."""
DRY_RUNS = f"""
import sys
from rl_core.cli.app import main
for override in sys.argv[1:]:
    try:
        main(["train", "quickstart", "--dry-run", "{ENGINE}.backend=journal", f"{ENGINE}.{{override}}"])
    except SystemExit as ended:
        print(f"{{override}} ended with code {{ended.code}}", file=sys.stderr)
"""
"""One process makes all dry runs, because each process takes seconds to start."""


def test_wrong_values_of_the_plug_ins_keys_are_refused(environment: dict[str, str]):
    command = [sys.executable, "-c", DRY_RUNS, *REFUSED]
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    rest = result.stderr
    for override, message in REFUSED.items():
        said, end, rest = rest.partition(f"{override} ended with code 2\n")
        assert end, f"{override} was not refused: {said}"
        assert message in said


def test_the_plug_ins_keys_are_shown_and_documented(environment: dict[str, str]):
    keys = [f"{ENGINE}.backend=journal", f"{ENGINE}.journal_every=3", "generator.type=short"]
    shown = run([COMMANDS / "rl", "config", "quickstart", *keys], environment, HERE)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert rows[f"{ENGINE}.journal_every"] == "3 command line"
    assert rows[f"{ENGINE}.journal"] == '"requests.jsonl" default'
    assert rows["generator.answer_tokens"] == "2 default"
    page = run([sys.executable, "-m", "rl_core.config.reference"], environment, HERE)
    assert (
        f"### {ENGINE}, backend=journal\n\nThe local engine, with a journal of its requests. Keys of journal-" in page
    )
    assert "| `journal_every` | int, at least 1 | `1` | Only every n-th request is recorded. |" in page
    assert (
        "| `answer_tokens` | int, at least 1 | `2` | Maximum tokens of an answer, even if the sampling parameters "
        "allow more. |"
    ) in page


def test_the_plug_in_trains_the_quick_starts_model(environment: dict[str, str], tmp_path: Path):
    write_data(tmp_path / "train.parquet", tmp_path / "held_out.parquet")
    write_model(tmp_path / "model", seed=0)
    overrides = {
        f"{ENGINE}.backend": "journal",
        f"{ENGINE}.journal_every": 4,
        "generator.type": "short",
        "generator.answer_tokens": 3,
        "trainer.policy.model.path": tmp_path / "model",
        "data.train_data": f"[{tmp_path / 'train.parquet'}]",
        "data.val_data": "[]",
        "trainer.run_dir": tmp_path / "run",
        "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 4,
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    run([COMMANDS / "rl", "train", "quickstart", *arguments], environment, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 2
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)
    asked = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    of_proof = [request for request in asked if request["sample"].startswith("proof-")]
    assert len(of_proof) == 16 // 4, "the proof before the first step continues 16 sequences"
    asked = [request for request in asked if request not in of_proof]
    assert (len(asked), {request["max_tokens"] for request in asked}) == (2 * 8 * 4 // 4, {3})
    assert run([COMMANDS / "rl", "journal", tmp_path / "run"], environment, HERE) == "20 requests\n"
    assert "there is no journal" in refusal(["journal", str(tmp_path)], environment)
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "    journal_every: 4\n" in written
    assert "  answer_tokens: 3\n" in written
