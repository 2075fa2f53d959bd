"""Runs the steps of docs/first_gpu_run.md and the rows of its table, and checks what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from tests.gpu.page import ROOT, published_rows, sent_back, steps

pytestmark = [
    pytest.mark.gpu,
    # Step 6 downloads the CUDA builds. The largest row that is not skipped on one GPU trains 7 billion parameters.
    pytest.mark.timeout(3600),
]
STEPS = steps()
SAYS = {
    2: r"ok +cuda ",
    3: r"runs/quickstart",
    4: r"tokens/s, .* GiB peak",
    5: r"training .* ratio [\d.]+",
    6: r"ok +vllm ",
    7: r"runs/gpu_vllm",
    8: r"runs/gpu_megatron",
}
"""Number of a step → pattern of its output. Step 1 is missing, because it runs these tests."""


def output_of(commands: list[str]) -> str:
    """Runs the commands in the repository and returns their output. Removes variables of the tests and of make that
    would change what the commands do."""
    of_tests = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "RL_CACHE_DIR", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(ran.stdout)  # a report includes this output
    assert ran.returncode == 0, ran.stdout[-3000:]
    return ran.stdout


def activation() -> list[str]:
    """The command that activates the environment that step 6 creates."""
    return re.findall(r"source \S+", STEPS[6][0])


@pytest.mark.parametrize("number", SAYS)
def test_each_step_of_the_page_runs_and_prints_its_result(number: int):
    before = activation() if number > 6 else []
    if before and not (ROOT / before[0].removeprefix("source ")).exists():
        pytest.skip(f"{before[0]}: the environment is missing; run step 6 first")
    output = output_of([*before, *STEPS[number]])
    assert re.search(SAYS[number], output)
    assert not re.search(r"^(UNTESTED|MISSING)|: failed: ", output, flags=re.MULTILINE)
    assert [path for path in sent_back(number) if not path.is_file()] == []


def test_the_quick_start_learned():
    metrics = (ROOT / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    curve = [row["eval/accuracy"] for row in map(json.loads, metrics) if "eval/accuracy" in row]
    assert curve[-1] >= 0.85


@pytest.mark.parametrize("row", published_rows())
def test_a_row_of_published_times_is_measured(row: str):
    output = output_of([f".venv/bin/python benchmarks/gpu_published_times.py --row {row}"])
    if skipped := re.search(r"skipped: .*", output):
        pytest.skip(skipped[0])
    assert re.search(r"training [\d.]+ s \(published .* GiB peak", output)
