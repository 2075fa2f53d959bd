"""Draws curves as small inline SVG, which adapts to its page: fluid width, constant text size, colours from the page's
style.

A chart is an SVG without a view box, in which text and grid lines have positions in per cent. A nested SVG, which
stretches (`preserveAspectRatio="none"`), contains the curves; their strokes do not scale. The output is deterministic.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

import attrs

from rl_core.reports.progress import readable

Point = tuple[float, float | None]
"""Step and value. A value that was not finite is None and is drawn as a gap."""

_BOX = 1000
_MAX_POINTS = 400
_MAX_BARS = 160
_MAX_DOTS = 60
_SMOOTHED_FROM = 40


@attrs.frozen(kw_only=True)
class Series:
    """One curve, or one layer of a stack."""

    label: str
    points: Sequence[Point]
    """Points in ascending order of steps; not empty."""
    color: int
    """Number of the curve's colour: the curve has the class `s<color>` of the page's style."""
    is_sparse: bool = False
    """Whether the curve has values only at some steps. The values of such a curve are drawn with dots if there are at
    most `_MAX_DOTS`."""


@attrs.frozen(kw_only=True)
class Axis:
    """A value axis from `low` to `high`, with labelled ticks."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def height(self, value: float) -> float:
        """Relative position of a value: 0 at `low`, 1 at `high`; values outside are clipped."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def line_chart(title: str, series: Sequence[Series], *, is_log: bool = False, is_fraction: bool = False) -> str:
    """Draws curves over steps as an SVG with `title` and a description in words.

    Args:
        title: the chart's accessible name.
        series: at least one, each with at least one finite value.
        is_log: use a logarithmic value axis; zeros are drawn on the lower edge.
        is_fraction: use a value axis from 0 to 100 %.
    """
    drawn = [attrs.evolve(one, points=thinned(one.points, _MAX_POINTS)) for one in series]
    values = [value for one in drawn for _, value in one.points if value is not None]
    axis = log_axis(values) if is_log else fraction_axis() if is_fraction else linear_axis(values)
    steps = [step for one in drawn for step, _ in one.points]
    first, last = min(steps), max(steps)
    span = (first, last) if last > first else (first - 1, first + 1)
    curves = "".join(_curve(one, span, axis) for one in drawn)
    readouts = [
        {"label": one.label, "points": [(step, _shown(value, is_fraction)) for step, value in one.points]}
        for one in drawn
    ]
    return _svg(title, " ".join(map(_in_words, series)), curves, span, axis, readouts)


def stacked_chart(title: str, layers: Sequence[Series]) -> str:
    """Draws stacked bars, one per step, as an SVG. If there are many steps, each bar is the mean of several
    neighbouring steps. All layers must have the same steps."""
    steps = [step for step, _ in layers[0].points]
    bars = _bars(steps)
    means = [[statistics.fmean([one.points[i][1] or 0.0 for i in bar]) for bar in bars] for one in layers]
    axis = linear_axis([0.0, *(sum(parts) for parts in zip(*means, strict=True))])
    span = (steps[0] - 0.5, steps[-1] + 0.5)
    # A bar begins where the previous one ends, even if steps are missing.
    edges = [span[0], *((steps[bar[0]] + steps[bar[0] - 1]) / 2 for bar in bars[1:]), span[1]]
    base = [0.0] * len(bars)
    areas = ""
    for one, heights in zip(layers, means, strict=True):
        top = [low + high for low, high in zip(base, heights, strict=True)]
        outline = [*_stairs(edges, top), *reversed(_stairs(edges, base))]
        areas += f'<path class="area s{one.color}" d="{_path(outline, span, axis)}Z"/>'
        base = top
    centers = [steps[bar[len(bar) // 2]] for bar in bars]
    readouts = [
        {
            "label": one.label,
            "points": [(step, f"{readable(mean)} s") for step, mean in zip(centers, heights, strict=True)],
        }
        for one, heights in zip(layers, means, strict=True)
    ]
    description = "Seconds per step. " + " ".join(
        f"{one.label}: {readable(statistics.fmean(h))} s on average." for one, h in zip(layers, means, strict=True)
    )
    return _svg(title, description, areas, span, axis, readouts)


# --- axes -----------------------------------------------------------------------------------------------------------


def linear_axis(values: Sequence[float]) -> Axis:
    """An axis from a round number below the values to a round number above them. It begins at 0 if the smallest value
    is positive and less than half of the largest."""
    low, high = min(values), max(values)
    if low > 0 and low < 0.5 * high:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    spacing = _round_spacing((high - low) / 5)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return Axis(
        low=first * spacing,
        high=last * spacing,
        ticks=[
            (i * spacing, _tick(i * spacing, spacing, max(abs(first), abs(last)) * spacing))
            for i in range(first, last + 1)
        ],
    )


def log_axis(values: Sequence[float]) -> Axis:
    """An axis of whole decades around the positive values; from 1e-9 to 1e-8 if there are none."""
    positive = [value for value in values if value > 0] or [1e-9]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    last = max(last, first + 1)
    every = math.ceil((last - first) / 5)
    ticks = [(10.0**power, f"10{str(power).translate(_SUPERSCRIPT)}") for power in range(first, last + 1, every)]
    return Axis(low=10.0**first, high=10.0**last, ticks=ticks, is_log=True)


def fraction_axis() -> Axis:
    """An axis from 0 % to 100 %."""
    return Axis(low=0.0, high=1.0, ticks=[(i / 4, f"{25 * i} %") for i in range(5)])


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _round_spacing(spacing: float) -> float:
    power = 10.0 ** math.floor(math.log10(spacing))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= spacing * (1 - 1e-9))


def _tick(value: float, spacing: float, largest: float) -> str:
    """A tick label. All ticks of an axis except 0 have the same unit, and enough decimals to distinguish
    neighbours: `250`, `1.5k`, `7.5e-5`, `6.90423`."""
    power = math.floor(math.log10(max(spacing, largest / 1000)) + 1e-9)
    unit, suffix = (
        (10.0**power, f"e{power}")
        if power < -3
        else (1e6, "M")
        if power >= 6
        else (1e3, "k")
        if power >= 3
        else (1.0, "")
    )
    step = spacing / unit
    decimals = next((d for d in range(17) if math.isclose(round(step, d), step, rel_tol=1e-6)), 17)
    return f"{value / unit:,.{decimals}f}{suffix}" if value else "0"


# --- points ---------------------------------------------------------------------------------------------------------


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Selects about `limit` of the points: the ends, and of each group of neighbours the lowest and highest point and
    the first gap, so that peaks and gaps remain visible."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 2))
    kept = [points[0]]
    for start in range(1, len(points) - 1, size):
        bucket = points[start : min(start + size, len(points) - 1)]
        known = [point for point in bucket if point[1] is not None]
        peaks = {min(known, key=_value), max(known, key=_value)} if known else set()
        first_gap = [point for point in bucket if point[1] is None][:1]
        kept += sorted([*peaks, *first_gap], key=lambda point: point[0])
    return [*kept, points[-1]]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The moving mean of the moving median, each over about a fifteenth of the points. Single spikes have no effect."""
    half = max(len(points) // 30, 1)
    return _moving(statistics.fmean, _moving(statistics.median, points, half), half)


def _moving(average: Callable[[Sequence[float]], float], points: Sequence[Point], half: int) -> list[Point]:
    result: list[Point] = []
    for i, (step, value) in enumerate(points):
        near = [v for _, v in points[max(i - half, 0) : i + half + 1] if v is not None]
        result.append((step, None if value is None else average(near)))
    return result


def _value(point: Point) -> float:
    assert point[1] is not None
    return point[1]


def _bars(steps: Sequence[float]) -> list[range]:
    size = math.ceil(len(steps) / _MAX_BARS)
    return [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]


# --- drawing --------------------------------------------------------------------------------------------------------


def _curve(one: Series, span: tuple[float, float], axis: Axis) -> str:
    has_dots = len(one.points) == 1 or (one.is_sparse and len(one.points) <= _MAX_DOTS)
    if has_dots or len(one.points) < _SMOOTHED_FROM or axis.is_log:
        path = f'<path class="line s{one.color}" d="{_pieces(one.points, span, axis)}"/>'
    else:
        raw, middle = _pieces(one.points, span, axis), _pieces(smoothed(one.points), span, axis)
        path = f'<path class="line raw s{one.color}" d="{raw}"/><path class="line s{one.color}" d="{middle}"/>'
    if has_dots:
        # A line of length zero with round ends is a dot that stretching cannot distort.
        dots = "".join(f"{_path([(x, y)], span, axis)}h0" for x, y in one.points if y is not None)
        path += f'<path class="dots s{one.color}" d="{dots}"/>'
    return path


def _pieces(points: Sequence[Point], span: tuple[float, float], axis: Axis) -> str:
    """The path of a curve, interrupted at gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return "".join(_path(piece, span, axis) for piece in pieces if piece)


def _path(points: Sequence[tuple[float, float]], span: tuple[float, float], axis: Axis) -> str:
    first, last = span
    corners = (f"{_BOX * (x - first) / (last - first):.4g},{_BOX * (1 - axis.height(y)):.4g}" for x, y in points)
    return "M" + " ".join(corners)


def _stairs(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    return [(x, y) for i, y in enumerate(heights) for x in (edges[i], edges[i + 1])]


def _svg(
    title: str, description: str, inside: str, span: tuple[float, float], axis: Axis, readouts: Sequence[object]
) -> str:
    grid = ""
    for value, label in axis.ticks:
        y = f"{100 * (1 - axis.height(value)):.4g}%"
        grid += f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        grid += f'<text class="tick" x="0" y="{y}" dx="-8" dy="4" text-anchor="end">{label}</text>'
    for i, step in enumerate(_step_ticks(span)):
        x = f"{100 * (step - span[0]) / (span[1] - span[0]):.4g}%"
        label = f"{step:,}" if i else f"step {step:,}"
        grid += f'<text class="tick" x="{x}" y="100%" dy="19" text-anchor="middle">{label}</text>'
    data = escape(json.dumps({"span": span, "series": readouts}, ensure_ascii=False, separators=(",", ":")))
    return (
        f'<svg class="chart" role="img" width="100%" height="100%" data-readouts="{data}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{grid}"
        f'<svg viewBox="0 0 {_BOX} {_BOX}" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{inside}</svg>"
        '<g class="cursor" aria-hidden="true"><line y2="100%"/>'
        '<text class="tick" dy="-4" text-anchor="middle"/></g></svg>'
    )


def _step_ticks(span: tuple[float, float]) -> list[int]:
    spacing = max(int(_round_spacing((span[1] - span[0]) / 5)), 1)
    return list(range(math.ceil(span[0] / spacing) * spacing, math.floor(span[1]) + 1, spacing))


def _shown(value: float | None, is_fraction: bool) -> str:
    if value is None:
        return "not finite"
    return f"{100 * value:.1f} %" if is_fraction else readable(value)


def _in_words(one: Series) -> str:
    finite = [(step, value) for step, value in one.points if value is not None]
    (first_step, first), (last_step, last) = finite[0], finite[-1]
    values = [value for _, value in finite]
    return (
        f"{one.label}: {readable(first)} at step {first_step:g}, {readable(last)} at step {last_step:g}, "
        f"between {readable(min(values))} and {readable(max(values))}."
    )
