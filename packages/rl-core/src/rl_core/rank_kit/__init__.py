"""Building blocks for the ranks of any training backend. They are public: plug-in backends may use them, too.

    worker_specs       the configuration keys of a `WorkerSpec`, and checks of the spec
    process_group      joining the other ranks, and agreeing on one outcome
    objectives         from the name of a loss to its value on a micro-batch
    learning_rates     the learning rate of each optimizer step
    optimizer_steps    all settings of one step: configured, scheduled, or the caller's
    optimizers         optimizers by name, and the state that each keeps for a weight
    weight_buckets     packing and checking the data of a weight sync
    publishing         `Worker.publish`: whole weights or only the adapter, from rank 0
    state_files        the list of files, with checksums, that completes a worker's state on disk
    state_writing      torch's writer of a state's files, with checksums, and the errors of a failed write
    background_writer  saving while training continues
    model_files        a model in Hugging Face format
    model_shapes       a model's sizes, read from its `config.json`
    shipped_configs    configurations of public models that installed packages contain
    route_checks       whether a batch's routes fit the model that follows them
    route_layers       selecting the routes of the layers that a rank reads
    device_copies      copies of a batch to the computing device
    row_moves          moving rows of a tensor to distinct places and back, with gradients that need no sums
    perturbation       temporary noise on the parameters

All ranks of a model call the same functions in the same order, because some of them are collective. Nothing here
depends on the controller. A module is loaded when one of its names is first used; `worker_specs`, `learning_rates`,
`optimizer_steps`, `model_shapes` and `shipped_configs` import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.rank_kit.background_writer import BackgroundWriter
    from rl_core.rank_kit.device_copies import on_device
    from rl_core.rank_kit.learning_rates import learning_rate, require_schedule
    from rl_core.rank_kit.model_files import (
        ADAPTER_FOLDER,
        HEAD_FILE,
        read_head,
        write_config,
        write_head,
        write_weights,
        writing_model,
    )
    from rl_core.rank_kit.model_shapes import (
        EXPERT_COUNTS,
        LatentAttention,
        ModelShape,
        model_shape,
        read_config,
        written_config,
    )
    from rl_core.rank_kit.objectives import (
        batch_loss,
        needs_entropies,
        objective_from_spec,
        require_scores,
        total_metrics,
    )
    from rl_core.rank_kit.optimizer_steps import StepSettings, step_settings
    from rl_core.rank_kit.perturbation import Perturbation, Piece
    from rl_core.rank_kit.process_group import (
        COLLECTIVE_TIMEOUT,
        agree,
        from_first,
        join_process_group,
        new_cpu_group,
        own_device,
    )
    from rl_core.rank_kit.publishing import Exporting, on_first, pack_on_first, publish
    from rl_core.rank_kit.route_checks import RouteShape, require_routes
    from rl_core.rank_kit.route_layers import routes_of
    from rl_core.rank_kit.row_moves import gather_rows, scatter_rows
    from rl_core.rank_kit.shipped_configs import here_or_shipped, known_config, shipped_config
    from rl_core.rank_kit.state_files import STATE_LIST, require_complete_state, write_state_list
    from rl_core.rank_kit.state_writing import FileSystemWriter, reason_of, state_not_written
    from rl_core.rank_kit.weight_buckets import (
        broken_weights_file,
        bucket_records,
        draining,
        merge_manifests,
        pack_buckets,
        require_same,
        tensor_record,
        unpack_bucket,
        with_checksums,
    )
    from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path, require_optimizer, require_training_settings

_MODULES = {
    "agree": "process_group",
    "from_first": "process_group",
    "own_device": "process_group",
    "join_process_group": "process_group",
    "new_cpu_group": "process_group",
    "COLLECTIVE_TIMEOUT": "process_group",
    "objective_from_spec": "objectives",
    "batch_loss": "objectives",
    "needs_entropies": "objectives",
    "require_scores": "objectives",
    "total_metrics": "objectives",
    "StepSettings": "optimizer_steps",
    "step_settings": "optimizer_steps",
    "learning_rate": "learning_rates",
    "require_schedule": "learning_rates",
    "SECTIONS": "worker_specs",
    "require_model_path": "worker_specs",
    "require_optimizer": "worker_specs",
    "require_training_settings": "worker_specs",
    "Exporting": "publishing",
    "publish": "publishing",
    "pack_on_first": "publishing",
    "on_first": "publishing",
    "pack_buckets": "weight_buckets",
    "unpack_bucket": "weight_buckets",
    "bucket_records": "weight_buckets",
    "tensor_record": "weight_buckets",
    "with_checksums": "weight_buckets",
    "draining": "weight_buckets",
    "merge_manifests": "weight_buckets",
    "require_same": "weight_buckets",
    "broken_weights_file": "weight_buckets",
    "BackgroundWriter": "background_writer",
    "STATE_LIST": "state_files",
    "FileSystemWriter": "state_writing",
    "write_state_list": "state_files",
    "require_complete_state": "state_files",
    "state_not_written": "state_writing",
    "reason_of": "state_writing",
    "ADAPTER_FOLDER": "model_files",
    "HEAD_FILE": "model_files",
    "write_weights": "model_files",
    "writing_model": "model_files",
    "write_config": "model_files",
    "write_head": "model_files",
    "read_head": "model_files",
    "ModelShape": "model_shapes",
    "LatentAttention": "model_shapes",
    "model_shape": "model_shapes",
    "read_config": "model_shapes",
    "EXPERT_COUNTS": "model_shapes",
    "here_or_shipped": "shipped_configs",
    "known_config": "shipped_configs",
    "shipped_config": "shipped_configs",
    "written_config": "model_shapes",
    "RouteShape": "route_checks",
    "require_routes": "route_checks",
    "routes_of": "route_layers",
    "on_device": "device_copies",
    "scatter_rows": "row_moves",
    "gather_rows": "row_moves",
    "Perturbation": "perturbation",
    "Piece": "perturbation",
}
__all__ = [
    "agree",
    "from_first",
    "own_device",
    "join_process_group",
    "new_cpu_group",
    "COLLECTIVE_TIMEOUT",
    "objective_from_spec",
    "batch_loss",
    "needs_entropies",
    "require_scores",
    "total_metrics",
    "StepSettings",
    "step_settings",
    "learning_rate",
    "require_schedule",
    "SECTIONS",
    "require_model_path",
    "require_optimizer",
    "require_training_settings",
    "Exporting",
    "publish",
    "pack_on_first",
    "on_first",
    "pack_buckets",
    "unpack_bucket",
    "bucket_records",
    "tensor_record",
    "with_checksums",
    "draining",
    "merge_manifests",
    "require_same",
    "broken_weights_file",
    "BackgroundWriter",
    "STATE_LIST",
    "FileSystemWriter",
    "write_state_list",
    "require_complete_state",
    "state_not_written",
    "reason_of",
    "ADAPTER_FOLDER",
    "HEAD_FILE",
    "write_weights",
    "writing_model",
    "write_config",
    "write_head",
    "read_head",
    "ModelShape",
    "LatentAttention",
    "model_shape",
    "read_config",
    "EXPERT_COUNTS",
    "written_config",
    "here_or_shipped",
    "known_config",
    "shipped_config",
    "RouteShape",
    "require_routes",
    "routes_of",
    "scatter_rows",
    "on_device",
    "gather_rows",
    "Perturbation",
    "Piece",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
