"""Tensors of a checkpoint that training does not read: a vision tower beside a text model, heads that predict several
tokens (MTP), buffers that older checkpoints contain. A saved model has them unchanged, copied from the checkpoint.

transformers leaves most of them out silently, because its model classes list them as expected extras.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

from rl_core.errors import ConfigError
from rl_core.rank_kit.model_shapes import read_config

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SAVED_ELSEWHERE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that transformers computes itself, and therefore does not report when it finds them in a checkpoint."""


@attrs.frozen(kw_only=True)
class KeptTensors:
    """What a saved model copies from the checkpoint that it was trained from."""

    files: Mapping[str, Path]
    """Name of a tensor → the safetensors file that contains it."""
    config: Mapping[str, Any] | None = None
    """`config.json` of the checkpoint if it combines several models, of which one was trained; None: the trained
    model's own configuration describes the whole checkpoint."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors one at a time, in their own dtypes."""
        for name, file in self.files.items():
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)

    def write_config(self, directory: Path, dtype: torch.dtype) -> None:
        """Replaces `config.json` in `directory` by the checkpoint's, with the dtype of the trained weights."""
        if self.config is None:
            return
        written = {"dtype": str(dtype).removeprefix("torch.")}
        fields = {**self.config, **written}
        if isinstance(text := fields.get("text_config"), Mapping):
            fields["text_config"] = {**text, **written}
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def checkpoint_directory(path: str) -> Path | None:
    """The directory of a model given by path, or by the name of a model in the hub's cache. None: it is nowhere."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(path, "config.json", local_files_only=True)
    except OSError:
        return None
    return None if found is None else Path(found).parent


def stored_files(directory: Path) -> dict[str, Path]:
    """Name of each tensor of a checkpoint → its safetensors file; empty for a checkpoint in another format."""
    if (directory / _INDEX).is_file():
        of_name = json.loads((directory / _INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in of_name.items()}
    if not (directory / _SINGLE).is_file():
        return {}
    with safe_open(directory / _SINGLE, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), directory / _SINGLE)


def kept_tensors(model: Any, unexpected: Collection[str], path: str, where: str) -> KeptTensors:
    """Finds the tensors that transformers did not read when it loaded `model`.

    Args:
        model: the loaded transformers model; may be on `meta`, and may have adapters.
        unexpected: `unexpected_keys` of `from_pretrained(…, output_loading_info=True)`.
        path: the checkpoint that was loaded.
        where: key path of the model, for messages.

    Raises:
        ConfigError: tensors were not read and cannot be copied into a saved model.
    """
    directory = checkpoint_directory(path)
    files = {} if directory is None else stored_files(directory)
    own, is_part = _own_names(model), _is_part(model, directory)
    silent = [*(model._keys_to_ignore_on_load_unexpected or ()), *_SAVED_ELSEWHERE]
    own |= {name.removeprefix(f"{model.base_model_prefix}.") for name in own}  # a checkpoint may lack this prefix
    unread = {name for name in files if name not in own and any(re.search(pattern, name) for pattern in silent)}
    unread |= set(unexpected)
    if not unread:
        return KeptTensors(files={})
    if missing := sorted(unread - files.keys()):
        raise ConfigError(
            f"{type(model).__name__} does not read {len(missing)} tensors of {path}, such as {missing[0]}, and only "
            "tensors in safetensors files can be copied into the saved model: save it again with save_pretrained",
            key=where,
        )
    if is_part:
        require_same_names(model, files, path, where)
    config = read_config(str(directory)) if is_part else None
    return KeptTensors(files={name: files[name] for name in sorted(unread)}, config=config)


def require_whole_export(config: Any, path: str, where: str) -> None:
    """Requires, before weights are loaded, that a checkpoint that combines several models can be saved as a whole.

    Args:
        config: transformers' configuration of the checkpoint at `path`, which is on this machine.
        path, where: see `kept_tensors`.

    Raises:
        ConfigError: only a part would be trained, and its tensors have other names than in the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    from rl_transformers.pretrained import no_progress_bars, quiet

    directory = checkpoint_directory(path)
    if directory is None or not config.sub_configs or not (files := stored_files(directory)):
        return
    try:
        with (
            quiet(),
            no_progress_bars(),
        ):  # a loaded model knows the names in its checkpoint; on `meta`, it reads no data
            model = AutoModelForCausalLM.from_pretrained(path, device_map="meta")
    except Exception:  # the load at the start reports what is wrong
        return
    if _is_part(model, directory):
        require_same_names(model, files, path, where)


def require_same_names(model: Any, files: Collection[str], path: str, where: str) -> None:
    """Raises ConfigError unless every tensor of the trained model has its name in the checkpoint, so that the trained
    tensors and the others form the checkpoint's model again."""
    tied = set(model.all_tied_weights_keys or ())
    if renamed := sorted(_own_names(model) - set(files) - tied):
        raise ConfigError(
            f"{path} combines several models, and only its text model ({type(model).__name__}) would be trained and "
            f"saved, under other names ({renamed[0]} is not in the checkpoint), so the saved model would lack the "
            "rest; save the text model alone (AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)) and train "
            "that",
            key=where,
        )


def with_rest(tensors: Iterator[tuple[str, Tensor]], path: str, left_out: Collection[str]) -> Iterator[Any]:
    """Yields `tensors`, then all others of the checkpoint at `path`, unchanged, except those in `left_out`. For a
    backend whose trained tensors have the checkpoint's names."""
    written = set(left_out)
    for name, tensor in tensors:
        written.add(name)
        yield name, tensor
    directory = checkpoint_directory(path)
    files = {} if directory is None else stored_files(directory)
    yield from KeptTensors(files={name: file for name, file in files.items() if name not in written}).tensors()


def copy_processors(path: str, directory: Path) -> None:
    """Copies the settings of a checkpoint's processors (of images and videos) to `directory`, if it has any."""
    source = checkpoint_directory(path)
    for file in () if source is None else source.glob("*processor_config.json"):
        shutil.copyfile(file, directory / file.name)


def _is_part(model: Any, directory: Path | None) -> bool:
    """Whether the checkpoint's configuration is of another kind of model, one of whose parts is `model`."""
    config = None if directory is None else read_config(str(directory))
    return config is not None and config.get("model_type") != model.config.model_type


def _own_names(model: Any) -> set[str]:
    """Names of the model's tensors in a checkpoint, including all names of tied weights."""
    from transformers.core_model_loading import revert_weight_conversion

    held = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    empty = {name: torch.empty_like(t, device="meta") for name, t in held.items() if ".lora_" not in name}
    return set(revert_weight_conversion(model, empty))
