"""Tests of several ranks beyond those of `test_conformance.py`: FSDP1 states in FSDP2, scores in bfloat16, errors.

All ranks are forked from a server that has imported everything, so a case takes about a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import Backend, LoraConfig, ModelConfig, Worker
from rl_fsdp import FsdpOptions, fsdp, fsdp1
from rl_transformers.testing.backend import Variant, open_case
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Case
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.ranks import RankGroup
from tests.fsdp.conftest import spec_of
from tests.kept_extras import require_kept_extras

UNTIED = {"tie_word_embeddings": False}
"""Most tests use this model. With tied embeddings, gradients are added in another order, which needs a larger tolerance
(`Tolerances.tied_weight`) that would hide errors."""


def two(**options: object) -> Variant:
    return Variant(world_size=2, checkpoint=UNTIED, options=FsdpOptions(**options))


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with open_case(fsdp, FsdpOptions(), two(), tmp_path) as case:
        yield case


def weights_after(group: RankGroup, case: Case, steps: int = 1) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        group.optim_step()
    return group.weights()


def test_a_state_of_fsdp1_is_read_by_fsdp2(case: Case):
    first = RankGroup(fsdp1, case.spec, 2, directory=case.directory, timeout_s=240)
    case.started.append(first)
    expected = weights_after(first, case)
    first.call(Worker.save_state, case.directory / "state")
    second = case.start()
    second.call(Worker.load_state, case.directory / "state")
    loaded = second.weights()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    expected, actual = (weights_after(group, case) for group in (first, second))
    assert max((actual[name] - weight).abs().max().item() for name, weight in expected.items()) <= 1e-5


def test_an_index_with_changed_content_is_a_checkpoint_error_on_all_ranks(case: Case):
    """Only one rank checks the index's checksum, but all ranks unpickle the index."""
    group = case.start()
    group.call(Worker.save_state, case.directory / "state")
    before = group.weights()
    weights_after(group, case)
    index = case.directory / "state" / ".metadata"
    content = index.read_bytes()
    index.write_bytes(b"?" * len(content))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        group.call(Worker.load_state, case.directory / "state")
    index.write_bytes(content)
    group.call(Worker.load_state, case.directory / "state")
    loaded = group.weights()
    assert all(torch.equal(loaded[name], weight) for name, weight in before.items())


def test_bfloat16_scores_are_near_those_of_one_rank(case: Case):
    """Compares log-probs: after a bfloat16 step, a correct run's parameters differ as much as a broken run's."""
    spec = attrs.evolve(case.spec, bf16=True)
    scores = []
    for backend, size in ((fsdp, 1), (fsdp, 2), (fsdp1, 2)):
        group = RankGroup(backend, spec, size, directory=case.directory, timeout_s=240)
        case.started.append(group)
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        assert not group.optim_step().skipped
        scores.append(group.forward(case.batch, LIMITS, temperature=TEMPERATURE)["logprobs"])
    for other_T in scores[1:]:
        assert (other_T - scores[0]).abs().mean() <= 0.02


def test_a_mistake_found_by_the_first_rank_is_raised_by_all(case: Case, tmp_path: Path):
    path = make_checkpoint(tmp_path / "broken")
    (path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        case.start(attrs.evolve(case.spec, model=ModelConfig(path=str(path))))


def test_heads_that_the_ranks_cannot_share_are_refused(tmp_path: Path):
    message = "3 ranks cannot share 4 attention heads evenly; choose one of 1, 2, 4"
    with (
        open_case(fsdp, FsdpOptions(sequence_parallel_size=3), Variant(world_size=3), tmp_path) as case,
        pytest.raises(ConfigError, match=message),
    ):
        case.start()


def test_convolutions_over_tokens_of_several_ranks_are_refused(case: Case, tmp_path: Path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = AutoConfig.for_model("lfm2", vocab_size=47, pad_token_id=0, **sizes, **layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lfm2")
    options, model = FsdpOptions(sequence_parallel_size=2), ModelConfig(path=str(tmp_path / "lfm2"))
    spec = attrs.evolve(case.spec, bf16=True, use_sample_packing=False, options=options, model=model)
    with pytest.raises(ConfigError, match=r"layers of the kind conv, .*\.fsdp_config\.sequence_parallel_size=1"):
        case.start(spec)


@pytest.mark.parametrize(
    ("backend", "world_size", "options", "fields", "message"),
    [
        (fsdp, 4, {"fsdp_size": 3}, {}, "fsdp_size: 3 does not divide 4 ranks; choose one of -1, 1, 2, 4$"),
        (fsdp1, 4, {"fsdp_size": 3}, {}, "fsdp_size: 3 does not divide 4 ranks; choose one of -1, 2, 4$"),
        (fsdp, 4, {"sequence_parallel_size": 3}, {}, "sequence 3"),
        (fsdp1, 2, {"cpu_offload": True}, {}, "gradients of several micro-batches"),
        (fsdp1, 2, {"fsdp_size": 1}, {}, "unsharded copies"),
        (fsdp1, 2, {}, {"model": ModelConfig(path="x", lora=LoraConfig(rank=4))}, "adapters"),
        (fsdp1, 2, {}, {"role": "critic"}, "critic"),
    ],
)
def test_unshardable_settings_are_refused_before_any_rank_starts(
    backend: Backend, world_size: int, options: dict[str, object], fields: dict[str, object], message: str
):
    spec = spec_of("x", options=FsdpOptions(**options), **fields)
    with pytest.raises(ConfigError, match=message):
        backend.validate(spec, world_size)


def test_fsdp1_may_offload_a_reference():
    fsdp1.validate(spec_of("x", role="reference", optimizer=None, options=FsdpOptions(cpu_offload=True)), 2)


@pytest.mark.parametrize("backend", [fsdp, fsdp1], ids=["fsdp", "fsdp1"])
def test_two_ranks_save_tensors_that_are_not_trained_unchanged(backend: Backend, case: Case):
    require_kept_extras(case, backend, 2)
