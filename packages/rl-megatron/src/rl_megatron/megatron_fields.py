"""Reads the names of Megatron's configuration fields from its source code, because importing Megatron takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rl_core.errors import ConfigError, nearest

ClassName = Literal["TransformerConfig", "OptimizerConfig"]
_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "TransformerConfig": (
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
        ("core/transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "OptimizerConfig": (("core/optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Configuration class → (file, class name) of each class that declares its fields. Some models use the subclass
MLATransformerConfig instead of TransformerConfig."""


def require_fields(names: Iterable[str], class_name: ClassName, where: str) -> None:
    """Raises ConfigError for the first name that is not a field of the class."""
    names = list(names)
    known = fields_of(class_name) if names else frozenset()
    for name in names:
        if name not in known:
            raise ConfigError(
                f"Megatron-Core's {class_name} has no such field.{nearest(name, sorted(known))}", key=f"{where}.{name}"
            )


@cache
def fields_of(class_name: ClassName) -> frozenset[str]:
    """Returns the names of all fields of a class. Raises ConfigError if Megatron-Core is not installed."""
    root = _root_of("core")
    if root is None:
        raise ConfigError("megatron-core is not installed: pip install megatron-core==0.16.1")
    return frozenset(name for place in _PLACES[class_name] for name in _annotated_names(root / place[0], place[1]))


def require_bridge() -> None:
    """Raises ConfigError unless Megatron-Bridge is installed; imports nothing."""
    if _root_of("bridge") is None:
        raise ConfigError(
            "megatron needs Megatron-Bridge to read Hugging Face models: pip install --no-deps megatron-bridge==0.3.1",
            key="trainer.strategy",
        )


def _root_of(package: str) -> Path | None:
    """Returns the folder of the namespace package `megatron` that contains `package`, or None if there is none."""
    spec = find_spec("megatron")
    roots = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((root for root in roots if (root / package).is_dir()), None)


def _annotated_names(file: Path, class_name: str) -> list[str]:
    return [
        node.target.id
        for node in _class_in(file, class_name).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _class_in(file: Path, class_name: str) -> ast.ClassDef:
    module = ast.parse(file.read_text(encoding="utf-8"))
    (definition,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return definition
