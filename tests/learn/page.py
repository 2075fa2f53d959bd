"""Makes docs/learning.md and its picture from docs/learning.jsonl: `python -m tests.learn.page`."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Self

import attrs

DOCS = Path(__file__).parents[2] / "docs"
_PANELS_PER_ROW = 5
_HEAD = """\
# What learns, measured

Made by `make learn` (`tests/learn/`) from `docs/learning.jsonl`. Do not edit.

Unless stated otherwise below, a row is the quick start (`rl train quickstart`) with the named settings, run once on two
CPU cores. `before` and `after` are the greedy accuracy on 1,000 held-out problems; the time covers all steps and
evaluations, and depends on the machine and its other load. If generation does not run ahead and steps are not streamed,
a seed always gives the same accuracies on one machine. The start model is trained on answers until it solves about a
fifth of the problems. On another processor this training ends at another accuracy: in these rows, the dense start model
of seed 0 solves between 0.177 and 0.325 of the problems.

- `one_file` is `python -m rl_examples.one_file`: the quick start's task, start model and settings, with the loop
  written out.
- `third_party_2_ranks` uses a backend that is installed for this run from `tests/third_party_backend`.
- `smollm2` and `smollm2_lora` are the recipe `smollm2`, with a pretrained model. `before` and `after` are the mean
  reward of sampled replies to held-out questions.
- `guess_moe_…` are the recipe `guess`, a game of several turns. `before` and `after` are the fraction of the ten
  numbers that greedy play finds. The model is trained on all ten.
- `calculator_…`, `look_up_…`, `second_try_…` and `smollm2_calculator` are the recipes of these names, in which the
  policy has a tool or several tries. `before` and `after` are the mean reward of sampled episodes of held-out problems.
- `mathematics_…`, `code_…`, `reasoning_gym_…`, `gsm8k_turns_…`, `skyrl_gym_…` and `judge_…` are the recipes of these
  names. `before` and `after` are the fraction of held-out problems that sampled episodes solve; for `reasoning_gym` and
  `judge`, the mean score; for `skyrl_gym`, the mean reward of the last turn, in which a wrong number earns 0.1. The
  judge scores by rule (`python -m tests.rule_judge`).
- `sft`, `dpo` and their controls are the recipes `sft` and `dpo`, which sample nothing. For `sft`, the numbers are the
  greedy accuracy of the start model and of the last export. For `dpo`, they are the fraction of held-out pairs in which
  the policy favours the right sum over the wrong one more than the start model does. This fraction is 0 before
  training, and would be 0.5 after random changes.
- `sft_grpo`, `distill`, `dapo`, `ppo`, `gspo`, `async_r3` and `lora_two_servers…` are the recipes of these names on
  the quick start's problems.

Of the cases without a row, only `control`, the quick start's own control, was run; its result is in
[bounds](bounds.md#what-learns). The others have not been run yet: `code_seed1`, and some combinations of depth and
bound. The recipe `gsm8k` and the recipes of public models (`qwen…`, `moonlight…`, `glm…`) have no case, because they
need pretrained models and GPUs.

![Held-out accuracy against the step, a panel per case](learning.png)

| case | what it shows | before | after | steps | RL time | measured |
|---|---|---|---|---|---|---|
"""

_AHEAD = """
## How far generation runs ahead

Accuracy after the quick start by `trainer.pipeline_depth` (rows) and `trainer.max_staleness` (columns), for each of the
seeds 0, 1 and 2 that was run. Depth 0 with bound 0 is synchronous training. With a depth above 0, importance weights
correct for the age of groups by default. The bound hardly matters here, because no group takes long: with depth 1, 99 %
of the groups are one version old, whether the bound is 1 or 4.

"""


@attrs.frozen(kw_only=True)
class Result:
    """The result of one case."""

    case: str
    says: str
    overrides: tuple[str, ...]
    accuracy_before: float
    accuracy_after: float
    steps: int
    rl_seconds: float
    measured: str
    """Date and machine of the run."""
    curve: tuple[tuple[int, float], ...]
    """Pairs of a step and the held-out accuracy after it."""
    recipe: str = "quickstart"

    @classmethod
    def of_run(
        cls,
        case: str,
        says: str,
        overrides: Sequence[str],
        summary: Mapping[str, Any],
        curve: Sequence[tuple[int, float]],
        *,
        recipe: str = "quickstart",
    ) -> Self:
        """Made from a run's `summary.json` and its evaluations."""
        kept = ("accuracy_before", "accuracy_after", "steps", "rl_seconds")
        measured = f"{date.today().isoformat()}, {platform.machine()}"
        return cls(
            case=case,
            says=says,
            overrides=tuple(overrides),
            measured=measured,
            curve=tuple(curve),
            recipe=recipe,
            **{name: summary[name] for name in kept},
        )


def record(result: Result) -> None:
    """Replaces the case's row in docs/learning.jsonl, or appends it, and makes the page again."""
    results = {each.case: each for each in read_results()} | {result.case: result}
    lines = (json.dumps(attrs.asdict(each)) for each in results.values())
    (DOCS / "learning.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_page()


def read_results() -> list[Result]:
    """All rows, in the order in which their cases first ran."""
    file = DOCS / "learning.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [Result(**row) for row in rows]


def write_page() -> None:
    """Writes the page and its picture."""
    results = read_results()
    rows = [
        f"| `{r.case}` | {r.says} | {r.accuracy_before:.3f} | {r.accuracy_after:.3f} | {r.steps} "
        f"| {r.rl_seconds:.0f} s | {r.measured} |\n"
        for r in results
    ]
    ahead = _by_depth_and_bound(results)
    settings = [
        f"\n`{r.case}`:\n\n```sh\nrl train {r.recipe} {' '.join(_quoted(o) for o in r.overrides)}\n```\n"
        for r in results
        if r.overrides
    ]
    (DOCS / "learning.md").write_text("".join([_HEAD, *rows, ahead, "\n## Settings\n", *settings]))
    _draw(results, DOCS / "learning.png")


def _by_depth_and_bound(results: Sequence[Result]) -> str:
    """The accuracies of the cases `depth_D_bound_K_seedS`, as a table with a row per depth and a column per bound."""
    found: dict[tuple[int, int], list[str]] = {}
    for result in results:
        if cell := re.fullmatch(r"depth_(\d+)_bound_(\d+)_seed(\d+)", result.case):
            found.setdefault((int(cell[1]), int(cell[2])), []).append(f"{result.accuracy_after:.3f}")
    if not found:
        return ""
    depths, bounds = sorted({depth for depth, _ in found}), sorted({bound for _, bound in found})
    rows = [
        f"| {depth} | " + " | ".join(", ".join(found.get((depth, bound), [])) for bound in bounds) + " |\n"
        for depth in depths
    ]
    head = f"| depth \\ bound | {' | '.join(map(str, bounds))} |\n|{'---|' * (len(bounds) + 1)}\n"
    return "".join([_AHEAD, head, *rows])


def _quoted(override: str) -> str:
    return f'"{override}"' if " " in override else override


def _draw(results: Sequence[Result], path: Path) -> None:
    """Draws a panel per case, all with the same y-axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = -(-len(results) // _PANELS_PER_ROW)
    figure = Figure(figsize=(10.0, 1.5 * num_rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, _PANELS_PER_ROW, sharey=True, squeeze=False).flat
    for result, axes in zip(results, panels, strict=False):
        axes.plot(*zip(*result.curve, strict=True), lw=1.5, marker="o", ms=2.5)
        axes.set_title(result.case, fontsize="small")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.tick_params(labelsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    for axes in panels:  # panels without a case
        axes.set_axis_off()
    figure.supxlabel("step", fontsize="small")
    figure.supylabel("held-out accuracy or reward", fontsize="small")
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    write_page()
