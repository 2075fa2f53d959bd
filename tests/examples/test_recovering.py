"""An engine that restarts without the current weights gets them while the run waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.config import Config
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from tests.examples import recovering_engine


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_current_version_is_published_again(small_run: Callable[..., Config], tmp_path: Path, max_staleness: int):
    config = small_run(
        tmp_path,
        generator__inference_engine__backend="tests.examples.recovering_engine:recovering",
        trainer__max_staleness=max_staleness,
        trainer__generation_timeout_s=60.0,
    )
    run_training(config)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if row["step"] > 0] == list(range(1, 7))
    lost = recovering_engine.LOST_AT_VERSION
    assert recovering_engine.updates == [0, 1, lost, lost, 3, 4, 5, 6]
