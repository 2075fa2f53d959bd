"""The settings of a model and its ranks that decide whether Megatron can run it; see `setup_of`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.layout.stages import LayerRange, pipeline_chunks
from rl_core.rank_kit.model_shapes import ModelShape, model_shape
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_megatron.checks.lora_targets import adapted_layers
from rl_megatron.checks.refused_models import require_not_refused, taken_config
from rl_megatron.options import field_key, transformer_fields

SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Megatron's name of a parallel size → the name in `Mesh`."""


@attrs.frozen(kw_only=True)
class Setup:
    """The settings of one model and its ranks that the checks read."""

    fields: Mapping[str, Any]
    """Fields of Megatron's `TransformerConfig`, from `megatron_config` and its `transformer_config_kwargs`. None: the
    model's own value."""
    shape: ModelShape | None
    """None: the model is not available yet, and checks that need the shape run later."""
    model: Any
    """transformers' configuration; None if `shape` is None."""
    world_size: int
    is_packed: bool
    """Whether the sequences of a micro-batch are packed into one stream."""
    where: str
    """Key path of the section `megatron_config`."""
    passed: frozenset[str] = frozenset()
    """Names of the fields that `transformer_config_kwargs` sets."""
    adapted: frozenset[str] = frozenset()
    """Hugging Face's names of the layers that have adapters."""
    recomputes: bool = False
    """Whether `trainer.gradient_checkpointing` is on, which recomputes whole layers."""

    def size(self, name: str) -> int:
        """Returns a parallel size. An unset `expert_tensor_parallel_size` equals the tensor-parallel size; any other
        unset size is 1."""
        default = self.size("tensor_model_parallel_size") if name == "expert_tensor_parallel_size" else 1
        value = self.fields.get(name)
        return default if value is None else value

    @property
    def is_interleaved(self) -> bool:
        """Whether each pipeline stage has several model chunks (virtual stages)."""
        return self.size("virtual_pipeline_model_parallel_size") > 1

    def key(self, name: str) -> str:
        """Returns the key path at which the user sets a field."""
        return field_key(name, self.passed, self.where)

    def mesh(self) -> Mesh:
        """Returns the mesh of the ranks. Raises ConfigError if the sizes do not fit the number of ranks."""
        sizes = {ours: self.size(name) for name, ours in SIZES.items()}
        return Mesh(world_size=self.world_size, **sizes)

    def chunks(self, num_layers: int) -> list[LayerRange]:
        """Returns the layers of each model chunk. Raises ConfigError if the fields do not fit the number of layers."""
        return pipeline_chunks(
            num_layers,
            self.size("pipeline_model_parallel_size"),
            virtual_pipeline=self.size("virtual_pipeline_model_parallel_size"),
            num_first=self.fields.get("num_layers_in_first_pipeline_stage"),
            num_last=self.fields.get("num_layers_in_last_pipeline_stage"),
            count_embedding=bool(self.fields.get("account_for_embedding_in_pipeline_split")),
            count_loss=bool(self.fields.get("account_for_loss_in_pipeline_split")),
        )


Check = Callable[[Setup], "ConfigError | None"]
"""Returns what is wrong, or None."""


def first_complaint(checks: Sequence[Check], setup: Setup) -> ConfigError | None:
    """Returns the error of the first check that fails; None if all pass."""
    return next((complaint for check in checks if (complaint := check(setup)) is not None), None)


def setup_of(spec: WorkerSpec, world_size: int, model: Any = None) -> Setup:
    """Returns the setup that `spec` describes.

    Args:
        spec: which model to load and how to train it.
        world_size: number of the model's ranks.
        model: transformers' configuration of the model; None: read it from the model's path if the model is there.

    Raises:
        ConfigError: a field is unknown or has two different values, a layer named for LoRA cannot have adapters, every
            layer is excluded from LoRA, the model cannot be read or is refused, or `gradient_checkpointing` is
            `"selective"`.
    """
    section = SECTIONS[spec.role]
    where = f"{section}.megatron_config"
    if spec.gradient_checkpointing == "selective":
        raise ConfigError(
            "selective, but Megatron has its own keys for what is recomputed; set "
            f"{where}.transformer_config_kwargs.recompute_granularity=selective and recompute_modules, with "
            "trainer.gradient_checkpointing=false",
            key="trainer.gradient_checkpointing",
        )
    if model is None:
        model = taken_config(spec.model.path, f"{section}.model.path")
    else:
        require_not_refused(model, spec.model.path, f"{section}.model.path")
    lora = spec.model.lora
    return Setup(
        fields=transformer_fields(spec.options, where),
        shape=None if model is None else model_shape(model.to_dict(), f"{section}.model.path"),
        model=model,
        world_size=world_size,
        is_packed=spec.use_sample_packing,
        where=where,
        passed=frozenset(spec.options.transformer_config_kwargs),
        adapted=frozenset(adapted_layers(lora, section) if lora.rank > 0 else ()),
        recomputes=spec.gradient_checkpointing is True,
    )
