"""Draws docs/quickstart.png, the picture in the README, from the run directory of a finished quick start.

make quickstart && .venv/bin/python -m tools.quickstart_picture runs/quickstart docs/quickstart.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl_core.errors import DataError
from rl_core.reports.curves import Point, smoothed
from rl_core.reports.jsonl import read_rows
from rl_core.reports.report_charts import is_fraction, points_of, values_of
from rl_core.reports.trackers import METRICS_FILE_NAME


def curve_png(run_dir: Path, path: Path) -> None:
    """Draws reward and held-out accuracy over the steps, as a picture for a README.

    Raises:
        DataError: the run logged neither of them.
    """
    rows = list(read_rows(run_dir / METRICS_FILE_NAME))
    reward, accuracy = points_of(rows, "reward/mean"), points_of(rows, "eval/accuracy")
    if not reward and not accuracy:
        raise DataError(
            f"{run_dir / METRICS_FILE_NAME}: no row has reward/mean or eval/accuracy, so there is nothing to draw"
        )
    figure = Figure(figsize=(8, 3.8), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if reward:
        axes.plot(*_axes_of(reward), color="#d9702a", lw=1, alpha=0.4)
        axes.plot(*_axes_of(smoothed(reward)), color="#d9702a", lw=2, label="reward (sampled)")
    if accuracy:
        axes.plot(*_axes_of(accuracy), color="#2b67d1", lw=2, marker="o", ms=5, label="held-out accuracy")
    if is_fraction(values_of([*reward, *accuracy])):
        axes.set_ylim(0, 1.02)
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, metadata={"Software": None})


def _axes_of(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [float("nan") if value is None else value for _, value in points]


if __name__ == "__main__":
    curve_png(Path(sys.argv[1]), Path(sys.argv[2]))
