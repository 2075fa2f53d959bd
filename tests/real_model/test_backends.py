"""SmolLM2-135M-Instruct in every backend: real text scores as in transformers, and the export is what was loaded.

Each way of splitting is started once, for both questions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.interfaces import ModelConfig, Worker, WorkerSpec
from rl_core.testing.bfloat16 import is_scored
from rl_core.testing.ranks import PRELOADED, RankGroup
from rl_core.workers import MicroBatchLimits
from rl_fsdp import FsdpOptions, fsdp
from rl_megatron import MegatronOptions, megatron
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
LIMITS = MicroBatchLimits(max_tokens=600)
"""Two sequences at a time."""


def spec_of(model: Path, options: FsdpOptions | MegatronOptions, *, bf16: bool) -> WorkerSpec:
    """A frozen policy."""
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


@pytest.mark.parametrize("name", MESHES)
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
    difference = (logprobs_T - reference.logprobs_T).abs().max().item()
    print(f"\n{name}: at most {difference:.1e} nats from transformers")
    assert difference <= 1e-4, "30 layers of float32 sums"
    require_same_model(tmp_path / "saved", reference.model)


def require_same_model(saved: Path, given: Path) -> None:
    """Same tensors bit for bit, whatever dtype stores them, and a model and tokenizer that load."""
    with (
        safe_open(given / "model.safetensors", "pt") as expected,
        safe_open(saved / "model.safetensors", "pt") as found,
    ):
        names = list(expected.keys())
        assert set(found.keys()) == set(names)
        for name in names:
            assert found.get_tensor(name).float().equal(expected.get_tensor(name).float()), name
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = [
        AutoTokenizer.from_pretrained(path).apply_chat_template(question, tokenize=True, add_generation_prompt=True)
        for path in (saved, given)
    ]
    assert rendered[0] == rendered[1]
