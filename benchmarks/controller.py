"""The controller's share of the step time: all but generation, scoring, training, publishing, evaluation and saving.

Runs some steps of the quick start's GRPO on its untrained model and prints each phase's share. Goal: under 3 % for the
controller.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from rl_core.config import from_mapping
from rl_core.trainer.run import run_training
from rl_examples.arithmetic import write_data, write_model
from rl_examples.quickstart import recipe


@click.command()
@click.option("--steps", default=20, show_default=True, help="Measured steps, after two warm-up steps.")
def main(steps: int) -> None:
    """Prints each phase's share of the step time."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_data(directory / "train.parquet", directory / "held_out.parquet")
        write_model(directory / "model", seed=0)
        changes = {
            "data.train_data": [str(directory / "train.parquet")],
            "data.val_data": [],
            "trainer.policy.model.path": str(directory / "model"),
            "trainer.run_dir": str(directory / "run"),
            "trainer.max_training_steps": steps + 2,
            "trainer.ckpt_interval": 10,
        }
        run_training(from_mapping({**recipe.config, **changes}))
        rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()][2:]
    total = sum(row["time/step"] for row in rows)
    names = sorted({name for row in rows for name in row if name.startswith("time/")} - {"time/step"})
    print(f"{len(rows)} steps, {total / len(rows):.3f} s a step")
    for name in names:
        share = sum(row.get(name, 0.0) for row in rows) / total
        print(f"{name.removeprefix('time/'):12s} {share:7.2%}")


if __name__ == "__main__":
    main()
