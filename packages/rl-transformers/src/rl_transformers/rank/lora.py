"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685), which peft inserts into the model's own layers.

An adapted layer computes W x + s · B A x with W frozen and s = alpha / rank. Adapters are ordinary parameters of the
model, `<layer>.lora_A.default.weight` [r, in] and `<layer>.lora_B.default.weight` [out, r]; the frozen weight becomes
`<layer>.base_layer.weight`. Only `add_adapters` imports peft, so a run without adapters does not wait for the import.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig
from rl_core.rank_kit.trained_parameters import unit_of
from rl_transformers.rank.rank_mesh import whole

Making = Callable[[Sequence[nn.Parameter], Callable[[], Tensor]], Tensor]
"""`making(parameters, make)` calls `make` while torch can compute with `parameters`, and returns the result of `make`.
Collective."""
_NAME = "default"
logger = logging.getLogger(__name__)


def as_they_are(parameters: Sequence[nn.Parameter], make: Callable[[], Tensor]) -> Tensor:
    """The `Making` for parameters that torch can compute with directly: whole tensors, and DTensors."""
    return make()


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, path: str, seed: int, where: str) -> None:
    """Freezes `model` and puts adapters into its layers, in float32 (float64 in a float64 model). B starts at zero, so
    the outputs do not change yet.

    Args:
        model: on the CPU or on `meta`; all its parameters become frozen.
        lora: rank above 0.
        path: path of the base model; separately saved adapters refer to it.
        seed: seed of A's initial values; must be the same on every rank.
        where: the configuration section, for messages.

    Raises:
        ConfigError: no layer has one of the configured names, a named layer cannot have adapters, or a regular
            expression is invalid.
    """
    import peft

    _require_known_names(model, lora, where)
    asked = _asked_layers(model, lora)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_names(lora.target_modules),
        exclude_modules=None if lora.exclude_modules is None else _names(lora.exclude_modules),
        init_lora_weights=True if lora.init_method == "kaiming" else "gaussian",
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    model.requires_grad_(False)
    output = model.get_output_embeddings()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Adapters of tied embeddings and of stacked experts are refused below, with a remedy. peft notices by itself
        # which layers store their weight as [in, out] (`fan_in_fan_out`).
        expected = ".*tie_word_embeddings|.*_pattern keys did not match|fan_in_fan_out is set to"
        warnings.filterwarnings("ignore", message=expected)
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
        except (ValueError, re.error) as error:
            raise ConfigError(f"{lora.target_modules!r}: {error}", key=f"{where}.model.lora.target_modules") from error
    _require_linear_layers(model, where)
    if output is not model.get_output_embeddings():
        raise ConfigError(
            "the output layer cannot have adapters, because log-probs are computed from its weight; name other layers, "
            "or leave it out with exclude_modules",
            key=f"{where}.model.lora.target_modules",
        )
    _require_asked_layers(model, lora, asked, where)
    for _, weight in adapter_weights(model):
        weight.data = weight.data.to(torch.promote_types(torch.float32, weight.dtype))
    if model.device.type != "meta":
        counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in asked)
        logger.info(
            "%s.model.lora: %s parameters are trained, in adapters of rank %d of %d linear layers: %s",
            where,
            f"{sum(weight.numel() for _, weight in adapter_weights(model)):,}",
            lora.rank,
            len(asked),
            ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())),
        )


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether `add_adapters` was called on the model."""
    return hasattr(model, "peft_config")


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """All trained parameters of a model with adapters, in the order of its layers."""
    return ((name, weight) for name, weight in model.named_parameters() if ".lora_" in name)


def merged_weights(
    model: PreTrainedModel, making: Making = as_they_are, units: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of the equivalent model without adapters, W + s · B A, one at a time. A tied weight appears
    once. `units`: yields only weights of these units (`unit_of`); None: all.

    The sum has the adapters' dtype. The names are the parameter names of the model without adapters.
    """
    for name, weight in model.named_parameters():
        if ".lora_" in name or (units is not None and unit_of(name) not in units):
            continue
        layer_name, is_adapted, parameter = name.rpartition(".base_layer.")
        if is_adapted and parameter == "weight":
            layer: Any = model.get_submodule(layer_name)
            yield f"{layer_name}.weight", making([weight, *_adapters_of(layer)], partial(_merged, layer, weight))
        else:
            yield name.replace(".base_layer.", "."), making([weight], weight.detach)


def adapter_tensors(
    model: PreTrainedModel, dtype: torch.dtype | None, making: Making = as_they_are
) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapters under peft's names, gathered one at a time on all ranks, in `dtype`; None: in the dtype in
    which they are trained."""
    for name, weight in adapter_weights(model):
        tensor = making([weight], weight.detach)
        yield f"base_model.model.{name.replace(f'.{_NAME}.', '.')}", whole(tensor.to(dtype or weight.dtype))


def save_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes only the adapters, in peft's format. `tensors`: whole, under peft's names."""
    peft_config: Any = model.peft_config
    peft_config[_NAME].save_pretrained(directory)
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(on_cpu, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapters_of(layer: nn.Module) -> list[nn.Parameter]:
    return [weight for name, weight in layer.named_parameters() if name.startswith("lora_")]


def _merged(layer: Any, weight: nn.Parameter) -> Tensor:
    return weight.detach() + layer.get_delta_weight(_NAME).detach()


def _names(names: str | tuple[str, ...]) -> str | list[str]:
    """The names in peft's form. A single string is `all-linear` or a regular expression, as in peft."""
    return names if isinstance(names, str) else list(names)


def _matches(name: str, given: str | Sequence[str]) -> bool:
    """Whether peft's `given` matches a module path: a list has the ends of paths, a text is a regular expression."""
    if isinstance(given, str):
        return re.fullmatch(given, name) is not None
    return any(f".{name}".endswith(f".{end}") for end in given)


def _asked_layers(model: PreTrainedModel, lora: LoraConfig) -> set[str]:
    """Paths of the linear layers that the configuration names; `all-linear` leaves out the output layer."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    output, targets, excluded = model.get_output_embeddings(), lora.target_modules, lora.exclude_modules
    is_all = isinstance(targets, str) and targets.lower() == "all-linear"
    try:
        return {
            name
            for name, layer in linear.items()
            if (layer is not output if is_all else _matches(name, targets))
            and not (excluded is not None and _matches(name, excluded))
        }
    except re.error:  # peft's error for it is reported
        return set()


def _require_known_names(model: PreTrainedModel, lora: LoraConfig, where: str) -> None:
    """Raises ConfigError if a name of a list, or an expression of excluded layers, fits no linear layer. peft ignores
    it if another name fits: `q_proj` in a model with a single `qkv_proj`, or an excluded block such as `mlp`."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    targets, excluded = lora.target_modules, lora.exclude_modules or ()
    asked: dict[str, Sequence[str | list[str]]] = {
        "target_modules": [] if isinstance(targets, str) else [[name] for name in targets],
        "exclude_modules": [excluded] if isinstance(excluded, str) else [[name] for name in excluded],
    }
    for key, patterns in asked.items():
        unknown = ["".join(p) for p in patterns if not any(_matches(name, p) for name in linear)]
        if unknown:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"no linear layer of {type(model).__name__} is called {', '.join(unknown)}; its linear layers are "
                f"{', '.join(ends)}",
                key=f"{where}.model.lora.{key}",
            )


def _require_asked_layers(model: PreTrainedModel, lora: LoraConfig, asked: set[str], where: str) -> None:
    """Raises ConfigError unless exactly the layers `asked` have adapters, with the configured rank and scale. For some
    models, peft changes the configuration: since transformers 5 stacks experts, names of dense layers mean experts."""
    adapted: dict[str, Any] = {name: m for name, m in model.named_modules() if hasattr(m, "base_layer")}
    wrong = sorted(asked ^ adapted.keys())
    for name, layer in adapted.items():
        if (layer.r[_NAME], layer.scaling[_NAME]) != (lora.rank, lora.alpha / lora.rank):
            wrong.append(f"{name} (rank {layer.r[_NAME]}, scale {layer.scaling[_NAME]:g})")
    if wrong:
        raise ConfigError(
            f"got {lora.target_modules!r}, but peft adapts other layers, or with another rank or scale: "
            f"{', '.join(wrong[:3])}; name other layers, such as those of attention",
            key=f"{where}.model.lora.target_modules",
        )


def _require_linear_layers(model: PreTrainedModel, where: str) -> None:
    adapted: dict[str, Any] = {name: m for name, m in model.named_modules() if hasattr(m, "base_layer")}
    for name, module in adapted.items():
        base = module.get_base_layer()
        if not isinstance(base, nn.Linear | Conv1D):
            raise ConfigError(
                f"{name} is a {type(base).__name__}; only linear layers can have adapters here: name other layers, "
                "such as those of attention",
                key=f"{where}.model.lora.target_modules",
            )
