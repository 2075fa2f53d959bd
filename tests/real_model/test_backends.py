"""SmolLM2-135M-Instruct in FSDP and Megatron: log-probs of real text agree with transformers, and the exported
weights equal the loaded ones.

Each mesh is started once, for both checks; each measurement is a cell of docs/parity.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.interfaces import ModelConfig, Worker, WorkerSpec
from rl_core.workers import MicroBatchLimits
from rl_fsdp import FsdpOptions, fsdp
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.bfloat16 import is_scored
from rl_transformers.testing.parity import Measurement, write_down
from rl_transformers.testing.ranks import PRELOADED, RankGroup
from tests.real_model.conftest import Reference
from tests.real_model.real_text import real_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "rl_fsdp.sharding", "rl_megatron.rank.worker"]))
MESHES = {
    "FSDP, 1 rank": (fsdp, 1, FsdpOptions()),
    "FSDP, 2 ranks": (fsdp, 2, FsdpOptions()),
    "Megatron, 1 rank": (megatron, 1, MegatronOptions()),
    "Megatron, TP 3": (megatron, 3, MegatronOptions(tensor_model_parallel_size=3)),
    "Megatron, PP 2": (megatron, 2, MegatronOptions(pipeline_model_parallel_size=2)),
}
QUICK_MESHES = ("FSDP, 2 ranks", "Megatron, TP 3", "Megatron, PP 2")
"""Run by `make test`; `make parity` runs all meshes."""
LIMITS = MicroBatchLimits(max_tokens=600)
"""Two sequences at a time."""


def spec_of(model: Path, options: FsdpOptions | MegatronOptions, *, bf16: bool) -> WorkerSpec:
    """The spec of a policy without an optimizer."""
    return WorkerSpec(
        role="policy",
        model=ModelConfig(path=str(model)),
        optimizer=None,
        options=options,
        bf16=bf16,
        gradient_checkpointing=False,
        use_sample_packing=True,
        logprobs_chunk_size=256,
        total_optimizer_steps=None,
        seed=0,
        num_threads=1,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_MESHES else pytest.mark.parity) for name in MESHES]
)
def test_real_text_scores_as_in_transformers_and_the_export_is_what_was_loaded(
    name: str, reference: Reference, tmp_path: Path
):
    backend, world_size, options = MESHES[name]
    group = RankGroup(
        backend, spec_of(reference.model, options, bf16=False), world_size, directory=tmp_path, timeout_s=600
    )
    try:
        batch = real_batch(reference.sequences)
        logprobs_T = group.forward(batch, LIMITS, temperature=1.0)["logprobs"][is_scored(batch)]
        group.call(Worker.save_model, tmp_path / "saved")
    finally:
        group.close()
    assert len(logprobs_T) == 2000
    require_within(backend.name, name, "log-probs", float((logprobs_T - reference.logprobs_T).abs().max()), 1e-4)
    exported = largest_difference(tmp_path / "saved", reference.model)
    require_within(backend.name, name, "exported", exported, 0.0)
    require_loads_alike(tmp_path / "saved", reference.model)


def require_within(backend: str, name: str, quantity: str, difference: float, limit: float) -> None:
    """Records a cell of docs/parity.md. Raises AssertionError if the difference exceeds `limit`, which for log-probs
    allows for float32 rounding in 30 layers."""
    mesh = f"SmolLM2-135M-Instruct, {name.split(', ')[1]}"
    measurement = Measurement(backend=backend, mesh=mesh, quantity=quantity, difference=difference, limit=limit)
    write_down(measurement)
    print(f"\n{name}: {quantity} {measurement}")
    assert difference <= limit, f"{quantity}: {measurement}"


def largest_difference(saved: Path, given: Path) -> float:
    """The largest difference between two models' weights, as float32. Raises AssertionError if their names differ."""
    with (
        safe_open(given / "model.safetensors", "pt") as expected,
        safe_open(saved / "model.safetensors", "pt") as found,
    ):
        names = list(expected.keys())
        assert set(found.keys()) == set(names)
        return max(
            float((found.get_tensor(name).float() - expected.get_tensor(name).float()).abs().max()) for name in names
        )


def require_loads_alike(saved: Path, given: Path) -> None:
    """Requires that transformers loads the saved model and tokenizer, and that a chat becomes the same tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = [
        AutoTokenizer.from_pretrained(path).apply_chat_template(question, tokenize=True, add_generation_prompt=True)
        for path in (saved, given)
    ]
    assert rendered[0] == rendered[1]
