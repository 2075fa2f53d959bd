"""Compares training with LoRA to plain peft and transformers, which get one sequence at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import LoraConfig, LossSpec, ModelConfig, OptimizerConfig, RankInfo
from rl_core.rank_kit.weight_buckets import unpack_bucket
from rl_core.testing.reference_transport import MemoryReceiver, MemoryTransport
from rl_fsdp import FsdpWorker, fsdp
from rl_transformers.rank.lora import adapter_weights, add_adapters, merged_weights
from rl_transformers.testing.models import make_checkpoint
from tests.fsdp.conftest import random_batch, spec_of
from tests.model_families import UNUSUAL, random_model

PLAN = ((5, 0, 3), (1, 2), (4,))
LOSS = LossSpec(name="cross_entropy")
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
LORA = LoraConfig(rank=4, alpha=8)


def adapted(path: Path, lora: LoraConfig = LORA, **fields: Any) -> FsdpWorker:
    model = ModelConfig(path=str(path), lora=lora)
    return FsdpWorker(spec_of(path, **{"model": model, "optimizer": OPTIMIZER, **fields}), RankInfo())


def batch_with_weights() -> Batch:
    batch = random_batch([23, 40, 1, 9, 33, 2])
    return batch.with_columns(loss_weights=batch["loss_mask"].float() / int(batch["loss_mask"].sum()))


def trained(worker: FsdpWorker, batch: Batch, steps: int = 3) -> FsdpWorker:
    for _ in range(steps):
        worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
        worker.optim_step()
    return worker


def logprobs(worker: FsdpWorker, batch: Batch) -> Tensor:
    return worker.forward(batch, PLAN, temperature=1.0)["logprobs"]


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    parts = []
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        tokens_T = batch["tokens"][start:end]
        all_TV = model(input_ids=tokens_T[None]).logits[0, :-1].log_softmax(-1)
        parts += [torch.zeros(1), all_TV[range(len(tokens_T) - 1), tokens_T[1:]]]
    return torch.cat(parts)


def load_plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), tie_word_embeddings=request.param)


@pytest.mark.parametrize("packing", [True, False])
def test_logprobs_gradients_and_three_steps_are_those_of_plain_peft(checkpoint: Path, packing: bool):
    worker, batch = adapted(checkpoint, use_sample_packing=packing), batch_with_weights()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(load_plain(checkpoint), config)
    prefix = "base_model.model."
    parameters = {n.removeprefix(prefix): p for n, p in plain.named_parameters() if p.requires_grad}
    weights = dict(worker.scorer.named_weights())
    assert set(weights) == set(parameters)
    assert len(weights) == 2 * 2 * 7  # A and B of seven linear layers in each of two decoder layers
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, betas=OPTIMIZER.adam_betas, weight_decay=0.1)
    for _ in range(3):
        loss_T = -plain_logprobs(plain, batch)
        (batch["loss_weights"] * loss_T).sum().backward()
        worker.forward_backward(batch, PLAN, LOSS, temperature=1.0)
        torch.testing.assert_close(logprobs(worker, batch), -loss_T.detach(), rtol=0, atol=1e-5)
        gradients = worker.gradients()
        found, expected = (
            torch.cat([tensors[name].flatten() for name in sorted(start)])
            for tensors in (gradients, {name: p.grad for name, p in parameters.items()})
        )
        assert (found - expected).norm() <= 5e-6 * expected.norm()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        worker.optim_step()
    assert max((weights[name] - start[name]).abs().max() for name in start) >= 1e-3
    for name, parameter in parameters.items():
        torch.testing.assert_close(weights[name], parameter, rtol=0, atol=1e-5, msg=name)


def test_new_adapters_change_nothing_and_the_base_stays_frozen(checkpoint: Path):
    worker, batch = adapted(checkpoint), batch_with_weights()
    base = FsdpWorker(spec_of(checkpoint, role="reference", optimizer=None), RankInfo())
    assert logprobs(worker, batch).equal(logprobs(base, batch))
    trained(worker, batch)
    assert not logprobs(worker, batch).equal(logprobs(base, batch))
    frozen = {n.replace(".base_layer", ""): p for n, p in worker.scorer.model.named_parameters() if ".lora_" not in n}
    for name, weight in base.scorer.named_weights():
        assert frozen[name].equal(weight), name


def test_exported_weights_are_the_merged_ones_under_the_names_of_the_base(checkpoint: Path):
    worker, batch = trained(adapted(checkpoint), batch_with_weights()), batch_with_weights()
    sent = {name: t.clone() for bucket in worker.export_weights(4096) for name, t in unpack_bucket(bucket)}
    plain = load_plain(checkpoint)
    assert set(sent) == {name for name, _ in plain.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(sent[name])
        # Merged weights need one matrix product, the adapter two; the measured difference is 1e-6.
        torch.testing.assert_close(plain_logprobs(plain, batch), logprobs(worker, batch), rtol=0, atol=1e-5)
    layer = worker.scorer.model.get_submodule("model.layers.0.self_attn.q_proj")
    expected = layer.base_layer.weight + 2.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    torch.testing.assert_close(sent["model.layers.0.self_attn.q_proj.weight"], expected, rtol=0, atol=1e-7)


def test_adapters_that_are_sent_alone_are_those_of_pefts_file(checkpoint: Path, tmp_path: Path):
    alone = attrs.evolve(LORA, merge_lora=False)
    worker = trained(adapted(checkpoint, alone), batch_with_weights())
    worker.save_model(tmp_path)
    kept = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    sent = sent_by(worker)
    assert set(sent) == set(kept)
    assert all(tensor.equal(kept[name]) for name, tensor in sent.items())
    written = peft.LoraConfig.from_pretrained(tmp_path / "adapter").to_dict()
    config = alone.peft_config()
    assert [written[name] for name in ("r", "lora_alpha")] == [config["r"], config["lora_alpha"]] == [4, 8]
    assert not any(".lora_" in name for name in sent_by(adapted(checkpoint)))
    in_bfloat16 = adapted(checkpoint, alone, bf16=True)
    assert {tensor.dtype for tensor in sent_by(in_bfloat16).values()} == {torch.bfloat16}


def sent_by(worker: FsdpWorker) -> dict[str, Tensor]:
    """The tensors that a weight sync sends."""
    transport = MemoryTransport()
    rendezvous = transport.open(num_ranks=1, num_engines=1)
    worker.publish(transport.sender(rendezvous, 0, 1), 1, 4096)
    buckets = list(MemoryReceiver(rendezvous).receive(1))
    transport.close(rendezvous)
    return {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}


def test_a_saved_model_runs_without_peft_and_its_adapters_load_with_peft(checkpoint: Path, tmp_path: Path):
    worker, batch = trained(adapted(checkpoint), batch_with_weights()), batch_with_weights()
    worker.save_model(tmp_path)
    with torch.no_grad():
        merged = plain_logprobs(load_plain(tmp_path), batch)
        with_adapters = plain_logprobs(
            peft.PeftModel.from_pretrained(load_plain(checkpoint), tmp_path / "adapter"), batch
        )
    for found in (merged, with_adapters):
        torch.testing.assert_close(found, logprobs(worker, batch), rtol=0, atol=1e-5)
    assert peft.LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == str(checkpoint)


def test_a_state_holds_the_adapters_only_and_continues_exactly(checkpoint: Path, tmp_path: Path):
    batch, worker = batch_with_weights(), trained(adapted(checkpoint), batch_with_weights())
    worker.save_state(tmp_path / "adapters")
    saved = FileSystemReader(tmp_path / "adapters").read_metadata().state_dict_metadata
    assert saved
    assert [name for name in saved if ".lora_" not in name] == []
    resumed = adapted(checkpoint, seed=7)
    assert not logprobs(resumed, batch).equal(logprobs(worker, batch))
    resumed.load_state(tmp_path / "adapters")
    expected, found = (logprobs(trained(actor, batch, steps=1), batch) for actor in (worker, resumed))
    assert found.equal(expected)
    with pytest.raises(CheckpointError):
        adapted(checkpoint, LoraConfig(rank=2)).load_state(tmp_path / "adapters")


def test_only_named_layers_that_are_not_excluded_are_adapted(checkpoint: Path):
    worker = adapted(
        checkpoint, LoraConfig(rank=2, target_modules=("q_proj", "v_proj"), exclude_modules="model.layers.1.*")
    )
    names = {name.split(".lora_")[0] for name, _ in worker.scorer.named_weights()}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"}


def test_first_values_follow_from_the_seed_and_the_method(checkpoint: Path):
    def first(**changes: Any) -> Tensor:
        seed = changes.pop("seed", 0)
        return next(iter(adapted(checkpoint, LoraConfig(rank=4, **changes), seed=seed).scorer.named_weights()))[1]

    assert first().equal(first())
    assert not first().equal(first(seed=1))
    assert not first().equal(first(init_method="gaussian"))


def test_bfloat16_keeps_the_adapters_in_float32_and_the_frozen_base_in_bfloat16(checkpoint: Path):
    worker, batch = adapted(checkpoint, bf16=True), batch_with_weights()
    assert {weight.dtype for _, weight in worker.scorer.named_weights()} == {torch.float32}
    assert {p.dtype for p in worker.scorer.parameters() if not p.requires_grad} == {torch.bfloat16}
    difference = logprobs(trained(worker, batch), batch) - logprobs(trained(adapted(checkpoint), batch), batch)
    assert 1e-5 < difference.abs().max() < 0.2


def test_recomputed_layers_give_the_same_gradient(checkpoint: Path):
    stored, recomputed = adapted(checkpoint), adapted(checkpoint, gradient_checkpointing=True)
    for worker in (stored, recomputed):
        trained(worker, batch_with_weights(), steps=1).forward_backward(
            batch_with_weights(), PLAN, LOSS, temperature=1.0
        )
    expected = stored.gradients()
    assert all(gradient.any() and gradient.equal(expected[name]) for name, gradient in recomputed.gradients().items())


def test_a_critic_trains_adapters_and_its_head(checkpoint: Path, tmp_path: Path):
    worker = adapted(checkpoint, role="critic")
    assert {name for name, _ in worker.scorer.named_weights() if ".lora_" not in name} == {
        "value_head.weight",
        "value_head.bias",
    }
    batch = batch_with_weights()
    batch = batch.with_columns(values=torch.zeros(batch.num_tokens), returns=torch.ones(batch.num_tokens))
    for _ in range(2):
        worker.forward_backward(batch, PLAN, LossSpec(name="value_clip"), temperature=1.0)
        worker.optim_step()
    worker.save_model(tmp_path)
    again = FsdpWorker(spec_of(tmp_path, role="critic"), RankInfo())
    values = [actor.forward(batch, PLAN, temperature=1.0)["values"] for actor in (worker, again)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-5)
    assert "value_head.weight" in load_file(tmp_path / "value_head.safetensors")


def test_convolution_style_linear_layers_are_merged_too(tmp_path: Path):
    """GPT-2 stores its linear weights transposed."""
    path = make_checkpoint(tmp_path / "base", family="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256)  # pyright: ignore[reportArgumentType]
    worker, batch = trained(adapted(path), batch_with_weights()), batch_with_weights()
    worker.save_model(tmp_path / "merged")
    with torch.no_grad():
        merged = plain_logprobs(load_plain(tmp_path / "merged"), batch)
    torch.testing.assert_close(merged, logprobs(worker, batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=2, dropout=0.1), r"lora\.dropout: got 0\.1; .* set it to 0"),
        (
            LoraConfig(rank=2, init_method="pissa"),
            r"lora\.init_method: got 'pissa'; expected kaiming or gaussian",
        ),
        (LoraConfig(rank=2, alpha=0), r"lora\.alpha: expected above 0"),
    ],
)
def test_unsupported_settings_are_refused(lora: LoraConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        fsdp.validate(spec_of("x", model=ModelConfig(path="x", lora=lora)), 1)


def test_experts_in_stacked_tensors_are_refused_by_name(tmp_path: Path):
    path = make_checkpoint(tmp_path, family="qwen3_moe")
    with pytest.raises(ConfigError, match=r"experts is a Qwen3MoeExperts; only linear layers .* those of attention"):
        adapted(path, LoraConfig(rank=2))
    adapted(path, LoraConfig(rank=2, target_modules=("q_proj", "o_proj")))


MIXED = {"family": "qwen3_moe", "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    "targets",
    [
        ("gate_proj", "up_proj", "down_proj"),
        ("o_proj", "layers.0.mlp.down_proj"),
        "all-linear",
        r".*layers\.0\.mlp\.(gate|up|down)_proj",
        ("gate",),
    ],
)
def test_names_that_peft_takes_for_stacked_experts_are_refused(targets: Any, tmp_path: Path):
    """peft 0.21 would adapt the experts instead of the first layer, with twice the rank for gate and up."""
    path = make_checkpoint(tmp_path, **MIXED)
    with pytest.raises(
        ConfigError, match=r"target_modules: (.* such as those of attention|no linear layer .* called gate;)"
    ):
        adapted(path, LoraConfig(rank=2, target_modules=targets))


def test_another_rank_scale_or_set_of_layers_than_asked_is_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    lora, inject = LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "o_proj")), peft.inject_adapter_in_model
    for field, value in {
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"o_proj": 8},
        "layers_to_transform": [1],
        "target_modules": {"q_proj", "o_proj", "v_proj"},
    }.items():

        def altered(config: Any, *args: Any, field: str = field, value: Any = value, **kwargs: Any):
            setattr(config, field, value)
            return inject(config, *args, **kwargs)

        monkeypatch.setattr(peft, "inject_adapter_in_model", altered)
        with pytest.raises(ConfigError, match="peft adapts other layers, or with another rank or scale: "):
            adapted(checkpoint, lora)


def test_the_log_says_which_layers_and_how_many_parameters_are_trained(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO"):
        worker = adapted(checkpoint, LoraConfig(rank=2, target_modules=("q_proj", "o_proj")))
    trained = sum(p.numel() for p in worker.scorer.parameters() if p.requires_grad)
    assert trained == 2 * 2 * (2 * (32 + 32))
    expected = f"{trained} parameters are trained, in adapters of rank 2 of 4 linear layers: 2 x model.layers.*.self_"
    assert expected in caplog.text


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("w_proj",), r"target_modules: no linear layer of Qwen3ForCausalLM is called w_proj; its linear layers are "),
        (("q_proj", "qkv_proj"), r"no linear layer of Qwen3ForCausalLM is called qkv_proj; .* up_proj, v_proj$"),
        ("w_.*", r"target_modules: 'w_\.\*': .*"),
        ("*_proj", r"target_modules: '\*_proj': nothing to repeat"),
        (("q_proj", "lm_head"), "output layer cannot have adapters"),
        (("q_proj", "embed_tokens"), "no linear layer of Qwen3ForCausalLM is called embed_tokens"),
        (".*(q_proj|embed_tokens)", "embed_tokens is a Embedding; only linear layers"),
        (("self_attn",), "no linear layer of Qwen3ForCausalLM is called self_attn"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused_by_name(checkpoint: Path, targets: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        adapted(checkpoint, LoraConfig(rank=2, target_modules=targets))


@pytest.mark.parametrize("excluded", [(".*mlp",), ("mlp",), ".*mlp", "mlp"])
def test_an_excluded_name_that_fits_no_layer_is_refused(checkpoint: Path, excluded: Any):
    """peft leaves out no layer of an excluded block."""
    with pytest.raises(ConfigError, match=r"exclude_modules: no linear layer of Qwen3ForCausalLM is called .*; its"):
        adapted(checkpoint, LoraConfig(rank=2, exclude_modules=excluded))


SPELLINGS: list[Any] = [
    "all-linear",
    "ALL-LINEAR",
    ("all-linear",),
    ("q_proj", "v_proj"),
    ("self_attn.o_proj",),
    ("0.self_attn.o_proj",),
    ".*[qv]_proj",
    "q_proj",
    ".*layers.1.*proj",
    ".*",
    ("mlp",),
    ("qkv_proj",),
    ("gate_up_proj", "down_proj"),
    ("c_attn",),
    ("c_proj",),
    ("query_key_value",),
    ("gate",),
    ("lm_head",),
    ("embed_tokens", "o_proj"),
    ("proj",),
    ("",),
    (),
]


@pytest.mark.parametrize(
    ("family", "config"), [(f, c) for f, c in UNUSUAL if f in ("gpt2", "gpt_neox", "phi3", "granite", "glm4_moe")]
)
def test_each_spelling_of_layers_is_adapted_and_merged_as_by_peft_or_refused(
    family: str, config: dict[str, Any], tmp_path: Path
):
    base = load_plain(random_model(tmp_path, family, **config))
    tokens, num_exact = torch.arange(1, 9)[None], 0
    for targets in SPELLINGS:
        ours = copy.deepcopy(base)
        try:
            add_adapters(ours, LoraConfig(rank=3, alpha=8, target_modules=targets), path="", seed=0, where="here")
        except ConfigError:
            continue
        names = targets if isinstance(targets, str) else [*targets]
        given = peft.LoraConfig(r=3, lora_alpha=8, target_modules=names, fan_in_fan_out=family == "gpt2")
        theirs = peft.get_peft_model(copy.deepcopy(base), given)
        trained = {name for name, weight in theirs.named_parameters() if weight.requires_grad}
        assert trained == {f"base_model.model.{name}" for name, _ in adapter_weights(ours)}, targets
        with torch.no_grad():
            for name, weight in adapter_weights(ours):
                theirs.get_parameter(f"base_model.model.{name}").copy_(weight.normal_(std=0.2))
            scores = [model(input_ids=tokens, use_cache=False).logits for model in (ours, theirs)]
        assert torch.equal(*scores), targets
        assert not torch.allclose(scores[0], base(input_ids=tokens, use_cache=False).logits, atol=1e-2), targets
        merged = dict(theirs.merge_and_unload().named_parameters())
        found = dict(merged_weights(ours))
        assert found.keys() == merged.keys()
        for name, weight in merged.items():
            torch.testing.assert_close(found[name], weight.detach(), rtol=0, atol=1e-6)
        num_exact += 1
    assert num_exact >= 3
