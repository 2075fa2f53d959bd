"""What transformers reads of a model besides its weights: configuration, generation settings, tokenizer. Without its
warnings and progress bars, which would mix with the run's own display. transformers is imported inside functions,
because the checks of a configuration import this module, and importing transformers may load torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import written_config


def config_at_hand(path: str, where: str) -> Any:
    """transformers' configuration of a model in a local directory or in the hub's cache; None if it is in neither.

    Raises:
        ConfigError: the configuration cannot be read. If transformers rejects its content, the message begins with
            `where`.
    """
    if written_config(path) is None:
        return None
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' field checks may raise anything
        raise ConfigError(f"transformers cannot read the configuration of {path}: {error}", key=where) from error


def read_generation(model: str) -> Any:
    """Returns transformers' GenerationConfig of `model` (a directory or name); None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no such file
        return None


def write_tokenizer(model: str, directory: Path) -> None:
    """Writes the tokenizer of `model` (a directory or name).

    Raises:
        ConfigError: the model has no tokenizer, or it cannot be loaded.
        OSError: the tokenizer cannot be written.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{model}: its tokenizer, which is saved with the model, cannot be loaded: {error}"
        ) from error
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:
            raise
        # The tokenizers library raises a plain Exception if it cannot write.
        raise OSError(str(error)) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses transformers' warnings, such as those about unknown fields."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turns off transformers' progress bars, which would overwrite the run's own display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
