"""The charts of a run's report: which metrics share a chart, how they are drawn, and how they are labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from markupsafe import Markup

from rl_core.reports.curves import Point, Series, line_chart, stacked_chart
from rl_core.reports.progress import readable

Row = Mapping[str, Any]
"""A row of `metrics.jsonl`: metric → value; the value is None if it was not finite."""

PHASES = ("generate", "score", "train", "publish", "evaluate", "checkpoint", "controller")
_MAX_ENVIRONMENT_CHARTS = 12


@attrs.frozen(kw_only=True)
class Chart:
    """A drawing with its title, description and legend."""

    title: str
    about: str
    """Explanation of the numbers in one or two sentences."""
    legend: Sequence[tuple[int, str, str]]
    """(colour, label, value) of each curve. The value is the latest one or, in the chart of times, a phase's share."""
    svg: Markup
    note: str = ""


@attrs.frozen(kw_only=True)
class RunCharts:
    """All charts of a run, in the order of the page."""

    learning: Sequence[Chart]
    """If the run logs a held-out loss: a chart of losses. Otherwise rewards and held-out accuracy: in one chart if all
    values are between 0 and 1, else in two. Without accuracy: a chart of rewards."""
    others: Sequence[Chart]
    time: Chart | None
    absent: Sequence[str]
    """Titles of the charts that are missing because the run logged no finite value of their metrics."""


@attrs.frozen(kw_only=True)
class _Plan:
    title: str
    about: str
    curves: Mapping[str, str]
    """Metric → label."""
    is_log: bool = False


_PLANS = (
    _Plan(
        title="KL to the reference",
        about="How far the policy has moved from the reference, per token, in nats.",
        curves={"policy/kl": "KL"},
    ),
    _Plan(
        title="Entropy",
        about="Entropy of the policy's distribution, per token, in nats.",
        curves={"policy/entropy": "entropy"},
    ),
    _Plan(
        title="Gradient norm",
        about="L2 norm before clipping, averaged over the optimizer steps that were not skipped.",
        curves={"policy/grad_norm": "norm"},
    ),
    _Plan(
        title="Engine against trainer",
        about="Difference between the log-probs of engine and trainer, for the same tokens and weights. Only rounding "
        "errors are expected.",
        curves={"rollout/logprob_diff_max": "largest", "rollout/logprob_diff_mean": "mean"},
        is_log=True,
    ),
    _Plan(
        title="Response length",
        about="Sampled tokens per sample, over all its turns.",
        curves={"rollout/response_length": "training", "eval/response_length": "held out"},
    ),
    _Plan(
        title="Clip fraction",
        about="Fraction of the tokens whose gradient the clip removes or, with cispo, limits.",
        curves={"policy/clip_fraction": "fraction"},
    ),
    _Plan(
        title="Critic",
        about="Fraction of the returns' variance that the critic explains. 0: no better than predicting their mean.",
        curves={"critic/explained_variance": "explained"},
    ),
)


def run_charts(rows: Sequence[Row]) -> RunCharts:
    """The charts whose metrics these rows of `metrics.jsonl` contain."""
    learning = _learning_charts(rows)
    time = _time_chart(rows)
    planned = {plan.title: _planned_chart(rows, plan) for plan in _PLANS}
    drawn = {"Reward and held-out accuracy": learning, **planned, "Time per phase": time}
    return RunCharts(
        learning=learning,
        others=[*(chart for chart in planned.values() if chart), *_overlap_charts(rows), *_environment_charts(rows)],
        time=time,
        absent=[title for title, chart in drawn.items() if not chart],
    )


def points_of(rows: Sequence[Row], metric: str) -> list[Point]:
    """(step, value) for all rows with the metric; empty if no value is finite."""
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    return points if any(value is not None for _, value in points) else []


def values_of(points: Sequence[Point]) -> list[float]:
    """The values that are finite."""
    return [value for _, value in points if value is not None]


def percent(value: float) -> str:
    """`94.6 %` for 0.946."""
    return f"{100 * value:.1f} %"


def is_fraction(values: Sequence[float]) -> bool:
    """Whether all values are between 0 and 1, so that they can be shown in per cent."""
    return all(0 <= value <= 1 for value in values)


def _planned_chart(rows: Sequence[Row], plan: _Plan) -> Chart | None:
    series = _series(rows, plan.curves)
    return _line_chart(plan.title, plan.about, series, is_log=plan.is_log) if series else None


def _learning_charts(rows: Sequence[Row]) -> list[Chart]:
    accuracy = _series(rows, {"eval/accuracy": "held-out accuracy"}, first_color=1)
    reward = _series(rows, {"reward/mean": "reward (sampled)"}, first_color=2)
    held_out = _series(rows, {"eval/reward": "held-out reward"}, first_color=3)
    if accuracy and held_out and held_out[0].points == accuracy[0].points:
        held_out = []
    if points_of(rows, "eval/loss"):
        losses = _series(rows, {"policy/loss": "training", "eval/loss": "held out"})
        return [_line_chart("Loss", "The loss on training rows and on held-out rows.", losses)]
    together = [*accuracy, *reward, *held_out]
    if accuracy and is_fraction([value for one in together for value in values_of(one.points)]):
        title, about = "Held-out accuracy", "Accuracy on held-out problems."
        if reward:
            title, about = (
                "Reward and held-out accuracy",
                "Reward of the training samples, and accuracy on held-out problems.",
            )
        return [_line_chart(title, about, together, in_percent=True)]
    charts = []
    if reward or held_out:
        charts.append(_line_chart("Reward", "Mean over samples.", [*reward, *held_out]))
    if accuracy:
        charts.append(_line_chart("Held-out accuracy", "Accuracy on held-out problems.", accuracy))
    return charts


def _environment_charts(rows: Sequence[Row]) -> list[Chart]:
    """The environment's metrics in training and on held-out problems. A run on stored responses has no environment, so
    its charts show the metrics that the loss reports."""
    found = {name for row in rows for name in row if name.startswith(("environment/", "eval/"))}
    names = {name.partition("/")[2] for name in found if not name.startswith("eval/failed/")}
    charts = []
    for name in sorted(names - {"reward", "accuracy", "response_length", "failed", "loss", "entropy"}):
        series = _series(rows, {f"environment/{name}": "training", f"eval/{name}": "held out"})
        about = "Measured by the environment."
        if not points_of(rows, f"environment/{name}") and not points_of(rows, "eval/reward"):
            series, about = (
                _series(rows, {f"policy/{name}": "training", f"eval/{name}": "held out"}),
                "Reported by the loss.",
            )
        if series:
            charts.append(_line_chart(name.replace("_", " "), about, series))
    return charts[:_MAX_ENVIRONMENT_CHARTS]


def _overlap_charts(rows: Sequence[Row]) -> list[Chart]:
    """The staleness of samples, if some were sampled with older weights; and the fractions of a step in which training
    and generation were idle."""
    charts = []
    staleness = {"rollout/staleness_max": "oldest", "rollout/staleness_mean": "mean"}
    if any(values_of(points_of(rows, "rollout/staleness_max"))):
        about = "Number of weight versions between the start of a group and its training."
        charts.append(_line_chart("Staleness", about, _series(rows, staleness)))
    waits = {"time/generate": "training", "time/generation_idle": "generation"}
    timed = [row for row in rows if row.get("time/step") and all(row.get(name) is not None for name in waits)]
    if timed:
        series = [
            Series(label=label, points=[(row["step"], row[name] / row["time/step"]) for row in timed], color=color)
            for color, (name, label) in enumerate(waits.items(), start=1)
        ]
        about = "Fraction of a step in which training waited for groups, and fraction in which no group was generated."
        charts.append(_line_chart("Idle", about, series, in_percent=True))
    return charts


def _time_chart(rows: Sequence[Row]) -> Chart | None:
    timed = [row for row in rows if any(f"time/{phase}" in row for phase in PHASES)]
    layers = [
        Series(label=phase, points=[(row["step"], row.get(f"time/{phase}") or 0.0) for row in timed], color=color)
        for color, phase in enumerate(PHASES, start=1)
        if points_of(rows, f"time/{phase}")
    ]
    if not layers:
        return None
    totals = [sum(values_of(one.points)) for one in layers]
    whole = sum(totals) or 1.0
    title = "Time per phase"
    return Chart(
        title=title,
        about="Seconds per step. The legend shows each phase's share.",
        legend=[(one.color, one.label, percent(total / whole)) for one, total in zip(layers, totals, strict=True)],
        svg=Markup(stacked_chart(title, layers)),
    )


def _series(rows: Sequence[Row], curves: Mapping[str, str], first_color: int = 1) -> list[Series]:
    """The curves whose metrics were logged. A curve with values at half of the steps or fewer is marked as sparse."""
    found = [(label, points) for metric, label in curves.items() if (points := points_of(rows, metric))]
    return [
        Series(label=label, points=points, color=color, is_sparse=2 * len(points) <= len(rows))
        for color, (label, points) in enumerate(found, start=first_color)
    ]


def _line_chart(
    title: str, about: str, series: Sequence[Series], *, is_log: bool = False, in_percent: bool = False
) -> Chart:
    show = percent if in_percent else readable
    finite = [values_of(one.points) for one in series]
    missing = [len(one.points) - len(values) for one, values in zip(series, finite, strict=True)]
    notes = [f"{one.label}: {count} not finite" for one, count in zip(series, missing, strict=True) if count]
    if is_log and any(value <= 0 for values in finite for value in values):
        notes.append("zeros are drawn on the lower edge")
    return Chart(
        title=title,
        about=about,
        legend=[(one.color, one.label, show(values[-1])) for one, values in zip(series, finite, strict=True)],
        # `curves` escapes its inputs, so its markup can be trusted.
        svg=Markup(line_chart(title, series, is_log=is_log, is_fraction=in_percent)),
        note="; ".join(notes),
    )
