"""Implements `rl try ENVIRONMENT --with RECIPE`: plays a few episodes with the recipe's model and prints them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from rl_core import config as configuration
from rl_core.cli.episodes import show_episodes
from rl_core.reports.jsonl import read_rows

NUM_PROMPTS = 3


def play_with(recipe: str, environment: str, overrides: Sequence[str]) -> int:
    """Plays the first rows of the recipe's data in the environment; returns the exit code.

    Raises:
        RLError: the environment cannot be played as requested, or the engine fails.
    """
    from rl_core.trainer.run import run_generation

    one_sample = "generator.n_samples_per_prompt=1"
    loaded = configuration.load(recipe, [one_sample, *overrides, f"environment.env_class={environment}"])
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "episodes.jsonl"
        run_generation(loaded, output, limit=NUM_PROMPTS)
        rows = list(read_rows(output))
        if any(row.get("turns") for row in rows):
            show_episodes(output)
        for row in rows:
            if row.get("failure"):
                click.echo(f"prompt {row['group']}, sample {row['sample']} failed: {row['failure']}", err=True)
            elif not row.get("turns"):
                click.echo(
                    f"prompt {row['group']}, sample {row['sample']}: reward {row['reward']:g}\n{row['response']}\n"
                )
    return 0
