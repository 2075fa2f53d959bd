"""An error about a model's files names the first file that cannot be opened, whatever the reason."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_core.rank_kit.weight_buckets import broken_weights_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two files of weights."""
    for name in ("a", "b"):
        save_file({"weight": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_the_first_truncated_file_is_named(model: Path):
    assert broken_weights_file(model) is None
    file = model / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert broken_weights_file(model) == file


@pytest.mark.parametrize("num_free", [1, 2])
def test_too_many_open_files_do_not_hide_the_error_that_is_reported(model: Path, num_free: int):
    """With one free descriptor, safetensors can open a file, and torch cannot."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(num_free):
            os.close(held.pop())
        found = broken_weights_file(model)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == (model / "a.safetensors" if num_free == 1 else None)
