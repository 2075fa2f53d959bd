"""A path that cannot be accessed gives one error, in a dry run too. If a key sets the path, the error names the key."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import read_config
from tests.core.conftest import Run

LONG = "a" * 300
OVERRIDES = {
    "trainer.run_dir": (f"trainer.run_dir={LONG}",),
    "trainer.ckpt_path": (f"trainer.ckpt_path={LONG}",),
    "trainer.export_path": (f"trainer.export_path={LONG}",),
    "trainer.resume_path": (f"trainer.resume_path={LONG}", "trainer.resume_mode=from_path"),
    "data.train_data": (f"data.train_data=[{LONG}]",),
    "data.val_data": (f"data.val_data=[{LONG}]",),
    "trainer.policy.model.path": (f"trainer.policy.model.path={LONG}",),
}


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("key", OVERRIDES)
def test_a_name_that_is_too_long_is_one_error_with_its_key(rl: Run, key: str, is_dry: bool):
    code, _, said = rl("train", "small", *OVERRIDES[key], *["--dry-run"] * is_dry)
    assert code == 2, said
    assert said.startswith(f"error: {key}: {LONG} cannot be "), said
    assert "File name too long" in said
    assert "Traceback" not in said


def test_a_name_that_is_too_long_below_a_missing_folder_is_refused_too(rl: Run):
    code, _, said = rl("train", "small", f"trainer.export_path=missing/{LONG}", "--dry-run")
    assert code == 2, said
    assert said.startswith(f"error: trainer.export_path: missing/{LONG} cannot be created: File name too long"), said


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.ckpt_path"])
def test_a_link_to_a_missing_directory_is_refused(rl: Run, key: str):
    Path("link").symlink_to("/unmounted")
    code, _, said = rl("train", "small", f"{key}=link/run", "--dry-run")
    assert code == 2, said
    assert said.startswith(f"error: {key}: link/run cannot be created: {Path.cwd() / 'link'} is a link to /unmounted, ")
    assert "/link is a link to /unmounted, which does not exist" in rl("doctor", "--run-dir", "link/run")[1]


def test_a_recipe_name_or_output_path_that_is_too_long_is_one_error(rl: Run):
    for source in (LONG, f"{LONG}.yaml"):
        code, _, said = rl("train", source)
        assert code == 2, said
        assert said.startswith("error: "), said
        assert said.count("error: ") == 1, said
        assert "Traceback" not in said
    code, _, said = rl("generate", "small", "--output", LONG)
    assert code == 2, said
    assert f"--output: {LONG} cannot be created: File name too long" in said


def test_a_model_whose_name_is_too_long_has_no_readable_configuration():
    with pytest.raises(ConfigError, match=r"cannot be read as a model's configuration .*File name too long"):
        read_config(LONG)


WITHOUT_RIGHTS = """
import os, sys
import rl_core.config.file_checks, rl_core.config.function_params, rl_core.data_sets
import rl_core.rank_kit.model_shapes, rl_core.trainer.before.data
from rl_core.config import from_mapping
from rl_core.config.file_checks import check_files
from rl_core.errors import ConfigErrors

closed, unread, listed = sys.argv[1:]
config = from_mapping({
    "trainer.run_dir": f"{closed}/run",
    "trainer.policy.model.path": f"{closed}/model",
    "trainer.resume_path": f"{closed}/run/step_000001",
    "trainer.resume_mode": "from_path",
    "trainer.critic.model.path": listed,
    "data.train_data": [f"{closed}/train.jsonl", unread],
})
if os.geteuid() == 0:  # root may read everything
    os.setgid(65534)
    os.setuid(65534)
try:
    check_files(config)
except ConfigErrors as found:
    print(*found.errors, sep="\\n")
"""
"""Checks a run's files as a user who can neither enter the folders `closed` and `listed` nor read the file `unread`."""


def test_every_path_that_the_user_may_not_read_is_named_with_its_key():
    with tempfile.TemporaryDirectory() as folder:  # other users may enter this folder, unlike pytest's own
        above = Path(folder)
        closed, unread, listed = above / "closed", above / "unread.jsonl", above / "listed"
        closed.mkdir()
        listed.mkdir()
        unread.touch()
        for path, mode in ((above, 0o755), (closed, 0o000), (unread, 0o000), (listed, 0o744)):
            path.chmod(mode)
        command = [sys.executable, "-c", WITHOUT_RIGHTS, str(closed), str(unread), str(listed)]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        found = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, check=False)
        for path in (closed, listed):
            path.chmod(0o755)
    denied = "cannot be read: Permission denied. Set a path that this user can read"
    assert found.stdout.splitlines() == [
        f"data.train_data: {closed}/train.jsonl {denied}",
        f"data.train_data: {unread} {denied}",
        f"trainer.policy.model.path: {closed}/model {denied}",
        f"trainer.critic.model.path: {listed} {denied}",
        f"trainer.resume_path: {closed}/run/step_000001 {denied}",
        f"trainer.run_dir: {closed}/run cannot be created: {closed} is not a writable directory",
    ], found.stderr
