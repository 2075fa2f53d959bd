"""Plays the 200 disturbed episodes of `many_episodes` on the local engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from rl_rollout.transports.files import files
from rl_transformers.testing.inference import make_bench
from rl_transformers.testing.models import make_checkpoint
from tests.rollout.many_episodes import play_disturbed, require_exact_accounting


@pytest.mark.slow
def test_every_one_of_two_hundred_episodes_is_accounted_for_despite_pauses_and_aborts(tmp_path: Path):
    path = str(make_checkpoint(tmp_path / "model"))

    def load() -> Any:
        return load_model(path, dtype="float32", device="cpu", model_kwargs={}), None

    with asyncio.Runner() as runner:
        engine = runner.run(LocalEngine.start(load, max_num_seqs=64, timeout_s=250, num_threads=1))
        bench = make_bench(engine, files, path, runner)
        played = runner.run(play_disturbed(bench, first_version=0))
        runner.run(engine.close())
    require_exact_accounting(bench, *played)
