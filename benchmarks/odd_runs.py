"""Training steps per second with faulty environments (1 % sleep, 1 % block, 1 % raise, 1 % hang), compared with runs
without them.

Runs with and without these faulty environments alternate. The script also checks that metrics.jsonl counts every
failure.

The model is the quick start's, untrained: 250 prompts × 4 samples per step, generation one step ahead, groups at most
`--bound` versions old. Each environment has one turn, in which it blocks for 0.2 s. The faulty environments first sleep
or block for 1 s, or raise, or hang until the deadline of 10 s. The first step warms up. The rate covers the first nine
tenths of the remaining steps. The time of the whole run also includes the wait for the deadline at its end.

    PYTHONPATH=. python benchmarks/odd_runs.py [--steps 20] [--turns 3] [--bound 4]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click

from rl_core.config import from_mapping
from rl_core.interfaces import Action, Callback, Environment, StepResult
from rl_core.trainer.run import run_training
from rl_examples.arithmetic import write_data, write_model
from rl_examples.quickstart import recipe

PROMPTS, SAMPLES = 250, 4
STEP_S, DEADLINE_S = 0.2, 10.0
TROUBLE = {3: "sleeps", 9: "blocks", 14: "raises", 20: "hangs"}
"""Fault by the prompt's number modulo 25. It affects one of the prompt's four samples, so each fault affects 1 % of the
samples."""
_NEVER = threading.Event()
_samples: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(itertools.count)
"""Counters of the environments made so far, by run and prompt."""
_step_ends: list[float] = []


class Odd(Environment):
    """A one-turn environment; its reward does not depend on the answer."""

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._prompt = row["prompt"]
        sample = next(_samples[row["run"], row["number"]])
        self._trouble = TROUBLE.get(row["number"] % 25) if row["has_trouble"] and sample == 0 else None
        self._reward = float(sample % 2)

    async def reset(self) -> str:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        if self._trouble == "sleeps":
            await asyncio.sleep(5 * STEP_S)
        elif self._trouble == "blocks":
            time.sleep(5 * STEP_S)
        elif self._trouble == "raises":
            raise ConnectionError("the judge is gone")
        elif self._trouble == "hangs":
            _NEVER.wait()
        time.sleep(STEP_S)
        return StepResult(reward=self._reward, done=True)


class NotesSteps(Callback):
    """Records the time at which each step ended."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        _step_ends.append(time.monotonic())


def run(directory: Path, name: str, *, steps: int, bound: int, has_trouble: bool) -> tuple[list[float], Counter[str]]:
    """Seconds from the end of the first step to the end of each later one, and the number of failed samples by kind."""
    rows = [
        {"prompt": "12+34=", "number": number, "has_trouble": has_trouble, "run": name}
        for number in range(steps * PROMPTS)
    ]
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data.train_data": [str(directory / f"{name}.jsonl")],
        "data.val_data": [],
        "environment.env_class": "benchmarks.odd_runs:Odd",
        "trainer.policy.model.path": str(directory / "model"),
        "trainer.run_dir": str(directory / name),
        "trainer.callbacks": ["benchmarks.odd_runs:NotesSteps"],
        "trainer.max_training_steps": steps,
        "trainer.max_staleness": bound,
        "trainer.train_batch_size": PROMPTS,
        "trainer.policy_mini_batch_size": PROMPTS,
        "trainer.ckpt_interval": -1,
        "generator.n_samples_per_prompt": SAMPLES,
        "environment.timeout_s": DEADLINE_S,
    }
    _step_ends.clear()
    run_training(from_mapping({**recipe.config, **changes}))
    written = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    failed: Counter[str] = Counter()
    for row in written:
        failed.update(
            {key.rpartition("/")[2]: int(n) for key, n in row.items() if key.startswith("rollout/failed/") and n}
        )
    return [end - _step_ends[0] for end in _step_ends[1:]], failed


@click.command()
@click.option("--steps", default=20, show_default=True)
@click.option("--turns", default=3, show_default=True, help="Number of pairs of runs, without and with faults.")
@click.option("--bound", default=4, show_default=True, help="trainer.max_staleness")
def main(steps: int, turns: int, bound: int) -> None:
    """Prints the ratios; exits with an error if metrics.jsonl does not count every failure."""
    expected = steps * PROMPTS // 25
    ratios, whole = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_data(directory / "train.parquet", directory / "held_out.parquet")
        write_model(directory / "model", seed=0)
        for turn in range(turns):
            calm_s, none = run(directory, f"calm{turn}", steps=steps, bound=bound, has_trouble=False)
            odd_s, failed = run(directory, f"odd{turn}", steps=steps, bound=bound, has_trouble=True)
            most = len(calm_s) * 9 // 10
            ratios.append(calm_s[most - 1] / odd_s[most - 1])
            whole.append(calm_s[-1] / odd_s[-1])
            print(
                f"turn {turn}, without and with faults: "
                f"{calm_s[most - 1] / most:.2f} and {odd_s[most - 1] / most:.2f} s per step, "
                f"{calm_s[-1]:.1f} and {odd_s[-1]:.1f} s in all, failed samples {dict(failed)}",
                flush=True,
            )
            if none or failed != {"ConnectionError": expected, "DeadlineError": expected}:
                raise SystemExit(
                    f"metrics.jsonl: got {dict(failed)} failed samples with faults and {dict(none)} without; expected "
                    f"{expected} each of ConnectionError and DeadlineError with faults, and none without"
                )
    print(
        f"steps per second with faults / without: {statistics.median(ratios):.2f}, or {statistics.median(whole):.2f} "
        "with the wait at the end of the run"
    )


if __name__ == "__main__":
    # The run imports the callback and the environment from `benchmarks.odd_runs`, not from `__main__`. `main` must come
    # from there too, so that it reads the same `_step_ends` that the callback fills.
    from benchmarks.odd_runs import main as of_module

    of_module()
