"""Plug-ins that were written against the first contracts: installed as packages, they pass their suites and train."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from rl_examples.arithmetic import write_data, write_model
from tests.installing import COMMANDS, installed_in, run

HERE = Path(__file__).parent
DIGESTS = {
    "digit_game": "79c0108b9c64f688c1c6c65a5be00c68210724f5b0e793dd0b011808b62de529",
    "drop_box": "5dde5df8894b22039f5ff46dab17c4da1b1eea87527cca782a3b8d85c12afda8",
    "naive_engine": "62b3a076b02afc978016c34495105d90b876dd8c359ca59f7e42a615eade1d06",
    "one_turn": "d47a16bf7a854d4053dc94107ab3bcbf86aa5f71454ad2f94556282987639047",
    "plain_ddp": "3a7eda0ea5d5846c41a31363dcaa53d83d73366faa7e58d6d66a7b7fc20dbbec",
    "small_parts": "721e2924b3d46e64b533f1e78995aa6eb31b2d12dc74f2e9bcb682d6e11ccac0",
}
"""SHA-256 of each package as it was frozen."""
EVENTS = """start 1 to 2
groups 1: 32 trajectories
step 1: True
checkpoint 1: step_000001
groups 2: 32 trajectories
step 2: True
checkpoint 2: step_000002
end 2
"""


def files_of(package: Path) -> list[Path]:
    """The Python and TOML files of a package; files that Python or an installer adds do not count."""
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".toml"))


def digest(package: Path) -> str:
    """SHA-256 of the names and contents of a package's files."""
    state = hashlib.sha256()
    for path in files_of(package):
        state.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return state.hexdigest()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which all frozen packages are installed beside everything else."""
    folder = tmp_path_factory.mktemp("frozen")
    return {**os.environ, **installed_in(folder, *(HERE / name for name in DIGESTS))}


def test_nothing_of_a_frozen_package_was_changed():
    packages = {path.parent.name: digest(path.parent) for path in HERE.glob("*/pyproject.toml")}
    assert packages == DIGESTS, "a frozen package stands for one that cannot be edited: fix rl_core instead (README.md)"


def test_a_change_of_a_frozen_package_is_seen(tmp_path: Path):
    copy = shutil.copytree(HERE / "digit_game", tmp_path / "digit_game")
    module = copy / "digit_game" / "environment.py"
    module.write_text(module.read_text().replace("options.get", "options.pop"))
    assert digest(copy) != digest(HERE / "digit_game")


@pytest.mark.slow
def test_frozen_plugins_are_listed_with_their_packages_and_none_is_broken(environment: dict[str, str]):
    printed = run([COMMANDS / "rl", "plugins"], environment, HERE)
    listed = [tuple(line.split()[:3]) for line in printed.splitlines()]
    for name, package in (
        ("plain_ddp", "plain-ddp"),
        ("naive", "naive-engine"),
        ("drop_box", "drop-box"),
        ("one_turn", "one-turn"),
        ("digit_game", "digit-game"),
        ("tilted", "small-parts"),
        ("best_of_group", "small-parts"),
        ("text", "small-parts"),
    ):
        assert (name, package, "1.0") in listed
    assert "BROKEN" not in printed


@pytest.mark.slow
def test_frozen_plugins_pass_their_suites(environment: dict[str, str], tmp_path: Path):
    options = ["-v", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", f"--basetemp={tmp_path / 's'}"]
    # Rounding in bfloat16 does not depend on the contract; `tests/third_party_backend` measures it on the same backend.
    options += ["-k", "not bfloat16_errs"]
    suites = [HERE / name / "conformance.py" for name in DIGESTS]
    printed = run([sys.executable, "-m", "pytest", *options, *suites], environment, HERE)
    passed = "\n".join(line for line in printed.splitlines() if " PASSED" in line)
    assert [name for name in DIGESTS if f"{name}/conformance.py::" not in passed] == []


@pytest.mark.slow
def test_frozen_plugins_train_together_under_the_names_that_a_user_writes(environment: dict[str, str], tmp_path: Path):
    write_data(tmp_path / "train.parquet", tmp_path / "held_out.parquet")
    write_model(tmp_path / "model", seed=0)
    overrides = {
        "trainer.strategy": "plain_ddp",
        "generator.inference_engine.backend": "naive",
        "generator.inference_engine.weight_sync_backend": "drop_box",
        "generator.type": "one_turn",
        "environment.env_class": "digit_game",
        "trainer.algorithm.policy_loss_type": "tilted",
        "trainer.algorithm.advantage_estimator": "best_of_group",
        "trainer.algorithm.advantage_params.scale": 2.0,
        "trainer.logger": "[text]",
        "trainer.callbacks": "[small_parts.callback:NotesEvents]",
        "trainer.use_sample_packing": "false",
        "trainer.policy.optimizer_config.scheduler": "constant_with_warmup",
        "trainer.policy.model.path": tmp_path / "model",
        "data.train_data": f"[{tmp_path / 'train.parquet'}]",
        "data.val_data": f"[{tmp_path / 'held_out.parquet'}]",
        "trainer.run_dir": tmp_path / "run",
        "trainer.max_training_steps": 2,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 4,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    run([COMMANDS / "rl", "train", "quickstart", *arguments], environment, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert len(steps) == 2
    assert all(row["policy/grad_norm"] > 0 for row in steps), "rewards differ, so there is something to learn"
    events = (tmp_path / "run" / "events.txt").read_text()
    assert events == EVENTS
    assert "step 2: reward" in (tmp_path / "run" / "metrics.txt").read_text()
    # This holds only if the transport sends the trained weights to the engine after every step.
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in steps)
