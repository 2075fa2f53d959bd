"""Exports weights and gradients under Hugging Face names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_core.rank_kit.trained_parameters import unit_of
from rl_megatron.model.bridge import get_module_and_param_from_name
from rl_megatron.model.trained import names_of, own_parameters

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_BUFFER = ".e_score_correction_bias"


class WeightExport:
    """Exports the weights of a model and its adapters under Hugging Face's names; may be used any number of times.

    The ranks exchange facts about every tensor: its stage, shape, dtype and how it is split. They do so only in the
    first export. Bridge 0.3.1 would repeat this exchange in every export, with up to three collectives of Python
    objects per tensor and expert. Every export reads the tensors themselves from the model.
    """

    def __init__(self, bridge: Any, chunks: Sequence[Any]):
        self._model, self._chunks = bridge.hf_pretrained, list(chunks)
        self._converter: Any = bridge._model_bridge
        self._converter.hf_config = self._model.config
        self._bridge = bridge
        self._plan: list[Any] = []
        self._trained: frozenset[str] | None = None

    def weights(self, *, with_buffers: bool, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors, one at a time, on every rank, with adapters merged; a tied weight is yielded once. All
        ranks must drain the iterator together.

        `with_buffers` also yields the expert bias (a buffer), which some routers add to scores when they choose
        experts. `only_trained` leaves out units (`unit_of`) without trained parameters.
        """
        config = self._chunks[0].config
        self._make_plan()
        units = {unit_of(name) for name in self.trained_names()} if only_trained else None
        plan = [task for task in self._plan if units is None or unit_of(names_of(task)[0]) in units]
        tasks = [self._with_tensor(task) for task in plan]
        for name, tensor in self._converter.stream_weights_megatron_to_hf(
            self._chunks, self._model, cpu=False, show_progress=False, conversion_tasks=tasks
        ):
            if name == "lm_head.weight" and config.share_embeddings_and_output_weights:
                continue
            if not with_buffers and name.endswith(_BUFFER):
                continue
            yield name, tensor[: config.vocab_size] if name.endswith(_VOCABULARY) else tensor

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapters' whole tensors under peft's names, one at a time, on every rank. All ranks must drain the
        iterator together.

        The adapter of a fused matrix (`lora_type=lora`) is exported as one adapter per part; all parts have the same A.
        """
        self._make_plan()
        for name, tensor in self._converter.stream_adapter_weights_megatron_to_hf(
            self._chunks, cpu=False, show_progress=False
        ):
            yield f"base_model.model.{name}", tensor

    def trained_names(self) -> frozenset[str]:
        """The names of the trained tensors of all ranks, without adapters. Collective in the first call."""
        if self._trained is None:
            own = own_parameters(self._bridge, self._chunks)
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, [name for p, names in own if p.requires_grad for name in names])
            self._trained = frozenset(name for names in of_ranks for name in names)
        return self._trained

    def _make_plan(self) -> None:
        if self._plan:
            return
        converter, chunks = self._converter, self._chunks
        # Bridge has no conversion for a critic's head, so its task is None.
        self._plan = [task for task in converter.build_conversion_tasks(self._model, chunks) if task is not None]
        adapters = converter.build_adapter_conversion_tasks(chunks)
        converter.build_adapter_conversion_tasks = lambda _: adapters

    def _with_tensor(self, task: Any) -> Any:
        if task.megatron_module is None:
            return task  # belongs to another stage
        _, tensor = get_module_and_param_from_name(self._chunks, task.param_name, task.vp_stage)
        return dataclasses.replace(task, param_weight=tensor)


@contextmanager
def gradients_as_weights(chunks: Sequence[Any]):
    """Within the context, stand-ins that hold the main gradients replace the parameters, so that `WeightExport`
    exports gradients, and zeros for parameters that are not trained.

    The parameters themselves are not changed: with data of another dtype, a parameter would get a new gradient
    accumulator without Megatron's hooks, and later gradients would be lost.
    """
    places = [
        (module, name, parameter)
        for chunk in chunks
        for module in chunk.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    # Keyed by parameter, because tied parameters have several places.
    stand_ins = {parameter: _stand_in(parameter) for _, _, parameter in places}
    try:
        for module, name, parameter in places:
            module._parameters[name] = stand_ins[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _stand_in(parameter: Any) -> nn.Parameter:
    gradient = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
    stand_in = nn.Parameter(gradient.to(torch.float32), requires_grad=False)
    # Attributes that say how the parameter is split over ranks.
    vars(stand_in).update(vars(parameter))
    return stand_in
