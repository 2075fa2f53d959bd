"""What a model's configuration shows before the run: whether ranks can score and train the model. Torch is imported
when the function is called, because a backend's entry point imports this module."""

from __future__ import annotations

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_transformers.pretrained import config_at_hand


def require_fitting_model(spec: WorkerSpec, *, longest: int, num_sequences: int) -> None:
    """Requires that a policy can be saved as a whole, that the longest sequence does not change the rotary frequencies
    of other sequences, and that `load_scorer` accepts the model's structure. See `Backend.check_model`."""
    where, path = f"{SECTIONS[spec.role]}.model.path", spec.model.path
    config = None if path is None else config_at_hand(path, where)
    if config is None or path is None:
        return
    from rl_transformers.kept_tensors import require_whole_export
    from rl_transformers.rank.micro_batch import require_own_frequencies
    from rl_transformers.rank.token_scorer import require_structure

    if spec.role == "policy":
        require_whole_export(config, path, where)
    try:
        require_own_frequencies(config.get_text_config(), longest, num_sequences)
    except ConfigError as error:
        raise ConfigError(str(error), key=where) from error
    require_structure(spec, config)
