"""Generates `report.html`, one page about a run, only from the files in the run's directory.

The page loads no external resources. It supports light and dark mode, phones and printing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs
import yaml
from jinja2 import Environment, StrictUndefined

from rl_core.errors import DataError
from rl_core.reports.jsonl import read_rows
from rl_core.reports.progress import duration, readable
from rl_core.reports.report_charts import Row, is_fraction, percent, points_of, run_charts, values_of
from rl_core.reports.samples import FILE_NAME as SAMPLES_FILE_NAME
from rl_core.reports.samples import WrittenSample, read_samples
from rl_core.reports.trackers import METRICS_FILE_NAME

_MAX_TEXT = 4000
_PROMPTS_PER_STAGE = 3
_FAILURES_SHOWN = 3
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader written in C, which PyYAML's wheels contain, reads a whole configuration in a tenth of the time."""


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the directory of a finished or unfinished run, and returns the page's path.

    Reads `metrics.jsonl` and, if they exist, `samples.jsonl`, `config.yaml` and `summary.json`. The page also lists the
    charts whose metrics were not logged.

    Raises:
        DataError: there is no `metrics.jsonl`, or a JSON file is broken.
    """
    rows = list(read_rows(run_dir / METRICS_FILE_NAME))
    config_text = _text(run_dir / "config.yaml")
    page = _template().render(
        title=run_dir.resolve().name,
        facts=_facts(config_text),
        tiles=_tiles(rows),
        summary=_summary(run_dir / "summary.json"),
        charts=run_charts(rows),
        samples=_shown_samples(run_dir),
        config=config_text,
        num_steps=_num_steps(rows),
    )
    path = run_dir / "report.html"
    unfinished = path.with_name("report.html.writing")
    unfinished.write_text(page, encoding="utf-8", errors="replace")
    unfinished.replace(path)
    return path


# --- numbers --------------------------------------------------------------------------------------------------------


def _num_steps(rows: Sequence[Row]) -> int:
    """Number of training steps. The row of step 0 does not count: it is the evaluation before training."""
    return sum(row["step"] > 0 for row in rows)


def _tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page, each as (label, value, remark)."""
    values = {name: values_of(points_of(rows, name)) for name in {name for row in rows for name in row}}
    held_out = next((name for name in _HELD_OUT if name in values), "eval/reward")
    tiles = [
        _from_first_to_last("Held-out " + held_out.removeprefix("eval/"), values.get(held_out, [])),
        _from_first_to_last("Reward", values.get("reward/mean", [])),
        ("Steps", f"{_num_steps(rows):,}", ""),
    ]
    if seconds := values.get("time/step"):
        tiles.append(("Time", duration(sum(seconds)), f"median {readable(statistics.median(seconds))} s a step"))
    if tokens := values.get("rollout/sampled_tokens"):
        speeds = [row["rollout/sampled_tokens"] / row["time/step"] for row in rows if _has_speed(row)]
        remark = f"median {readable(statistics.median(speeds))} per second" if speeds else ""
        tiles.append(("Sampled tokens", _large(sum(tokens)), remark))
    if failed := sum(values.get("rollout/failed", [])):
        kinds = {name: sum(counts) for name, counts in values.items() if name.startswith("rollout/failed/")}
        parts = [f"{readable(kinds[name])} {name.rsplit('/', 1)[1]}" for name in sorted(kinds, key=lambda n: -kinds[n])]
        tiles.append(("Failed samples", readable(failed), ", ".join([*parts, "not trained on"])))
    return [tile for tile in tiles if tile]


_HELD_OUT = ("eval/accuracy", "eval/reward", "eval/pair_accuracy", "eval/loss")
"""Held-out metrics in order of preference. The page shows the first one that was measured."""


def _has_speed(row: Row) -> bool:
    return row.get("rollout/sampled_tokens") is not None and bool(row.get("time/step"))


def _from_first_to_last(label: str, values: Sequence[float]) -> tuple[str, str, str] | None:
    if not values:
        return None
    show = percent if "accuracy" in label and is_fraction(values) else readable
    return label, show(values[-1]), f"from {show(values[0])}" if len(values) > 1 else ""


_SUMMARY_LABELS = {"rl_seconds": "training and evaluation", "total_seconds": "the whole command"}


def _summary(path: Path) -> list[tuple[str, str]]:
    if not path.exists():
        return []
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return [(_summary_label(name), _summary_value(name, value)) for name, value in summary.items()]
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a JSON object ({error})") from error


def _summary_label(name: str) -> str:
    return _SUMMARY_LABELS.get(name, name.replace("_", " "))


def _summary_value(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    if name.endswith("_seconds"):
        return duration(value).replace(" ", "\N{NO-BREAK SPACE}")
    return percent(value) if "accuracy" in name and 0 <= value <= 1 else readable(value)


def _large(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}"


# --- samples --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class _ShownSamples:
    stages: Sequence[Mapping[str, Any]] = ()
    """Samples from the start, the middle and the end of the run."""
    failures: Sequence[Mapping[str, Any]] = ()
    """The first failed samples."""
    num_failures: int = 0
    """Number of failures among all logged samples."""


def _shown_samples(run_dir: Path) -> _ShownSamples:
    """The samples to show. Reads the file twice instead of keeping it in memory: first for the step numbers and the
    failures, then for the samples of the steps to show."""
    if not (run_dir / SAMPLES_FILE_NAME).exists():
        return _ShownSamples()
    steps: dict[str, set[int]] = {"eval": set(), "train": set()}
    failures: list[WrittenSample] = []
    num_failures = 0
    for sample in read_samples(run_dir):
        if sample.failure is None:
            steps[sample.purpose].add(sample.step)
        else:
            num_failures += 1
            failures += [sample] if num_failures <= _FAILURES_SHOWN else []
    wanted = {purpose: _start_middle_end(found) for purpose, found in steps.items()}
    kept: dict[tuple[str, int], list[WrittenSample]] = {}
    for sample in read_samples(run_dir):
        if sample.step in wanted[sample.purpose]:
            kept.setdefault((sample.purpose, sample.step), []).append(sample)
    return _ShownSamples(
        stages=[_stage(name, steps, kept) for name, steps in _stages(wanted)],
        failures=[_card(sample, f"step {sample.step}, {_PURPOSES[sample.purpose]}") for sample in failures],
        num_failures=num_failures,
    )


_PURPOSES = {"eval": "held out", "train": "training"}


def _start_middle_end(steps: set[int]) -> list[int]:
    ordered = sorted(steps)
    if len(ordered) < 3:
        return ordered
    middle = (ordered[0] + ordered[-1]) / 2
    return [ordered[0], min(ordered[1:-1], key=lambda step: abs(step - middle)), ordered[-1]]


def _stages(wanted: Mapping[str, Sequence[int]]) -> list[tuple[str, dict[str, int]]]:
    """(name, purpose → step) of start, middle and end. The purpose with more steps has one step in every stage. The
    steps of the other purpose are put into different stages, such that the two steps of a stage are as close to each
    other as possible. For example, if a run is evaluated only before and after training, these evaluations belong to
    the start and the end."""
    longest = max(wanted.values(), key=len)
    names = {0: (), 1: ("So far",), 2: ("Start", "End"), 3: ("Start", "Middle", "End")}[len(longest)]
    stages: list[tuple[str, dict[str, int]]] = [(name, {}) for name in names]
    for purpose, steps in wanted.items():
        places = min(
            combinations(range(len(longest)), len(steps)),
            key=lambda chosen: sum(abs(longest[place] - step) for place, step in zip(chosen, steps, strict=True)),
        )
        for place, step in zip(places, steps, strict=True):
            stages[place][1][purpose] = step
    return stages


def _stage(
    name: str, steps: Mapping[str, int], kept: Mapping[tuple[str, int], Sequence[WrittenSample]]
) -> dict[str, Any]:
    choose = {"eval": _first_prompts, "train": _best_and_worst}
    cards = [card for purpose in choose if purpose in steps for card in choose[purpose](kept[purpose, steps[purpose]])]
    said = " · ".join(f"{_PURPOSES[purpose]}: step {steps[purpose]}" for purpose in choose if purpose in steps)
    return {"name": name, "steps": said, "cards": cards}


def _first_prompts(samples: Sequence[WrittenSample]) -> list[dict[str, Any]]:
    """One sample of each of the first prompts, in the file's order: the same prompts at every stage, unless samples
    failed."""
    firsts: dict[int, WrittenSample] = {}
    for sample in samples:
        firsts.setdefault(sample.group, sample)
    return [_card(sample, "held out") for sample in list(firsts.values())[:_PROMPTS_PER_STAGE]]


def _best_and_worst(samples: Sequence[WrittenSample]) -> list[dict[str, Any]]:
    """The samples with the highest and the lowest reward of the step; only one sample if all rewards are equal. Failed
    samples have a separate section."""
    rewarded = [sample for sample in samples if sample.reward is not None]
    if not rewarded:
        return []
    best = max(rewarded, key=lambda sample: sample.reward or 0.0)
    worst = min(rewarded, key=lambda sample: sample.reward or 0.0)
    if best.reward == worst.reward:
        return [_card(best, "training")]
    return [_card(best, "training, highest reward"), _card(worst, "training, lowest reward")]


def _card(sample: WrittenSample, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "prompt": _shortened(_prompt_of(sample)),
        "ground_truth": None if sample.ground_truth is None else _shortened(sample.ground_truth),
        "response": _shortened(sample.response),
        "reward": "not finite" if sample.reward is None else f"{sample.reward:.3g}",
        "failure": sample.failure,
        "was_cut": sample.stop_reason == "length",
        "had_no_room": sample.end == "context",
        "was_aborted": sample.stop_reason == "abort",
        "metrics": [
            (name.replace("_", " "), readable(value)) for name, value in sample.metrics.items() if value is not None
        ],
    }


def _prompt_of(sample: WrittenSample) -> str:
    """The prompt's text, without the markup of the model's chat template."""
    if not sample.messages:
        return sample.prompt
    return "\n\n".join(f"{message.get('role')}: {_said(message)}" for message in sample.messages)


def _said(message: Mapping[str, Any]) -> str:
    """The text of a message and its tool calls. A message with tool calls may have no text."""
    said = [message.get("content"), message.get("tool_calls")]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in said if part)


_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


def _shortened(text: str) -> str:
    """The text, cut to a maximum length, with visible control characters."""
    left_out = len(text) - _MAX_TEXT
    text = text[:_MAX_TEXT].translate(_VISIBLE)
    return f"{text}\n… {left_out:,} more characters" if left_out > 0 else text


# --- page -----------------------------------------------------------------------------------------------------------


def _facts(config_text: str) -> list[str]:
    """Model, estimator, training backend, engine and seed, without those that the configuration does not contain."""
    try:
        config = yaml.load(config_text, Loader=_LOADER)
    except yaml.YAMLError:
        return []
    keys = {
        "trainer.policy.model.path": "",
        "trainer.algorithm.advantage_estimator": "",
        "trainer.strategy": "",
        "generator.inference_engine.backend": "",
        "trainer.seed": "seed ",
    }
    values = {key: _lookup(config, key.split(".")) for key in keys}
    return [f"{prefix}{values[key]}" for key, prefix in keys.items() if values[key] is not None]


def _lookup(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@cache
def _template() -> Any:
    source = files("rl_core.reports").joinpath("report_template.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
