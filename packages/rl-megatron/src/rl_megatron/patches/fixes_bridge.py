"""Fixes for bugs of Megatron-Bridge 0.3.1 that occur with gloo, or with experts that are not grouped (local experts).
For every fix other than `fix_expert_mappings`, tests/megatron/test_needed.py checks that the fault occurs without the
fix. Remove a fix when its bug is gone."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch.distributed as dist

from rl_megatron.patches.patching import replace
from rl_megatron.place import expert_group


def fix_scatter() -> None:
    """Makes tensors contiguous before `dist.scatter`. `RowParallelMapping` scatters column chunks, which are not
    contiguous; gloo ignores their strides and sends wrong numbers without an error."""
    scatter = dist.scatter

    def contiguous_scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [part.contiguous() for part in scatter_list]
        return scatter(tensor, scatter_list, *args, **kwargs)

    replace(dist, "scatter", contiguous_scatter)


def fix_expert_gathering() -> None:
    """Appends a local expert's number to its name while `gather_from_ep_ranks` runs. This method reads the number after
    `.weight`. Only names of grouped experts have a number there; for a local expert, the method would call
    `int('')`."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    def gather_from_ep_ranks(self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any) -> Any:
        name = self.megatron_param
        local = re.search(r"\.local_experts\.(\d+)\.", name)
        if local is None:
            return gather(self, megatron_weights, megatron_module, hf_param_name)
        self.megatron_param = name + local.group(1)
        try:
            return gather(self, megatron_weights, megatron_module, hf_param_name)
        finally:
            self.megatron_param = name

    gather = replace(MegatronParamMapping, "gather_from_ep_ranks", gather_from_ep_ranks)


def fix_expert_names() -> None:
    """Numbers local experts over all expert ranks. `_megatron_local_name_to_global` does so only for grouped experts,
    so every expert rank would load and export the first rank's experts."""
    from megatron.bridge.models.conversion import model_bridge

    def global_name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        name = of_layer(models, config, param_name, vp_stage)
        group = expert_group()
        if ".experts.local_experts." not in name or ".adapter." in name:
            return name
        first = config.num_moe_experts // group.size() * group.rank()
        return re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number.group()) + first), name)

    of_layer = model_bridge._megatron_local_name_to_global
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and vars(module).get("_megatron_local_name_to_global") is of_layer:
            replace(module, "_megatron_local_name_to_global", global_name)


def fix_expert_mappings() -> None:
    """Maps local experts (`local_experts.3.linear_fc1.weight`) like grouped ones (`linear_fc1.weight3`). DeepSeek's
    mapping has only grouped experts, so the weights of local experts would keep their initial values."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    def lookup_of_either(self: Any, megatron_param_name: str) -> Any:
        grouped = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.(\w+)$", r".\2.\3\1", megatron_param_name)
        found = lookup(self, megatron_param_name)
        if found is None and (found := lookup(self, grouped)) is not None:
            found.megatron_param = megatron_param_name  # tensor-parallel mappings find the parameter by this name
        return found

    lookup = replace(MegatronMappingRegistry, "megatron_to_hf_lookup", lookup_of_either)


def apply() -> None:
    """Applies all fixes; call once per process."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("ReplicatedLinear", "replicated")  # not a bug: a layer of our own
    fix_expert_mappings()
    fix_scatter()
    fix_expert_gathering()
    fix_expert_names()
