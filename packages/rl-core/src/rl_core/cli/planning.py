"""The output of `rl plan`: a table of ranks for each model, a table of the run's phases, a line about the engine and,
with `--context`, a table of sequence lengths."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from rich.console import Console
from rich.table import Table

from rl_core import config as configuration
from rl_core.config import Config
from rl_core.config.value_checks import longest_prompt
from rl_core.errors import ConfigError
from rl_core.interfaces import EnginePlan, RankPlan, Role
from rl_core.layout.ranges import ranges
from rl_core.rank_kit.worker_specs import SECTIONS

if TYPE_CHECKING:
    from rl_core.trainer.before.memory_plan import ModelOnRanks, Peak, Serving
    from rl_core.trainer.before.planned_run import ArrangedModel

_MANY_RANKS = 16
"""With more ranks than this, ranks with equal layers and memory share a row."""


def show_plan(
    loaded: configuration.Loaded,
    *,
    gpu_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    context: int | None = None,
) -> None:
    """Plans the memory of the run's models and its engine, and prints the plan.

    Args:
        gpu_memory_gib: memory of one device; a run that needs more is refused.
        host_memory_gib: memory of one machine; a run that needs more is refused.
        context: sequence length in tokens; plans sequences from the configured length up to this one. None: plans only
            the configured length.

    Raises:
        ConfigError: a value is invalid, the recipe has not yet created a model, a model's ranks form no valid mesh, its
            backend does not support planning, `context` is below the configured length, or the run does not fit.
        ConfigErrors: several values are invalid.
    """
    from rl_core.trainer.before.planned_run import arranged_models, planned_engine, require_fitting_models

    config = loaded.config
    configuration.check_values(config)
    require_made_models(loaded)
    require_fitting_models(config)
    contexts = _contexts(config, context)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    models, engine = arranged_models(config), planned_engine(config)
    limits = _Limits(device=_num_bytes(gpu_memory_gib), host=_num_bytes(host_memory_gib))
    plans = [_Plan.of(config, models, engine, length, limits) for length in contexts]
    for planned in plans[0].models:
        model = models[planned.role]
        left_to_prove = model.backend.prove(model.spec)
        console.print(_title(config, model, planned), soft_wrap=True)
        console.print(_ranks_table(planned.ranks))
        if left_to_prove is not None:
            console.print(f"not proved yet: a run compares the model with transformers first ({left_to_prove})")
    console.print(_phases_table(plans[0].peaks))
    console.print(_engine_line(config, engine, plans[0].served), soft_wrap=True)
    if context is not None:
        console.print(_contexts_table(plans))
    if plans[-1].problem is not None:
        raise plans[-1].problem


def require_made_models(loaded: configuration.Loaded) -> None:
    """Raises ConfigError if the recipe still has to create a model of the run."""
    from rl_core.trainer.before.settings import model_shapes

    for role in model_shapes(loaded.config):
        key, path = f"{SECTIONS[role]}.model.path", _model_name(loaded.config, role)
        if path is not None and path in loaded.makes and not Path(path).exists():
            raise ConfigError(
                f"{path} does not exist yet, so its sizes are unknown; let the recipe create it with rl train, or set "
                "another model",
                key=key,
            )


@attrs.frozen(kw_only=True)
class _Limits:
    """Available bytes; None: no limit."""

    device: int | None
    host: int | None


@attrs.frozen(kw_only=True)
class _Plan:
    """The plan of the run for one sequence length."""

    context: int
    models: list[ModelOnRanks]
    peaks: tuple[Peak, ...]
    served: Serving | None
    problem: ConfigError | None
    """Why the run does not fit; None if it fits."""

    @classmethod
    def of(
        cls,
        config: Config,
        models: Mapping[Role, ArrangedModel],
        engine: EnginePlan | None,
        context: int,
        limits: _Limits,
    ) -> _Plan:
        from rl_core.trainer.before.memory_plan import peaks, require_room, serving
        from rl_core.trainer.before.planned_run import planned_model

        planned = [planned_model(config, role, model, context) for role, model in models.items()]
        found = peaks(config, planned, engine, context=context, device_bytes=limits.device)
        served = None if engine is None else serving(engine, config, context, limits.device)
        problem = None
        try:
            require_room(found, device_bytes=limits.device, host_bytes=limits.host, served=served)
        except ConfigError as error:
            problem = error
        return cls(context=context, models=planned, peaks=found, served=served, problem=problem)


def _contexts(config: Config, asked: int | None) -> list[int]:
    """Returns the sequence lengths to plan: the configured one, doubled repeatedly up to the requested one."""
    from rl_core.trainer.before.planned_run import longest_sequence

    longest = longest_sequence(config)
    if asked is None:
        return [longest]
    if asked < longest:
        raise ConfigError(
            f"--context: {asked} tokens, but a sequence may have {longest} ({longest_prompt(config)[0]} + "
            "generator.sampling_params.max_generate_length); raise --context, or lower one of these"
        )
    lengths = [longest]
    while 2 * lengths[-1] < asked:
        lengths.append(2 * lengths[-1])
    return lengths if asked == longest else [*lengths, asked]


def _num_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _title(config: Config, model: ArrangedModel, planned: ModelOnRanks) -> str:
    from rl_core.trainer.before.planned_run import micro_batch_size

    mesh, spec = model.mesh, model.spec
    tokens, count = micro_batch_size(config, planned.role, mesh)
    splits_experts = mesh.expert > 1 or (mesh.tensor > 1 and any(rank.experts for rank in planned.ranks))
    sizes = ["tensor", "pipeline", "virtual_pipeline", "context", "sequence", "data"]
    sizes += ["expert", "expert_tensor", "expert_data"] if splits_experts else []
    arranged = " × ".join(f"{size} {getattr(mesh, size)}" for size in sizes if getattr(mesh, size) > 1) or "one rank"
    dtype = "bfloat16" if spec.bf16 else "float32"
    name = f"{spec.role}: {_model_name(config, planned.role)} ({model.backend.name}, {dtype})"
    return f"{name}, {arranged}; {count} micro-batches of {tokens} tokens"


def _model_name(config: Config, role: Role) -> str | None:
    trainer = config.trainer
    section = {"policy": trainer.policy, "reference": trainer.ref, "critic": trainer.critic}[role]
    return section.model.path


def _ranks_table(ranks: Sequence[RankPlan]) -> Table:
    table = Table()
    for name in ("rank", "data", "place", "layers", "experts"):
        table.add_column(name)
    for name in ("parameters", "weights", "gradients", "optimizer", "activations", "total"):
        table.add_column(name, justify="right")
    for alike in _alike(ranks):
        rank = alike[0]
        sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)
        table.add_row(
            ranges([one.rank for one in alike]),
            ranges(sorted({one.data_part for one in alike})),
            rank.place if len(alike) == 1 else "",
            ranges(rank.layers),
            ranges(sorted({expert for one in alike for expert in one.experts})),
            f"{rank.num_parameters:,}",
            *(_size(number) for number in (*sizes, sum(sizes))),
        )
    return table


def _alike(ranks: Sequence[RankPlan]) -> list[list[RankPlan]]:
    """Groups of ranks, one for each row of the table: single ranks or, with more than `_MANY_RANKS`, ranks with equal
    layers and memory, whose experts may differ."""
    if len(ranks) <= _MANY_RANKS:
        return [[rank] for rank in ranks]
    groups: dict[object, list[RankPlan]] = {}
    for rank in ranks:
        sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)
        groups.setdefault((rank.layers, sizes), []).append(rank)
    return list(groups.values())


def _phases_table(found: Sequence[Peak]) -> Table:
    table = Table(title="peak memory of one device and of one machine")
    for name in ("devices", "phase", "parts of a device's memory"):
        table.add_column(name)
    for name in ("device", "machine"):
        table.add_column(name, justify="right")
    for peak in found:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in peak.parts.items())
        table.add_row(peak.devices, peak.phase, parts, _size(peak.device_bytes), _size(peak.host_bytes))
    return table


def _engine_line(config: Config, engine: EnginePlan | None, served: Serving | None) -> str:
    chosen = config.generator.inference_engine
    if not configuration.needs_engine(config):
        return f"engine: none (generator.type={config.generator.type} samples nothing)"
    if engine is None or served is None:
        return f"engine: {chosen.backend} does not support planning its memory"
    return (
        f"engine: {chosen.backend}, {chosen.num_engines} × {engine.num_devices} devices; keys and values of "
        f"{served.tokens:,} tokens fit at once: {served.sequences} sequences of {served.context:,}"
    )


def _contexts_table(plans: Sequence[_Plan]) -> Table:
    table = Table(title="by sequence length in tokens")
    for name in ("tokens", "activations", "device", "machine", "sequences at once"):
        table.add_column(name, justify="right")
    for name in ("fullest phase", "fits"):
        table.add_column(name)
    for plan in plans:
        fullest = max(plan.peaks, key=lambda peak: peak.device_bytes)
        table.add_row(
            f"{plan.context:,}",
            _size(max(rank.activation_bytes for model in plan.models for rank in model.ranks)),
            _size(fullest.device_bytes),
            _size(max(peak.host_bytes for peak in plan.peaks)),
            "" if plan.served is None else str(plan.served.sequences),
            fullest.phase,
            "yes" if plan.problem is None else "no",
        )
    return table


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
