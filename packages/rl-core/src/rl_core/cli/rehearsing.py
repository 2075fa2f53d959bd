"""The output of `rl rehearse`: for each model, the rehearsed and the planned memory of one rank's phases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rl_core import config as configuration
from rl_core.cli.planning import require_made_models

if TYPE_CHECKING:
    from rl_core.trainer.before.memory_plan import ModelOnRanks
    from rl_core.trainer.before.rehearsed_run import RehearsedModel

_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations")


def show_rehearsal(loaded: configuration.Loaded) -> None:
    """Rehearses every model of the run, and prints the measured and the planned memory.

    Raises:
        ConfigError: a value is invalid, the recipe has not yet created a model, a model's ranks form no valid mesh, or
            its backend cannot plan or rehearse this configuration; ConfigErrors: several values are invalid.
    """
    from rl_core.trainer.before.planned_run import arranged_models, longest_sequence, planned_model
    from rl_core.trainer.before.rehearsed_run import rehearsed_model

    config = loaded.config
    configuration.check_values(config)
    require_made_models(loaded)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for role, model in arranged_models(config).items():
        rehearsed = rehearsed_model(config, role, model)
        planned = planned_model(config, role, model, longest_sequence(config))
        console.print(
            f"{role}: the first of {model.mesh.world_size} ranks; {rehearsed.num_micro_batches} micro-batches of "
            f"{rehearsed.micro_batch_tokens} tokens ({model.backend.name})",
            soft_wrap=True,
        )
        console.print(_table(rehearsed, planned))


def _table(rehearsed: RehearsedModel, planned: ModelOnRanks) -> Table:
    from rl_core.trainer.before.rehearsed_run import planned_phase

    table = Table(title="peak memory of the rank's device in GiB, and operations in units of 10^12")
    table.add_column("phase")
    for name in (*_PARTS, "total", "operations"):
        table.add_column(name, justify="right")
    for phase in rehearsed.phases:
        expected = planned_phase(planned, phase.phase)
        rows = ((phase.phase, phase.parts, f"{phase.flops / 1e12:.1f}"), ("  planned", expected, ""))
        for label, parts, operations in rows:
            sizes = [*(parts.get(name, 0) for name in _PARTS), sum(parts.values())]
            table.add_row(label, *_gib(sizes), operations)
        off = sum(expected.values()) / sum(phase.parts.values()) - 1
        table.add_row("  plan differs by", *[""] * len(_PARTS), f"{off:+.1%}", "")
    return table


def _gib(sizes: Sequence[int]) -> list[str]:
    return [f"{size / 2**30:.2f}" for size in sizes]
