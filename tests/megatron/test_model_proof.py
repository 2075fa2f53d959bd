"""The model proof on a small copy accepts models that Megatron computes like transformers. Without other checks, it
detects models that Megatron computes differently or cannot run, and each fault whose fix is removed."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_megatron import MegatronOptions, megatron
from rl_transformers.proof import model_proof
from rl_transformers.proof.model_proof import require_proof
from tests import forked_proofs
from tests.megatron.changed import UncheckedBackend
from tests.megatron.models import ARCHITECTURES, EXPERTS, LLAMA3, REAL_MODELS, SIZES, YARN, config_of, rope
from tests.megatron.proving import complaint_of, proofs, proved, spec_of

V3 = "deepseek_v3"
LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
RIGHT: dict[str, dict[str, Any]] = {
    **REAL_MODELS,
    "Moonlight-16B-A3B": config_of(
        V3,
        rms_norm_eps=1e-5,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_routed_experts=64,
        routed_scaling_factor=2.446,
        rope_theta=50000.0,
    ),
    "Mistral-7B-v0.3": {**config_of("mistral", rope_theta=1e6), "sliding_window": None},
    "DeepSeek-V2-Lite": config_of(
        "deepseek_v2",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_routed_experts=64,
        rope_scaling={**LATENT_YARN, "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "DeepSeek-V2": config_of(
        "deepseek_v2",
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        num_experts_per_tok=6,
        n_routed_experts=160,
        routed_scaling_factor=16.0,
    ),
    "yarn, qwen2": config_of("qwen2", **rope(**YARN)),
    "yarn, qwen3": config_of("qwen3", rope_scaling=YARN, rope_theta=1e6),
    "yarn, qwen3_moe": config_of("qwen3_moe", **rope(**YARN, beta_fast=8, beta_slow=2)),
    "yarn, llama": config_of("llama", **rope(**YARN, attention_factor=1.5, truncate=False)),
    "yarn, default original length": config_of("qwen2", rope_scaling={"type": "yarn", "factor": 4.0}),
    "yarn, latent, attention_factor": config_of(V3, **rope(**YARN, attention_factor=1.5)),
    "yarn, latent, truncate": config_of(V3, **rope(**YARN, truncate=False)),
    "yarn, latent, mscale alone": config_of(V3, **rope(**YARN, mscale=0.7)),
    "yarn, latent, mscale_all_dim alone": config_of(V3, **rope(**YARN, mscale_all_dim=0.7)),
    "llama3, qwen2": config_of("qwen2", **rope(5e5, **LLAMA3)),
    "llama3, qwen3": config_of("qwen3", **rope(5e5, **LLAMA3)),
    "llama3, qwen3_moe": config_of("qwen3_moe", **rope(5e5, **LLAMA3)),
    "llama3, latent": config_of(V3, **rope(5e5, **LLAMA3)),
    "llama3, low_freq_factor": config_of("llama", **rope(5e5, **{**LLAMA3, "low_freq_factor": 2.0})),
    "llama3, original length": config_of("llama", **rope(5e5, **{**LLAMA3, "original_max_position_embeddings": 4096})),
    "linear": config_of("llama", rope_scaling={"type": "linear", "factor": 2.0}),
    "two names of the type": config_of("qwen3", **rope(rope_type="default", type="yarn")),
    "groups, the best of two": config_of(V3, n_group=4, topk_group=2),
    "groups, the best of four": config_of(V3, num_experts_per_tok=4),
    "eps of latents": config_of(V3, rms_norm_eps=1e-5),
    "weights of experts": config_of("qwen3_moe", norm_topk_prob=False),
    "a window that no layer has": config_of("qwen2", use_sliding_window=True),
    "a part of a head that transformers does not read": config_of("llama", **rope(partial_rotary_factor=0.5)),
    "nine heads of three groups, odd sizes": config_of(
        "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=9 * 14, vocab_size=49, head_dim=None
    ),
}
WRONG: dict[str, dict[str, Any]] = {
    "dynamic": config_of("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
    "longrope": config_of("qwen3", **rope(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)),
    "partial rotary": config_of("qwen3", partial_rotary_factor=0.5),
    "partial rotary, llama3": config_of("llama", **rope(5e5, **LLAMA3, partial_rotary_factor=0.5)),
    "not interleaved": config_of(V3, rope_interleave=False),
    "unnormalised weights": config_of(V3, norm_topk_prob=False),
    "one expert": config_of(V3, num_experts_per_tok=1),
    "groups of one": config_of(V3, n_group=8),
    "no groups": config_of(V3, n_group=None),
    "no shared experts": config_of(V3, n_shared_experts=0),
    "a scaling factor of 0": config_of(V3, routed_scaling_factor=0.0),
    "more dense layers than layers": config_of(V3, first_k_dense_replace=3),
    "latent key/value heads": config_of(V3, num_key_value_heads=2),
    "latent head size": config_of(V3, head_dim=16),
    "one normalised expert": config_of("qwen3_moe", num_experts_per_tok=1),
    "no experts": config_of("qwen3_moe", num_experts=0),
    "a dense layer": config_of("qwen3_moe", mlp_only_layers=[0]),
    "every second layer": config_of("qwen3_moe", decoder_sparse_step=2),
    "a factor that transformers does not read": config_of("qwen3_moe", routed_scaling_factor=2.0),
    "a score that transformers does not read": config_of("qwen3_moe", scoring_func="sigmoid"),
    "biases, qwen3": config_of("qwen3", attention_bias=True),
    "biases, llama": config_of("llama", attention_bias=True),
    "biases, dense layers": config_of("llama", mlp_bias=True),
    "norms that transformers does not have": config_of("llama", use_qk_norm=True),
    "experts that transformers does not have": config_of("qwen3", num_experts=8),
    "windows": config_of("qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=0),
    "windows of a late layer": config_of(
        "qwen3", num_hidden_layers=40, use_sliding_window=True, sliding_window=4096, max_window_layers=39
    ),
    "windows of some layers": config_of(
        "qwen3", layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=4096
    ),
    "later tokens": config_of("llama", is_causal=False),
    "layers of their own": config_of("llama", per_layer_config={"1": {"rms_norm_eps": 0.1}}),
    "another class": config_of("qwen3", architectures=["Qwen2ForCausalLM"]),
    "no class": config_of("qwen3", architectures=None),
    "code of its own": config_of("qwen3", auto_map={"AutoModelForCausalLM": "own.MyQwen"}),
    **{
        kind: {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **SIZES}
        for kind in (
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm4_moe",
            "granite",
            "ministral3",
            "mistral",
            "mixtral",
            "nemotron",
            "olmo2",
            "olmoe",
            "qwen2_moe",
        )
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": [ARCHITECTURES["gemma3"]],
        "text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 8},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": [ARCHITECTURES["gpt_oss"]],
        **SIZES,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "architectures": [ARCHITECTURES["qwen3_next"]],
        **SIZES,
        **EXPERTS,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "shared_expert_intermediate_size": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
RUNNING = {
    "dynamic",
    "longrope",
    "partial rotary",
    "not interleaved",
    "unnormalised weights",
    "one expert",
    "a scaling factor of 0",
    "a factor that transformers does not read",
    "a score that transformers does not read",
    "biases, qwen3",
    "windows",
    "windows of a late layer",
    "windows of some layers",
    "later tokens",
    "gemma",
    "gemma2",
    "mistral",
}
"""The models of WRONG that run. The others raise an error while they are built or run."""
MODELS_THAT_NEED_FIX = {
    "leave_out_rotary": (
        "yarn, qwen2",
        "yarn, qwen3",
        "yarn, qwen3_moe",
        "yarn, llama",
        "llama3, qwen2",
        "llama3, qwen3",
    ),
    "leave_out_frequencies": (
        "yarn, qwen3",
        "yarn, latent, truncate",
        "llama3, qwen3_moe",
        "llama3, low_freq_factor",
        "llama3, original length",
        "linear",
        "Llama-3.1-8B",
    ),
    "leave_out_group_scores": ("groups, the best of two", "groups, the best of four", "DeepSeek-V2"),
    "leave_out_latent_norm": ("eps of latents", "Moonlight-16B-A3B"),
    "leave_out_model_fields": ("weights of experts", "eps of latents", "DeepSeek-V2-Lite"),
    "leave_out_padding_token": ("a padding token",),
}
RIGHT["a padding token"] = config_of("qwen3", pad_token_id=3)


@pytest.fixture(scope="module")
def prove():
    """A function that returns the proof's complaint about a `config.json`, or None."""
    with proofs() as pool:

        def complaint(backend: Any, config: dict[str, Any], **changes: Any) -> str | None:
            return complaint_of(pool.apply(proved, (backend, config), changes))

        yield complaint


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_models_computed_as_in_transformers_pass(prove, name):
    assert prove(megatron, RIGHT[name]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_the_proof_alone_finds_models_that_are_computed_differently(prove, name):
    complaint = prove(UncheckedBackend(), WRONG[name])
    assert complaint is not None
    assert ("log-probs of a small copy of it differ by" in complaint) == (name in RUNNING), complaint


@pytest.mark.slow
def test_an_activation_that_is_refused_because_of_gpus_passes_on_a_cpu(prove):
    assert prove(UncheckedBackend(), config_of("llama", hidden_act="gelu")) is None
    refusal = prove(megatron, config_of("llama", hidden_act="gelu"))
    assert "GPU kernels approximate or lack other activations" in (refusal or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"), [(change, name) for change, names in MODELS_THAT_NEED_FIX.items() for name in names]
)
def test_the_proof_finds_each_fault_whose_fix_is_removed(prove, change, name):
    assert prove(UncheckedBackend(change=change), RIGHT[name]) is not None


@pytest.mark.slow
def test_an_option_that_changes_the_numbers_is_part_of_the_proof(prove):
    config = config_of("qwen3_moe", norm_topk_prob=True)
    passed = MegatronOptions(transformer_config_kwargs={"moe_router_pre_softmax": True})
    assert prove(UncheckedBackend(), config, options=passed) is not None
    mesh = MegatronOptions(tensor_model_parallel_size=2, transformer_config_kwargs={"sequence_parallel": True})
    assert prove(UncheckedBackend(), config, options=mesh) is None
    added = MegatronOptions(transformer_config_kwargs={"moe_z_loss_coeff": 0.1})
    assert prove(UncheckedBackend(), config, options=added) is None


# --- records of proofs ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The directory in which proofs are recorded."""
    monkeypatch.setenv(model_proof.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(model_proof, "_proved_here", set())
    return tmp_path / "cache" / "model_proofs"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
    return spec_of(str(tmp_path))


@pytest.mark.slow
def test_a_second_start_skips_the_proof_unless_its_record_is_torn(kept, model, monkeypatch):
    monkeypatch.setattr(model_proof, "run_interpreter", forked_proofs.run_interpreter)  # the function that a run uses
    compared = []
    compare = model_proof._compare_in_process

    def counted(*args):
        compared.append(args)
        return compare(*args) if len(compared) == 1 else model_proof_differences()

    monkeypatch.setattr(model_proof, "_compare_in_process", counted)

    def start():
        model_proof._proved_here.clear()  # as in another process
        assert require_proof(megatron, model) is None
        return len(compared)

    assert start() == 1
    assert start() == 1
    (note,) = kept.iterdir()
    whole = note.read_text()
    for torn in ("", whole[:-3], whole.replace(note.stem[:8], "0" * 8), "[]"):
        note.write_text(torn)
        monkeypatch.setattr(model_proof, "_compare_in_process", lambda *_: pytest.fail("the proof ran"))
        with pytest.raises(pytest.fail.Exception):
            start()
    monkeypatch.setattr(model_proof, "_compare_in_process", counted)
    assert start() == 2
    assert note.read_text() == whole


@pytest.mark.soak
@pytest.mark.parametrize("name", ["Qwen3-8B", "DeepSeek-V3, without quantisation"])
def test_a_first_start_takes_under_15_seconds_of_cpu_time_and_a_second_start_takes_none(
    kept, tmp_path, monkeypatch, name
):
    """Measures CPU time, because other processes may use the machine too."""
    monkeypatch.setattr(model_proof, "run_interpreter", forked_proofs.run_interpreter)  # the function that a run uses
    (tmp_path / "config.json").write_text(json.dumps(RIGHT[name]))

    def processor_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def seconds_of_a_start() -> float:
        model_proof._proved_here.clear()  # as in another process
        before = processor_seconds()
        assert require_proof(megatron, spec_of(str(tmp_path))) is None
        return processor_seconds() - before

    first, second = seconds_of_a_start(), seconds_of_a_start()
    print(f"\n{name}: {first:.1f} s of CPU time, then {second:.1f} s")
    assert 1 < first < 15
    assert second == 0


def test_a_recorded_proof_is_used_only_for_the_same_inputs(kept, model, tmp_path, monkeypatch):
    compared = []

    def right(*_):
        compared.append(1)
        return model_proof_differences()

    monkeypatch.setattr(model_proof, "_compare_in_process", right)
    steps = [
        lambda: None,
        lambda: (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", rms_norm_eps=1e-5))),
        lambda: monkeypatch.setattr(model_proof, "version_of", lambda name: "another"),
        lambda: monkeypatch.setattr("rl_megatron.backend.version_of", lambda name: "another"),
        lambda: monkeypatch.setattr("rl_megatron.backend.code_digest", lambda package: "another"),
    ]
    for number, step in enumerate(steps, start=1):
        step()
        for _ in range(2):
            assert require_proof(megatron, model) is None
            assert len(compared) == number
    passed = MegatronOptions(transformer_config_kwargs={"moe_router_pre_softmax": True})
    require_proof(megatron, spec_of(str(tmp_path), options=passed))
    assert len(compared) == len(steps) + 1


def model_proof_differences():
    from rl_transformers.proof.proof_process import Differences

    return Differences(logprob=0.0, mean_logprob=0.0, gradient=0.0, parameter="")


def test_without_a_writable_cache_a_process_proves_once(model, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(model_proof.CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(model_proof, "_proved_here", set())
    monkeypatch.setattr(model_proof, "_compare_in_process", lambda *_: model_proof_differences())
    assert require_proof(megatron, model) is None
    assert "RL_CACHE_DIR" in caplog.text
    monkeypatch.setattr(model_proof, "_compare_in_process", lambda *_: pytest.fail("the proof ran again"))
    assert require_proof(megatron, model) is None


def test_a_proof_that_this_machine_cannot_run_is_postponed_to_the_start(kept, model, monkeypatch):
    monkeypatch.setattr("rl_megatron.backend.find_spec", lambda name: name)
    monkeypatch.setattr("rl_megatron.backend._has_accelerator", lambda: False)
    assert "has no GPU" in (require_proof(megatron, model) or "")
    assert "is not on this machine yet" in (require_proof(megatron, spec_of("some/model-that-nobody-fetched")) or "")


def test_a_dying_proof_process_is_a_config_error(kept, model, monkeypatch):
    monkeypatch.setattr(model_proof, "run_interpreter", forked_proofs.run_interpreter)  # the function that a run uses
    monkeypatch.setattr(model_proof.sys, "executable", "/bin/false")
    with pytest.raises(
        ConfigError, match=r"trainer\.policy\.model\.path: .* ended with exit code 1.*trainer\.strategy=fsdp"
    ):
        require_proof(megatron, model)
    assert not kept.exists()
