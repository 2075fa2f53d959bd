"""What the package's author runs. Not collected with this repository's tests: it is installed first."""

from __future__ import annotations

from pathlib import Path

import torch
from small_parts.functions import best_of_group_advantages, tilted_loss
from small_parts.tracker import TextTracker

from rl_core.algorithms import Objective
from rl_core.config import from_mapping
from rl_core.interfaces import PhaseAware, Tracker


def test_the_loss_is_one():
    Objective(tilted_loss, {"tilt": 0.5}).try_out()


def test_advantages_are_scores_minus_the_mean_of_their_group():
    advantages_N = best_of_group_advantages(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 1]), scale=2.0)
    assert advantages_N.tolist() == [1.0, -1.0, 0.0]


def test_the_tracker_writes_a_line_per_step(tmp_path: Path):
    tracker = TextTracker(from_mapping({"trainer.run_name": "sums"}), tmp_path, total_steps=1, first_step=0)
    assert isinstance(tracker, Tracker)
    assert isinstance(tracker, PhaseAware)
    tracker.phase("generate")
    tracker.log(1, {"reward/mean": 0.25})
    tracker.close()
    assert (tmp_path / "metrics.txt").read_text() == "sums: 1 steps\nstep 1: reward 0.250 after generate\n"
