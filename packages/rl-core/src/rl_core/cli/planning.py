"""What `rl plan` prints: a table per model, one row per rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rl_core import config as configuration
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, Planner, RankPlan, Role, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import padded_lengths
from rl_core.layout.ranges import ranges


def show_plan(loaded: configuration.Loaded) -> None:
    """Plans every model of the run. Raises ConfigError where one cannot be arranged, or its backend does not plan."""
    from rl_core.trainer.settings import model_shapes, worker_spec

    config = loaded.config
    configuration.check_values(config)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    for role, (nodes, per_node) in model_shapes(config).items():
        # Schedules end with the last step, of which a plan needs to know nothing.
        backend, spec = worker_spec(config, role, num_training_steps=sys.maxsize)
        if not isinstance(backend, Planner):
            raise ConfigError(f"trainer.strategy: {backend.name} does not say what its ranks would hold")
        mesh = backend.mesh(spec.options, nodes * per_node)
        tokens, count = micro_batch_size(config, role, mesh)
        ranks = backend.plan(spec, mesh.world_size, micro_batch_tokens=tokens, num_micro_batches=count)
        has_experts = any(rank.experts for rank in ranks)
        console.print(_title(backend, spec, mesh, tokens, count, has_experts=has_experts), soft_wrap=True)
        console.print(_table(ranks))


def micro_batch_size(config: Config, role: Role, mesh: Mesh) -> tuple[int, int]:
    """Tokens of the largest micro-batch, every sequence as long as it may be and padded; micro-batches of each rank per
    mini-batch."""
    trainer = config.trainer
    longest = trainer.max_prompt_length + config.generator.sampling_params.max_generate_length
    longest = int(padded_lengths([longest], mesh.sequence_multiple)[0])
    prompts = trainer.critic_mini_batch_size if role == "critic" else trainer.policy_mini_batch_size
    sequences = -(-prompts * config.generator.n_samples_per_prompt // mesh.data)
    if trainer.max_tokens_per_microbatch > 0:
        tokens = min(trainer.max_tokens_per_microbatch, sequences * longest)
        per_micro_batch = max(1, tokens // longest)
    else:
        limit = trainer.micro_forward_batch_size_per_gpu if role == "reference" else None
        per_micro_batch = min(limit or trainer.micro_train_batch_size_per_gpu, sequences)
        tokens = per_micro_batch * longest
    multiple = mesh.micro_batch_multiple
    return tokens, -(-max(1, -(-sequences // per_micro_batch)) // multiple) * multiple


def _title(backend: Backend, spec: WorkerSpec, mesh: Mesh, tokens: int, count: int, *, has_experts: bool) -> str:
    sizes = ["tensor", "pipeline", "virtual_pipeline", "context", "sequence", "data"]
    sizes += ["expert", "expert_tensor"] if has_experts else []
    arranged = " × ".join(f"{size} {getattr(mesh, size)}" for size in sizes if getattr(mesh, size) > 1) or "one rank"
    dtype = "bfloat16" if spec.bf16 else "float32"
    model = f"{spec.role}: {spec.model.path} ({backend.name}, {dtype})"
    return f"{model}, {arranged}; {count} micro-batches of {tokens} tokens"


def _table(ranks: Sequence[RankPlan]) -> Table:
    table = Table()
    for name in ("rank", "data", "place", "layers", "experts"):
        table.add_column(name)
    for name in ("parameters", "weights", "gradients", "optimizer", "activations", "total"):
        table.add_column(name, justify="right")
    for rank in ranks:
        sizes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)
        table.add_row(
            str(rank.rank),
            str(rank.data_part),
            rank.place,
            ranges(rank.layers),
            ranges(rank.experts),
            f"{rank.num_parameters:,}",
            *(_size(number) for number in (*sizes, sum(sizes))),
        )
    return table


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
