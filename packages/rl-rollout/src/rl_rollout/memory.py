"""Functions for estimating the memory of any engine before it is started."""

from __future__ import annotations

from rl_core.errors import ConfigError
from rl_core.interfaces import EngineSpec
from rl_core.rank_kit.model_shapes import ModelShape, model_shape
from rl_transformers.pretrained import config_at_hand

BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}
_MODEL = "trainer.policy.model.path"


def shape_of(spec: EngineSpec) -> ModelShape:
    """Reads the sizes of the engine's model from its configuration. transformers fills in what `config.json` leaves
    out, such as Gemma's tied embeddings. Raises ConfigError if the sizes are unknown, for example because the model is
    not on this machine."""
    config = config_at_hand(spec.model_path, _MODEL)
    if config is None:
        raise ConfigError(
            f"{spec.model_path} is not on this machine, so its sizes are unknown; set a directory, or let the recipe "
            "create the model first",
            key=_MODEL,
        )
    return model_shape(config.get_text_config().to_dict(), _MODEL)


def sampling_bytes(spec: EngineSpec, shape: ModelShape) -> int:
    """Returns the bytes of one step's float32 logits and of the log-probs computed from them."""
    return 2 * 4 * spec.max_num_seqs * shape.vocab_size
