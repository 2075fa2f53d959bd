"""Gets the memory plans of a run's models and of its engine from the plug-ins. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import attrs

from rl_core.config import Config, engine_spec, needs_engine
from rl_core.config.value_checks import longest_prompt
from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, EnginePlan, Role, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.packing import padded_lengths
from rl_core.rank_kit.shipped_configs import here_or_shipped
from rl_core.trainer.before.memory_plan import ModelOnRanks
from rl_core.trainer.before.settings import model_shapes, worker_spec


@attrs.frozen(kw_only=True)
class ArrangedModel:
    """One model of a run, with its backend and the mesh of its ranks."""

    backend: Backend
    spec: WorkerSpec
    """If the model is not on this machine, the specification's model path is the path of a model configuration that an
    installed package ships."""
    mesh: Mesh
    ranks_per_node: int


def arranged_models(config: Config) -> Mapping[Role, ArrangedModel]:
    """Determines backend, specification and mesh of each model that has ranks. Raises ConfigError if the backend cannot
    plan memory, or cannot arrange the configured number of ranks in a mesh."""
    models: dict[Role, ArrangedModel] = {}
    for role, (nodes, per_node) in model_shapes(config).items():
        # Only the schedule depends on the number of steps, and a plan does not need the schedule.
        backend, spec = worker_spec(config, role, num_training_steps=sys.maxsize)
        if not backend.can_plan:
            raise ConfigError(
                f"the backend {backend.name!r} cannot plan the memory of its ranks; set trainer.strategy=fsdp, which "
                "can, or define the backend's plan (docs/backends.md)",
                key="trainer.strategy",
            )
        spec = attrs.evolve(spec, model=attrs.evolve(spec.model, path=here_or_shipped(spec.model.path)))
        mesh = backend.mesh(spec.options, nodes * per_node)
        models[role] = ArrangedModel(backend=backend, spec=spec, mesh=mesh, ranks_per_node=per_node)
    return models


def planned_model(config: Config, role: Role, model: ArrangedModel, longest: int) -> ModelOnRanks:
    """The memory plan of the model's ranks for sequences of up to `longest` tokens."""
    tokens, count = micro_batch_size(config, role, model.mesh, longest)
    ranks = model.backend.plan(model.spec, model.mesh.world_size, micro_batch_tokens=tokens, num_micro_batches=count)
    optimizer = model.spec.optimizer
    return ModelOnRanks(
        role=role,
        ranks=ranks,
        ranks_per_node=model.ranks_per_node,
        keeps_optimizer=optimizer is not None and not optimizer.offload_after_step,
    )


def require_fitting_models(config: Config) -> None:
    """Raises ConfigError if the ranks would refuse a model, as far as its backend can tell before the start
    (`Backend.check_model`)."""
    for role in model_shapes(config):
        backend, spec = worker_spec(config, role, num_training_steps=sys.maxsize)
        require_fitting_model(config, backend, spec)


def require_fitting_model(config: Config, backend: Backend, spec: WorkerSpec) -> None:
    """Like `require_fitting_models`, for one model."""
    trainer = config.trainer
    is_alone = trainer.max_tokens_per_microbatch <= 0 and (
        trainer.micro_train_batch_size_per_gpu == trainer.micro_forward_batch_size_per_gpu == 1
    )
    backend.check_model(spec, longest=longest_sequence(config), num_sequences=1 if is_alone else 2)


def planned_engine(config: Config) -> EnginePlan | None:
    """The memory plan of one device of an engine; None if the run starts no engine, or the engine's plug-in makes no
    plan."""
    if not needs_engine(config):
        return None
    plugin, spec = engine_spec(config)
    return plugin.plan(attrs.evolve(spec, model_path=here_or_shipped(spec.model_path) or spec.model_path))


def longest_sequence(config: Config) -> int:
    """Largest number of tokens that the prompt and the response of a turn may have together."""
    return longest_prompt(config)[1] + config.generator.sampling_params.max_generate_length


def micro_batch_size(config: Config, role: Role, mesh: Mesh, longest: int | None = None) -> tuple[int, int]:
    """Tokens of a full micro-batch, and the number of micro-batches per rank and mini-batch. Assumes that every
    sequence has the largest length, and is padded so that the mesh can split it.

    Args:
        longest: tokens of a sequence; None: `longest_sequence(config)`. If `trainer.max_tokens_per_microbatch` is set
            but smaller than one sequence, a micro-batch holds one sequence.
    """
    trainer = config.trainer
    longest = int(padded_lengths([longest or longest_sequence(config)], mesh.sequence_multiple)[0])
    prompts = trainer.critic_mini_batch_size if role == "critic" else trainer.policy_mini_batch_size
    sequences = -(-prompts * config.generator.n_samples_per_prompt // mesh.data)
    if trainer.max_tokens_per_microbatch > 0:
        tokens = min(max(trainer.max_tokens_per_microbatch, longest), sequences * longest)
        per_micro_batch = max(1, tokens // longest)
    else:
        limit = trainer.micro_forward_batch_size_per_gpu if role == "reference" else None
        per_micro_batch = min(limit or trainer.micro_train_batch_size_per_gpu, sequences)
        tokens = per_micro_batch * longest
    multiple = mesh.micro_batch_multiple
    return tokens, -(-max(1, -(-sequences // per_micro_batch)) // multiple) * multiple
