"""The parity table shows how much each backend, on each mesh, differs from plain transformers in one process.

If the environment variable RL_PARITY_DIR is set, the conformance suite writes its measurements there.
`python -m rl_transformers.testing.parity DIRECTORY` makes the table from the measurements in DIRECTORY. `make parity`
runs the suites of this repository and writes docs/parity.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

DIRECTORY_VARIABLE = "RL_PARITY_DIR"
QUANTITIES: dict[str, str] = {
    "log-probs": "absolute, any token",
    "log-probs, RMS": "root mean square over all tokens",
    "entropies": "absolute, any token",
    "loss": "of the policy, relative",
    "cross-entropy": "of all tokens, relative",
    "gradients": "L2 of the difference of all parameters over L2 of the gradient",
    "gradient norm": "relative, worst of three steps",
    "weights": "absolute, any weight, after three steps of 0.5e-3, 1e-3 and 1e-3, with AdamW unless the row names an "
    "optimizer",
    "weights, offloaded": "the same, with weights and optimizer state moved off the device before every step and back; "
    "if only the checks of this table run on a mesh, after one further step with such moves",
    "exported": "absolute, any weight, before training",
    "other routes": "control: change of the reference's log-probs if all routes are shifted by one token or one layer",
    "half the batch": "control: `weights`, for a reference that trains on half of each step's sequences",
    "loaded weights": "absolute, any weight, right after loading",
    "next loss": "relative, after loading, compared with the ranks that saved",
    "next step": "absolute, any weight, one step after loading, compared with the ranks that saved",
}
"""Quantities measured in float32, in the table's order → how they are measured."""
BFLOAT16_QUANTITIES: dict[str, str] = {
    "bf16 logprobs": "mean absolute difference in nats",
    "bf16 direction": "1 − the cosine of the angle between the gradients of all parameters",
    "bf16 weights": "after three AdamW steps, RMS difference over the RMS of the steps' changes",
    "bf16 engine and trainer": "mean absolute difference in nats between the log-probs of engine and trainer, both in "
    "bfloat16, in multiples of √2 times the plain error of log-probs, because both have an error",
    "bf16 engine and replaying trainer": "the same, for a trainer that follows the engine's routes",
}
"""Quantities measured in bfloat16 → how they are measured."""


@attrs.frozen(kw_only=True)
class Measurement:
    """One number of the table."""

    backend: str
    mesh: str
    quantity: str
    """One of `QUANTITIES` or `BFLOAT16_QUANTITIES`."""
    difference: float
    limit: float
    at_least: bool = False
    """True for a control: the difference must be at least the limit. False: it must be at most the limit."""
    loaded_at: str | None = None
    """The mesh that loaded the state saved by `mesh`; None: no state was loaded."""
    unit: float | None = None
    """The error of plain transformers in bfloat16; `difference` is a multiple of it. None for float32 quantities."""

    def __attrs_post_init__(self) -> None:
        if self.quantity not in QUANTITIES | BFLOAT16_QUANTITIES:
            known = ", ".join(QUANTITIES | BFLOAT16_QUANTITIES)
            raise ValueError(f"Measurement: quantity: got {self.quantity!r}, expected one of {known}")

    def __str__(self) -> str:
        if self.unit is not None:
            return f"{self.difference:.2f} of {self.unit:.1e}"
        if self.limit == 0:
            return "equal" if self.difference == 0 else f"{self.difference:.1e} > 0"
        return f"{self.difference:.1e} {'≥' if self.at_least else '≤'} {self.limit:.0e}"


def write_down(measurement: Measurement) -> None:
    """Appends the measurement to this process's file in RL_PARITY_DIR. Does nothing if the variable is not set."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    with Path(directory, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(attrs.asdict(measurement)) + "\n")


def read_measurements(directory: Path) -> list[Measurement]:
    """Reads the measurements in all files. If a quantity was measured several times for a row, keeps only the worst."""
    worst: dict[tuple[str, str, str, str], Measurement] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = Measurement(**json.loads(line))
            key = (found.backend, found.mesh, found.loaded_at or "", found.quantity)
            worst[key] = max(worst.get(key, found), found, key=_badness)
    return [worst[key] for key in sorted(worst)]


def _badness(measurement: Measurement) -> float:
    return -measurement.difference if measurement.at_least else measurement.difference


def page(measurements: Sequence[Measurement]) -> str:
    """Returns the page with all tables as Markdown."""
    exact = [m for m in measurements if m.unit is None]
    backends = sorted({m.backend for m in exact})
    sections = [_section(backend, [m for m in exact if m.backend == backend]) for backend in backends]
    text = "\n".join([_HEADER, *_list(QUANTITIES), "", *sections])
    rounded = [m for m in measurements if m.unit is not None]
    return text + _bfloat16_section(rounded) if rounded else text


def _list(quantities: dict[str, str]) -> list[str]:
    return [f"- **{name}**: {what}" for name, what in quantities.items()]


def _bfloat16_section(measurements: Sequence[Measurement]) -> str:
    """One table for all backends and engines. The text above it states the limit and the largest multiple."""
    limit = max(m.limit for m in measurements)
    cells = [((m.backend, m.mesh), m) for m in measurements]
    head = _BFLOAT16_HEADER.format(limit=f"{limit:g}", worst=f"{max(m.difference for m in measurements):.2f}")
    table = _table(("backend or engine", "mesh"), cells, BFLOAT16_QUANTITIES)
    return "\n".join(["", head, *_list(BFLOAT16_QUANTITIES), "", *table, ""])


_BFLOAT16_HEADER = """\
## bfloat16

The error of each computation in bfloat16, compared with float32, in multiples of the error of plain transformers in
bfloat16 (with float32 gradient sums and master weights; one process, one sequence at a time) on the same model and
batches. `0.90 of 6.1e-03` is an error of 0.9 times 6.1e-03. The limit of every cell is {limit}; the largest multiple is
{worst}. Checkpoints are stored in bfloat16, so that the float32 computation starts from the same weights; all numbers
cover many tokens (`rl_transformers.testing.bfloat16`).
"""


_HEADER = """\
# Parity

Written by `make parity`. Do not edit.

Every backend, on every mesh, is compared with plain transformers in one process
(`rl_transformers.testing.reference_worker`), in float32, on a Qwen3 model of two layers and a batch of eight sequences.
Rows that name a `family` use a Mixture-of-Experts model instead, with eight experts, of which each token uses two,
chosen by the model's router or given with the batch (`forced routes`). Rows that name a pretrained model use that model
and human-written text. Each cell is the measured difference and its limit; `rl_transformers.testing.backend.Tolerances`
gives the reasons for the limits. Rows that name no options use the backend's defaults, sample packing and tied
embeddings.
"""


def _section(backend: str, measurements: Sequence[Measurement]) -> str:
    computed = [m for m in measurements if m.loaded_at is None]
    loaded = [m for m in measurements if m.loaded_at is not None]
    lines = [f"## {backend}", "", *_table(("mesh",), [((m.mesh,), m) for m in computed], QUANTITIES)]
    if loaded:
        lines += ["", "State saved by one mesh and loaded by another:", ""]
        lines += _table(("saved by", "loaded by"), [((m.mesh, m.loaded_at or ""), m) for m in loaded], QUANTITIES)
    return "\n".join([*lines, ""])


def _table(
    keys: Sequence[str], cells: Iterable[tuple[tuple[str, ...], Measurement]], known: dict[str, str]
) -> list[str]:
    rows: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for row, measurement in cells:
        rows.setdefault(row, {})[measurement.quantity] = measurement
    quantities = [name for name in known if any(name in row for row in rows.values())]
    lines = [[*keys, *quantities], ["---"] * (len(keys) + len(quantities))]
    lines += [[*row, *(str(found.get(name, "")) for name in quantities)] for row, found in sorted(rows.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def main(arguments: Sequence[str]) -> None:
    """Writes the page to the standard output."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit(
            f"usage: python -m rl_transformers.testing.parity DIRECTORY (the value of {DIRECTORY_VARIABLE})"
        )
    measurements = read_measurements(Path(arguments[0]))
    if not measurements:
        raise SystemExit(f"{arguments[0]}: no measurements; run a suite with {DIRECTORY_VARIABLE}={arguments[0]}")
    sys.stdout.write(page(measurements))


if __name__ == "__main__":
    main(sys.argv[1:])
