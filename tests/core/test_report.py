"""The report of a finished or unfinished run is complete, loads nothing from outside and escapes the policy's text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_core.reports.curves import Series, line_chart, linear_axis, log_axis, smoothed, stacked_chart, thinned
from rl_core.reports.report_charts import run_charts
from rl_core.reports.report_page import _shown_samples, write_report
from rl_core.reports.samples import answer_of
from tools.quickstart_picture import curve_png

ATTACK = "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)> & \x1b[31m"


def metric_rows(num_steps: int) -> list[dict[str, float | None]]:
    """The metrics of a run that learns: the evaluation before training, then one row per step."""
    rows: list[dict[str, float | None]] = [{"step": 0, "eval/accuracy": 0.2, "eval/reward": 0.2, "time/evaluate": 1.5}]
    for step in range(1, num_steps + 1):
        done = step / num_steps
        row = {
            "step": step,
            "reward/mean": 0.2 + 0.7 * done + 0.02 * math.sin(step),
            "policy/kl": 0.3 * done,
            "policy/entropy": 1.0 - 0.8 * done,
            "policy/grad_norm": None if step == 3 else 0.5 + 0.1 * math.cos(step),
            "policy/clip_fraction": 0.02,
            "rollout/logprob_diff_max": 1e-5 * (1 + 0.5 * math.sin(step)),
            "rollout/logprob_diff_mean": 0.0 if step == 2 else 1e-7,
            "rollout/response_length": 4.0,
            "rollout/tokens": 4096,
            "rollout/sampled_tokens": 1024,
            "rollout/failed": 3 if step == 2 else 0,
            **({"rollout/failed/ValueError": 1, "rollout/failed/DeadlineError": 2} if step == 2 else {}),
            "environment/digits_right": 0.5 + 0.4 * done,
            "tokens_per_second": 4000.0,
            **{f"time/{phase}": 0.2 for phase in ("generate", "score", "train", "publish", "controller")},
            "time/step": 1.0,
        }
        if step % 10 == 0:
            row |= {"eval/accuracy": 0.2 + 0.72 * done, "eval/reward": 0.2 + 0.72 * done, "time/evaluate": 1.5}
        rows.append(row)
    return rows


def sample_row(step: int, **changes: object) -> dict[str, object]:
    row = {
        "step": step,
        "purpose": "train",
        "group": step,
        "sample": 0,
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.0,
    }
    return row | {"stop_reason": "stop", "metrics": {}, "failure": None} | changes


def write_lines(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_directory(path: Path, num_steps: int = 30) -> Path:
    path.mkdir(exist_ok=True)
    write_lines(path / "metrics.jsonl", metric_rows(num_steps))
    samples = [sample_row(step, purpose="eval", response=f"held-out {step}") for step in range(0, num_steps + 1, 10)]
    for step in range(1, num_steps + 1):
        samples += [
            sample_row(step, response=f"good {step}"),
            sample_row(step, sample=1, response=f"bad {step}", reward=-0.5),
        ]
    samples.append(sample_row(num_steps, sample=2, response=ATTACK, prompt=ATTACK, reward=2.0))
    samples.append(
        sample_row(num_steps, sample=3, response="", reward=None, stop_reason=None, failure="ValueError: <row 7>")
    )
    write_lines(path / "samples.jsonl", samples)
    (path / "summary.json").write_text(json.dumps({"accuracy_after": 0.92, "rl_seconds": 185.0, "seed": 0}))
    (path / "config.yaml").write_text("trainer:\n  strategy: fsdp\n  seed: 3\n  comment: <script>alert(3)</script>\n")
    return path


class Page(HTMLParser):
    """Parses a page into elements and text, and checks that every element is closed where it should be."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def html_of(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def svgs_of(html: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(svg)
        for svg in re.findall(r'<svg class="chart".*?</svg><g.*?</g></svg>', html, re.DOTALL)
    ]


def test_every_curve_is_there_with_a_title_and_a_description_in_words(tmp_path):
    svgs = svgs_of(html_of(run_directory(tmp_path / "run")))
    described = {svg.findtext("title"): svg.findtext("desc") for svg in svgs}
    assert list(described) == [
        "Reward and held-out accuracy",
        "KL to the reference",
        "Entropy",
        "Gradient norm",
        "Engine against trainer",
        "Response length",
        "Clip fraction",
        "digits right",
        "Time per phase",
    ]
    assert "held-out accuracy: 0.200 at step 0, 0.920 at step 30" in described["Reward and held-out accuracy"]
    assert all(svg.get("role") == "img" and svg.find(".//path") is not None for svg in svgs)
    assert len(svgs[-1].findall(".//path")) == 6


def test_metrics_of_the_environment_are_drawn_even_without_an_evaluation():
    rows = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in metric_rows(5)]
    assert "digits right" in [chart.title for chart in run_charts(rows).others]


def test_failed_samples_of_an_evaluation_are_no_metric_of_the_environment():
    rows = [{"step": step, "eval/reward": 0.5, "eval/failed": 1.0, "eval/failed/OSError": 1.0} for step in (1, 2)]
    assert [chart.title for chart in run_charts(rows).others] == []


def test_the_page_loads_nothing_and_its_policy_forbids_loading(tmp_path):
    html = html_of(run_directory(tmp_path / "run"))
    page = Page(html)
    loading = {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}
    assert {value for _, attributes in page.elements for name, value in attributes.items() if name in loading} == {
        "data:,"
    }
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")


def test_texts_of_policy_and_user_are_never_markup(tmp_path):
    page = Page(html_of(run_directory(tmp_path / "run")))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in [tag for tag, _ in page.elements]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)> & ␛[31m" in page.text
    assert "comment: <script>alert(3)</script>" in page.text


def test_samples_come_from_the_start_the_middle_and_the_end(tmp_path):
    text = Page(html_of(run_directory(tmp_path / "run"))).text
    for shown in ("held-out 0", "held-out 10", "held-out 30", "good 1 ", "bad 1 ", "good 15 ", "bad 15 ", "bad 30 "):
        assert shown in text
    assert "good 2 " not in text
    assert "held out: step 0 · training: step 1" in text


def test_a_failed_rollout_is_shown_as_failed_not_as_a_zero(tmp_path):
    page = Page(html_of(run_directory(tmp_path / "run")))
    assert "1 of the logged samples failed. step 30, training failed 1+1= ValueError: <row 7>" in page.text
    assert "Failed samples 3 2 DeadlineError, 1 ValueError, not trained on" in page.text


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"stop_reason": "length"}, "cut at the length limit"),
        ({"end": "context"}, "no room for another turn"),
        ({}, None),
    ],
)
def test_a_sample_says_which_limit_ended_it(tmp_path, end, expected):
    write_lines(tmp_path / "metrics.jsonl", metric_rows(2))
    write_lines(tmp_path / "samples.jsonl", [sample_row(1, **end)])
    chips = re.findall('<span class="chip">(.*?)</span>', html_of(tmp_path))
    assert chips == [*([expected] if expected else []), "reward 1"]


def test_the_numbers_at_the_top_are_those_of_the_files(tmp_path):
    text = Page(html_of(run_directory(tmp_path / "run"))).text
    assert "Held-out accuracy 92.0 % from 20.0 %" in text
    assert "Steps 30" in text
    assert "accuracy after 92.0 % training and evaluation 3 min 05 s seed 0" in text
    assert "fsdp seed 3" in text


def test_two_hundred_steps_fit_in_half_a_megabyte_and_so_do_twenty_thousand(tmp_path):
    for num_steps in (200, 20_000):
        run_directory(tmp_path / "run")
        write_lines(tmp_path / "run" / "metrics.jsonl", metric_rows(num_steps))
        assert write_report(tmp_path / "run").stat().st_size < 500_000


def test_the_same_directory_gives_the_same_page(tmp_path):
    run_dir = run_directory(tmp_path / "run")
    assert html_of(run_dir) == html_of(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "samples.jsonl",
        "summary.json",
    ]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3])
def test_a_run_with_few_or_no_steps_has_a_page(tmp_path, num_rows):
    write_lines(tmp_path / "metrics.jsonl", metric_rows(30)[:num_rows])
    page = Page(html_of(tmp_path))
    assert ("No training step has been finished yet." in page.text) == (num_rows < 2)
    assert "samples of the first logged prompts" not in page.text


def test_a_run_that_is_being_written_has_a_page(tmp_path):
    run_dir = run_directory(tmp_path / "run")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 31, "rew')
    assert "Steps 30" in Page(html_of(run_dir)).text


def test_metrics_that_were_not_logged_are_named(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": 10.0 * step} for step in range(1, 5)])
    html = html_of(tmp_path)
    assert [svg.findtext("title") for svg in svgs_of(html)] == ["Reward"]
    assert (
        "Not logged in this run: KL to the reference, Entropy, Gradient norm, Engine against trainer" in Page(html).text
    )


def test_a_reward_outside_zero_to_one_does_not_share_an_axis_with_accuracy(tmp_path):
    rows = [{"step": step, "reward/mean": 8.0 * step, "eval/accuracy": 0.1 * step} for step in range(5)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert [svg.findtext("title") for svg in svgs_of(html_of(tmp_path))] == ["Reward", "Held-out accuracy"]


def test_a_step_whose_number_is_not_finite_leaves_a_gap_and_a_remark(tmp_path):
    html = html_of(run_directory(tmp_path / "run"))
    chart = next(svg for svg in svgs_of(html) if svg.findtext("title") == "Gradient norm")
    path = chart.find(".//path")
    assert path is not None
    assert path.get("d", "").count("M") == 2
    assert "norm: 1 not finite" in Page(html).text


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        write_report(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", metric_rows(3))
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(DataError, match=r"summary\.json: not a JSON object"):
        write_report(tmp_path)


def test_the_picture_for_a_readme_is_the_same_each_time(tmp_path):
    run_dir = run_directory(tmp_path / "run")
    curve_png(run_dir, tmp_path / "a.png")
    curve_png(run_dir, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "policy/kl": 0.1}])
    with pytest.raises(DataError, match="nothing to draw"):
        curve_png(run_dir, tmp_path / "c.png")


# --- drawing --------------------------------------------------------------------------------------------------------

finite = st.floats(min_value=-1e12, max_value=1e12, allow_subnormal=False)


@given(st.lists(finite, min_size=1, max_size=30), st.floats(min_value=1e-9, max_value=1.0), finite)
def test_a_linear_axis_holds_its_values_between_few_round_ticks(values, scale, shift):
    values = [shift + scale * value for value in values]
    axis = linear_axis(values)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 8
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


@given(st.lists(st.floats(min_value=0, max_value=1e6, allow_subnormal=False), min_size=1, max_size=30))
def test_a_log_axis_holds_its_positive_values_in_whole_decades(values):
    axis = log_axis(values)
    assert all(math.log10(end) == pytest.approx(round(math.log10(end))) for end in (axis.low, axis.high))
    assert all(axis.low * (1 - 1e-9) <= value <= axis.high * (1 + 1e-9) for value in values if value > 1e-300)
    assert 2 <= len(axis.ticks) <= 7


def test_a_point_is_at_its_step_and_value():
    svg = ElementTree.fromstring(line_chart("t", [Series(label="a", points=[(0, 0.0), (5, 1.0), (10, 0.5)], color=1)]))
    path = svg.find(".//path")
    assert path is not None
    assert path.get("d") == "M0,1000 500,0 1000,500"


def test_layers_are_stacked():
    layers = [Series(label=name, points=[(1, 1.0), (2, 3.0)], color=i) for i, name in enumerate("ab", start=1)]
    lower, upper = ElementTree.fromstring(stacked_chart("t", layers)).findall(".//path")
    assert lower.get("d") == "M0,833.3 500,833.3 500,500 1000,500 1000,1000 500,1000 500,1000 0,1000Z"
    assert upper.get("d") == "M0,666.7 500,666.7 500,0 1000,0 1000,500 500,500 500,833.3 0,833.3Z"


@given(st.lists(st.none() | finite, min_size=3, max_size=2000), st.integers(min_value=10, max_value=400))
def test_thinning_keeps_the_ends_the_minimum_and_the_maximum(values, limit):
    points = list(enumerate(values))
    kept = thinned(points, limit)
    assert len(kept) <= 1.5 * limit + 2
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept, key=lambda point: point[0])
    known = [value for value in values if value is not None]
    if known:
        kept_values = [value for _, value in kept if value is not None]
        assert (min(kept_values), max(kept_values)) == (min(known), max(known))


def test_thinning_keeps_gaps():
    points = [(step, None if step % 100 == 50 else float(step % 7)) for step in range(1000)]
    kept = thinned(points, 400)
    assert len(kept) < 500
    assert [step for step, value in kept if value is None] == list(range(50, 1000, 100))


def test_smoothing_is_not_bent_by_a_lone_spike_and_keeps_gaps():
    points = [(step, 1000.0 if step == 30 else None if step == 50 else 1.0) for step in range(90)]
    assert smoothed(points) == [(step, None if step == 50 else 1.0) for step in range(90)]


def test_sampled_tokens_are_those_that_the_policy_sampled(tmp_path):
    text = Page(html_of(run_directory(tmp_path / "run"))).text
    assert re.search(r"Sampled tokens 30,720 median 1,024 per second", text), (
        "with the prompts' tokens it would be 122,880"
    )


def test_ticks_of_close_values_are_distinct_decimal_numbers():
    for low, high in ((6.90420, 6.90423), (690_420.0, 690_420.5), (1.00001, 1.00002), (-3.00002, -3.00001)):
        labels = [label for _, label in linear_axis([low, high]).ticks]
        assert len(set(labels)) == len(labels)
        assert not any("e" in label for label in labels), labels
        shown = [float(label.replace(",", "").replace("k", "e3").replace("M", "e6")) for label in labels]
        assert shown == pytest.approx([value for value, _ in linear_axis([low, high]).ticks], rel=1e-9)
    assert [label for _, label in linear_axis([2e-5, 7e-5]).ticks] == ["0", "2e-5", "4e-5", "6e-5", "8e-5"]


@pytest.mark.parametrize(
    ("evaluated", "expected"),
    [
        ([0, 6], {"Start": "held out: step 0 · training: step 1", "End": "held out: step 6 · training: step 6"}),
        ([6], {"Start": "training: step 1", "End": "held out: step 6 · training: step 6"}),
        ([0], {"Start": "held out: step 0 · training: step 1", "End": "training: step 6"}),
        (
            [5, 6],
            {
                "Start": "training: step 1",
                "Middle": "held out: step 5 · training: step 3",
                "End": "held out: step 6 · training: step 6",
            },
        ),
    ],
)
def test_evaluations_are_shown_at_the_stage_of_their_step(tmp_path, evaluated: list[int], expected: dict[str, str]):
    run_dir = run_directory(tmp_path / "run", num_steps=6)
    rows = [sample_row(step, purpose="eval") for step in evaluated] + [sample_row(step) for step in range(1, 7)]
    write_lines(run_dir / "samples.jsonl", rows)
    html = html_of(run_dir)
    stages = {stage["name"]: stage["steps"] for stage in _shown_samples(run_dir).stages}
    assert stages == {"Start": "", "Middle": "training: step 3", "End": ""} | expected
    assert all(steps in Page(html).text for steps in expected.values())


def test_a_sample_shows_the_expected_answer_and_a_chat_without_its_template(tmp_path):
    run_dir = run_directory(tmp_path / "run")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    templated = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>"
    write_lines(run_dir / "samples.jsonl", [sample_row(1, prompt=templated, messages=chat, ground_truth="two <b>")])
    text = Page(html_of(run_dir)).text
    assert "system: Be brief. user: 1+1?" in text
    assert "expected two <b>" in text
    assert "im_start" not in text


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "I look."}, {"content": [{"text": "I look."}]}])
def test_a_chat_shows_its_tool_calls_and_never_the_word_none(tmp_path, content: dict[str, object]):
    run_dir = run_directory(tmp_path / "run")
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "Käse"}}}
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", **content, "tool_calls": [call]}]
    answer = {"role": "tool", "content": "two", "tool_calls": None}  # in a Parquet file every message has all keys
    write_lines(run_dir / "samples.jsonl", [sample_row(1, messages=[*chat, answer])])
    text = Page(html_of(run_dir)).text
    assert json.dumps([call], ensure_ascii=False) in text
    assert "tool: two" in text
    assert ("I look." in text) == bool(content.get("content"))
    assert "None" not in text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"reward_spec": {"ground_truth": 18}, "answer": "7 + 11"}, "18"),
        ({"ground_truth": "x", "answer": "y"}, "x"),
        ({"answer": "280"}, "280"),
        ({"reward_spec": None, "number": 3}, None),
    ],
)
def test_the_right_answer_is_read_from_the_row(row: dict[str, object], expected: str | None):
    assert answer_of(row) == expected


def test_an_asynchronous_run_shows_staleness_and_idle_times(tmp_path: Path):
    ahead = {"rollout/staleness_max": 4.0, "rollout/staleness_mean": 1.25, "time/generation_idle": 0.5}
    write_lines(tmp_path / "metrics.jsonl", [row | (ahead if row["step"] else {}) for row in metric_rows(5)])
    text = Page(write_report(tmp_path).read_text()).text
    assert "Staleness" in text
    # Of each step of 1 s, training waited 0.2 s for groups, and generation had no group to play for 0.5 s.
    assert re.search(r"Idle.*training 20\.0 %.*generation 50\.0 %", text, flags=re.DOTALL)
    write_lines(tmp_path / "metrics.jsonl", metric_rows(5))
    in_step = Page(write_report(tmp_path).read_text()).text
    assert "Staleness" not in in_step
    assert "Idle" not in in_step
