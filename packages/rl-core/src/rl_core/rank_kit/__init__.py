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
    trained_parameters which parameters `model.trainable` selects, and which tensors a sync of trained ones sends
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
    from rl_core.rank_kit.learning_rates import learning_rate, require_schedule
    from rl_core.rank_kit.model_files import read_head, write_config, write_head, write_weights, writing_model
    from rl_core.rank_kit.model_shapes import model_shape, read_config
    from rl_core.rank_kit.objectives import batch_loss, objective_from_spec, require_scores, total_metrics
    from rl_core.rank_kit.optimizer_steps import step_settings
    from rl_core.rank_kit.perturbation import Perturbation, Piece
    from rl_core.rank_kit.process_group import agree, from_first, join_process_group, own_device
    from rl_core.rank_kit.publishing import pack_on_first, publish
    from rl_core.rank_kit.route_checks import RouteShape, require_routes
    from rl_core.rank_kit.route_layers import routes_of
    from rl_core.rank_kit.state_files import require_complete_state, write_state_list
    from rl_core.rank_kit.state_writing import FileSystemWriter, state_not_written
    from rl_core.rank_kit.weight_buckets import pack_buckets
    from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path, require_optimizer

_MODULES = {
    "agree": "process_group",
    "from_first": "process_group",
    "own_device": "process_group",
    "join_process_group": "process_group",
    "objective_from_spec": "objectives",
    "batch_loss": "objectives",
    "require_scores": "objectives",
    "total_metrics": "objectives",
    "step_settings": "optimizer_steps",
    "learning_rate": "learning_rates",
    "require_schedule": "learning_rates",
    "SECTIONS": "worker_specs",
    "require_model_path": "worker_specs",
    "require_optimizer": "worker_specs",
    "publish": "publishing",
    "pack_on_first": "publishing",
    "pack_buckets": "weight_buckets",
    "BackgroundWriter": "background_writer",
    "FileSystemWriter": "state_writing",
    "write_state_list": "state_files",
    "require_complete_state": "state_files",
    "state_not_written": "state_writing",
    "write_weights": "model_files",
    "writing_model": "model_files",
    "write_config": "model_files",
    "write_head": "model_files",
    "read_head": "model_files",
    "model_shape": "model_shapes",
    "read_config": "model_shapes",
    "RouteShape": "route_checks",
    "require_routes": "route_checks",
    "routes_of": "route_layers",
    "Perturbation": "perturbation",
    "Piece": "perturbation",
}
__all__ = [
    "agree",
    "from_first",
    "own_device",
    "join_process_group",
    "objective_from_spec",
    "batch_loss",
    "require_scores",
    "total_metrics",
    "step_settings",
    "learning_rate",
    "require_schedule",
    "SECTIONS",
    "require_model_path",
    "require_optimizer",
    "publish",
    "pack_on_first",
    "pack_buckets",
    "BackgroundWriter",
    "FileSystemWriter",
    "write_state_list",
    "require_complete_state",
    "state_not_written",
    "write_weights",
    "writing_model",
    "write_config",
    "write_head",
    "read_head",
    "model_shape",
    "read_config",
    "RouteShape",
    "require_routes",
    "routes_of",
    "Perturbation",
    "Piece",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
