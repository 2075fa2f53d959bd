"""A critic and adapters on tensor, pipeline and context ranks compute the same as transformers with the saved files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.interfaces import LoraConfig, LossSpec, ModelConfig, Worker
from rl_megatron import LoraOptions, MegatronOptions, megatron
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE, expected_scores
from rl_transformers.testing.cases import LOSS, Case, Variant, open_case
from rl_transformers.testing.ranks import RankGroup
from rl_transformers.testing.reference_worker import ReferenceWorker
from tests.trained_kinds import batch_of

PRELOADED["rl_megatron.rank.worker"] = None
VALUES = LossSpec(name="value_clip", params={"value_clip": 1.0})
LORA = LoraConfig(rank=4, alpha=8)
MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    variant = Variant(checkpoint={"tie_word_embeddings": request.param})
    with open_case(megatron, MegatronOptions(), variant, tmp_path_factory.mktemp("case"), timeout_s=120) as case:
        yield case


def start(case: Case, mesh: str, *, lora_type: Any = "lora", **fields: Any) -> RankGroup:
    # moe_grouped_gemm=False gives each expert its own adapters, with Transformer Engine too.
    options = MegatronOptions(lora_config=LoraOptions(lora_type=lora_type), moe_grouped_gemm=False, **MESHES[mesh])
    spec = attrs.evolve(case.spec, options=options, **fields)
    group = RankGroup(megatron, spec, 2 if MESHES[mesh] else 1, directory=case.directory, timeout_s=120)
    case.started.append(group)
    return group


def train(group: RankGroup, batch: Batch, loss: LossSpec, count: int) -> list[float]:
    norms = []
    for _ in range(count):
        group.forward_backward(batch, LIMITS, loss, temperature=TEMPERATURE)
        norms.append(group.call(Worker.optim_step)[0].grad_norm)
    return norms


def values_of(directory: Path, batch: Batch) -> Tensor:
    """Values that transformers and the saved head compute."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, ignore_mismatched_sizes=True).eval()
    head = load_file(directory / "value_head.safetensors")
    values_T, bounds = torch.zeros(batch.num_tokens), batch.offsets.tolist()
    with torch.no_grad():
        for start_, end in pairwise(bounds):
            hidden_TH = model.model(batch["tokens"][None, start_:end]).last_hidden_state[0]
            values_T[start_ + 1 : end] = (hidden_TH @ head["value_head.weight"][0] + head["value_head.bias"])[:-1]
    return values_T


def test_a_critic_learns_alike_on_every_mesh(case: Case, tmp_path: Path):
    batch, norms, found = batch_of(case), {}, {}
    for mesh in MESHES:
        group = start(case, mesh, role="critic")
        norms[mesh] = train(group, batch, VALUES, 3)
        found[mesh] = group.weights()
        directory = tmp_path / mesh
        group.call(Worker.save_model, directory)
        values_T = group.forward(batch, LIMITS, temperature=TEMPERATURE)["values"]
        torch.testing.assert_close(values_T, values_of(directory, batch), rtol=0, atol=1e-5)
        again = start(case, mesh, role="critic", model=ModelConfig(path=str(directory)))
        torch.testing.assert_close(
            again.forward(batch, LIMITS, temperature=TEMPERATURE)["values"], values_T, rtol=0, atol=1e-6
        )
        again.close()
        group.close()
    assert found["1"]["value_head.weight"].abs().max() >= 1e-3
    for mesh in MESHES:
        assert norms[mesh] == pytest.approx(norms["1"], rel=1e-5)
        assert_close(found[mesh], found["1"], mesh)


@pytest.mark.parametrize("lora_type", ["lora", "canonical_lora"])
def test_adapters_learn_alike_on_every_mesh_and_are_sent_merged_or_alone(lora_type: str, case: Case, tmp_path: Path):
    model = attrs.evolve(case.spec.model, lora=LORA)
    first = start(case, "1", lora_type=lora_type, model=model)
    base = first.weights()
    first.call(Worker.save_state, tmp_path / "state")
    expected_norms = train(first, case.batch, LOSS, 3)
    expected = first.weights()
    moved = max(float((expected[name] - base[name]).abs().max()) for name in base)
    assert moved >= 1e-3
    assert expected["model.norm.weight"].equal(base["model.norm.weight"]), "weights without an adapter must stay frozen"
    first.call(Worker.save_model, tmp_path / "1")
    scores = first.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"]
    first.close()
    merge_by_peft(case, tmp_path / "1" / "adapter", tmp_path / "merged by peft")
    for directory in ("1", "merged by peft"):
        merged = ReferenceWorker(attrs.evolve(case.spec, model=ModelConfig(path=str(tmp_path / directory))))
        torch.testing.assert_close(scores, expected_scores(merged, case.batch)["logprobs"], rtol=0, atol=1e-5)
    expected_adapter = adapter_in(tmp_path / "1")
    alone = attrs.evolve(model, lora=attrs.evolve(LORA, merge_lora=False))
    for mesh in list(MESHES)[1:]:
        is_alone = mesh == "pp2"
        group = start(case, mesh, lora_type=lora_type, model=alone if is_alone else model)
        group.call(Worker.load_state, tmp_path / "state")
        assert train(group, case.batch, LOSS, 3) == pytest.approx(expected_norms, rel=1e-5)
        group.call(Worker.save_model, tmp_path / mesh)
        sent = group.weights()
        group.close()
        assert_close(sent, expected_adapter if is_alone else expected, mesh)
        assert_close(adapter_in(tmp_path / mesh), expected_adapter, mesh)


@pytest.mark.parametrize("lora_type", ["lora", "canonical_lora"])
def test_gradients_of_adapters_are_read_before_and_after_the_first_export(lora_type: Any, case: Case):
    """While B is 0, the gradient of A is 0. The gradient of B is s · dL/dW · Aᵀ, where W is the layer's weight."""
    whole = start(case, "1")
    alone = attrs.evolve(case.spec.model, lora=attrs.evolve(LORA, merge_lora=False))
    group = start(case, "tp2", lora_type=lora_type, model=alone)
    for of_ranks in (whole, group):
        of_ranks.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
    of_weights, before = whole.gradients(), group.gradients()
    adapter, after = group.weights(), group.gradients()
    assert before.keys() == after.keys() == adapter.keys()
    for name in [name for name in adapter if name.endswith(".lora_B.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        name_of_a = name.replace("lora_B", "lora_A")
        expected = LORA.alpha / LORA.rank * of_weights[f"{layer}.weight"] @ adapter[name_of_a].T
        for gradients in (before, after):
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)
            assert not gradients[name_of_a].any()
        assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("lora_type", ["lora", "canonical_lora"])
def test_merging_adds_the_adapters_of_experts(lora_type: Any, tmp_path: Path):
    variant = Variant(checkpoint={"tie_word_embeddings": False, "family": "qwen3_moe"})
    with open_case(megatron, MegatronOptions(), variant, tmp_path, timeout_s=120) as case:
        group = start(case, "pp2", lora_type=lora_type, model=attrs.evolve(case.spec.model, lora=LORA))
        base = group.weights()
        train(group, case.batch, LOSS, 3)
        merged = group.weights()
        group.call(Worker.save_model, tmp_path / "saved")
        group.call(Worker.save_state, tmp_path / "state")
        again = start(case, "cp2", lora_type=lora_type, model=attrs.evolve(case.spec.model, lora=LORA))
        again.call(Worker.load_state, tmp_path / "state")
        assert_close(again.weights(), merged, "cp2")
    adapter, adapted = adapter_in(tmp_path / "saved"), set()
    for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        added = LORA.alpha / LORA.rank * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        weight = f"{layer}.weight"
        torch.testing.assert_close(merged[weight] - base[weight], added, rtol=0, atol=1e-6, msg=weight)
        adapted.add(weight)
    assert adapted == {name for name in base if not merged[name].equal(base[name])}
    assert sum(".experts." in name for name in adapted) > 0


def merge_by_peft(case: Case, adapter: Path, directory: Path) -> None:
    """Loads the adapters in `adapter` with peft, merges them into the base model, and saves the result."""
    base = AutoModelForCausalLM.from_pretrained(case.spec.model.path, dtype=torch.float32)
    model: Any = peft.PeftModel.from_pretrained(base, adapter)
    model.merge_and_unload().save_pretrained(directory)


def adapter_in(saved_model: Path) -> dict[str, Tensor]:
    return load_file(saved_model / "adapter" / "adapter_model.safetensors")


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], mesh: str) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-5, msg=f"{mesh}: {name}")
