"""What stands beside the weights of a model in Hugging Face format: configuration and tokenizer as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from rl_core.errors import ConfigError


def write_config(config: Any, path: str, dtype: str, directory: Path) -> None:
    """Configuration (naming the dtype of the weights), tokenizer, and how the model generates where `path` says so.

    Raises:
        ConfigError: `path` has no tokenizer.
    """
    config.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}, indent=2) + "\n")
    if Path(path, "generation_config.json").is_file():
        GenerationConfig.from_pretrained(path).save_pretrained(directory)
    try:
        AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: has no tokenizer that could be saved with the model: {error}") from error
