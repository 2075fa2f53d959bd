"""Settings that cannot run or would compute wrong numbers are refused: the error names the key, and for parallel sizes
the nearest mesh that works."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time

import attrs
import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from rl_core.config import ConfigWarning, from_mapping
from rl_core.config.keys import UNSUPPORTED
from rl_core.errors import ConfigError
from rl_core.interfaces import LoraConfig, ModelConfig, OptimizerConfig, WorkerSpec
from rl_core.layout import Mesh
from rl_core.trainer.before.preflight import require_token_budget
from rl_megatron import megatron
from rl_megatron.checks.lora_targets import bridge_layers
from rl_megatron.checks.model_setup import setup_of
from rl_megatron.checks.refusals import refuse, refuse_setup
from rl_megatron.options import DdpOptions, MegatronOptions
from rl_megatron.rank.optimizer import ddp_config

DDP = "trainer.policy.megatron_config.ddp_config"
DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
LATENT = {
    **DENSE,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.fixture
def spec_of(tmp_path):
    def make(model, options, **kwargs):
        if model is not None:
            (tmp_path / "config.json").write_text(json.dumps(model))
        return WorkerSpec(
            role="policy",
            model=ModelConfig(path=str(tmp_path)),
            optimizer=OptimizerConfig(),
            options=MegatronOptions(transformer_config_kwargs=kwargs, **options),
            bf16=False,
            gradient_checkpointing=False,
            use_sample_packing=True,
            logprobs_chunk_size=64,
            total_optimizer_steps=None,
            seed=0,
        )

    return make


def refusal(spec, world_size):
    with pytest.raises(ConfigError) as caught:
        refuse(spec, world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "world_size", "options"),
    [
        (DENSE, 1, {}),
        (DENSE, 2, {TP: 2}),
        (DENSE, 4, {PP: 4}),
        (DENSE, 4, {PP: 4, VPP: 2}),
        (DENSE, 2, {PP: 2, VPP: 2}),
        (DENSE, 2, {PP: 2, FIRST: 3}),
        (DENSE, 4, {PP: 4, FIRST: 1, LAST: 3}),
        (DENSE, 2, {CP: 2}),
        (MOE, 4, {EP: 4}),
        (MOE, 4, {TP: 2, EP: 2, ETP: 2}),
        (MOE, 2, {TP: 2, EP: 2, ETP: 1}),
        (MOE, 8, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 1}),
        (MOE, 16, {TP: 2, PP: 2, CP: 2, EP: 2, ETP: 2}),
        (LATENT, 8, {TP: 2, PP: 2, CP: 2, EP: 2}),
    ],
)
def test_valid_meshes_are_accepted(spec_of, model, world_size, options):
    refuse(spec_of(model, options), world_size)


@pytest.mark.parametrize(
    ("model", "world_size", "options", "complaint", "nearest"),
    [
        (DENSE, 6, {TP: 3}, f"{TP}: 3 does not divide the model's 8 attention heads", f"{TP}=2 (data parallel 3)"),
        (DENSE, 8, {TP: 8}, "4 key/value heads", f"{TP}=4 (data parallel 2)"),
        (DENSE, 16, {TP: 2, PP: 3, CP: 2}, "does not divide the 16 ranks", f"{TP}=2, {PP}=4, {CP}=2 (data parallel 1)"),
        (DENSE, 3, {PP: 3}, "8 layers", f"{PP}=1 (data parallel 3)"),
        (DENSE, 2, {PP: 2, FIRST: 3, LAST: 3}, "8 layers", "without layer counts"),
        (DENSE, 2, {EP: 2}, "the model has no experts", f"{EP}=1 (data parallel 2)"),
        (MOE, 12, {EP: 3}, "3 does not divide the model's 8 experts", f"{EP}=4 (data parallel 12)"),
        (MOE, 2, {TP: 2, ETP: 1}, "sums the experts' gradients over the wrong ranks", f"{TP}=1"),
        (MOE, 32, {TP: 2, EP: 2, ETP: 16}, "16 does not divide the model's 24 units of each expert", f"{ETP}=8"),
        (DENSE, 2, {PP: 2, VPP: 3}, "8 layers", f"{PP}=2, {VPP}=1"),
        (DENSE, 2, {VPP: 2}, "need more than one pipeline stage", f"{VPP}=1"),
        (DENSE, 2, {PP: 2, VPP: 2, FIRST: 4, LAST: 4}, "splits the layers wrongly with two stages", f"{PP}=2"),
    ],
)
def test_impossible_meshes_are_refused_and_a_valid_mesh_is_suggested(
    spec_of, model, world_size, options, complaint, nearest
):
    message = refusal(spec_of(model, options), world_size)
    assert complaint in message
    assert message.startswith("trainer.policy.megatron_config")
    assert nearest in message


def test_the_suggested_mesh_is_accepted(spec_of):
    all_options = ({TP: 3}, {TP: 8, PP: 2}, {PP: 3, CP: 2}, {EP: 3, TP: 2}, {EP: 2, ETP: 3}, {PP: 5, VPP: 2})
    tried = 0
    for world_size, options in itertools.product((2, 3, 4, 6, 8, 12), all_options):
        setup = setup_of(spec_of(MOE, options), world_size)
        try:
            refuse_setup(setup)
            continue
        except ConfigError as error:
            named = re.findall(r"(\w+_size)=(\d+)[,) ]", str(error).partition("Nearest")[2])
        sizes = {name: int(size) for name, size in named}
        assert sizes.keys() == options.keys()
        refuse_setup(attrs.evolve(setup, fields={**setup.fields, **sizes}))
        tried += 1
    assert tried > 20


def test_a_mesh_of_hundreds_of_ranks_is_suggested_without_trying_every_combination_of_divisors(spec_of):
    sizes = dict.fromkeys((TP, PP, CP, EP, ETP), 7)
    start_s = time.process_time()
    assert "Nearest that works on 480 ranks" in refusal(spec_of(None, sizes), 480)
    assert time.process_time() - start_s < 20, "trying all combinations takes over a minute"


def test_an_uneven_split_of_layers_names_the_key_that_would_make_it_fit(spec_of):
    message = refusal(spec_of(DENSE, {PP: 3}), 3)
    assert re.search(f"Set {FIRST}=\\d", message)
    assert "num_first" not in message


AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
SEQ_LOSS, GLOBAL_LOSS = (
    AUX_LOSS | {"moe_router_load_balancing_type": f"{kind}_aux_loss"} for kind in ("seq", "global")
)


@pytest.mark.parametrize(
    ("model", "world_size", "options", "passed", "complaint"),
    [
        (DENSE, 2, {TP: 2}, {"sequence_parallel": False}, "sequence_parallel: false"),
        (DENSE, 1, {}, {"sequence_parallel": True}, "sequence_parallel: true needs"),
        (DENSE, 2, {PP: 2, VPP: 2}, {"batch_p2p_comm": True}, "mixes up what the stages send"),
        (DENSE, 2, {PP: 2, VPP: 2}, {"overlap_p2p_comm": False}, "mixes up what the stages send"),
        (DENSE, 1, {}, {"calculate_per_token_loss": False}, "calculate_per_token_loss: got False"),
        (DENSE, 1, {}, {"attention_dropout": 0.1}, "attention_dropout: got 0.1"),
        (DENSE, 1, {}, {"cuda_graph_impl": "local"}, "cuda_graph_impl: got 'local', only 'none' can be used"),
        (DENSE, 1, {}, {"softmax_type": "learnable"}, "softmax_type: got 'learnable', only 'vanilla' can be used"),
        (DENSE, 1, {}, {"mtp_num_layers": 1}, "multi-token prediction is not trained here. Leave it out"),
        (DENSE, 1, {}, {"enable_cuda_graph": True}, "micro-batches have different lengths. Leave it out"),
        (DENSE, 2, {TP: 2}, {"tp_comm_overlap": True}, "tp_comm_overlap: got True, only False can be used"),
        (MOE, 2, {EP: 2}, {"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm: got True"),
        (DENSE, 1, {}, {"gradient_accumulation_fusion": True}, "needs Apex's kernel fused_weight_gradient_mlp_cuda"),
        (MOE, 1, {}, {"moe_router_force_load_balancing": True}, "routes randomly"),
        (DENSE, 2, {TP: 2}, {"perform_initialization": False}, "leaves out all tensor ranks but the first"),
        (DENSE, 1, {}, {"enable_autocast": True}, "it would replace chosen dtypes, such as moe_router_dtype"),
        (DENSE, 1, {}, {"attention_backend": "local"}, "got 'local'; expected one of auto, flash, fused, unfused"),
        (DENSE, 1, {}, {"attention_backend": "flash"}, "kernels of Transformer Engine"),
        (
            MOE,
            1,
            {"moe_enable_routing_replay": True},
            {"moe_router_fusion": True},
            "moe_router_fusion: the fused router",
        ),
        (MOE, 1, {}, {"moe_enable_routing_replay": True, "moe_router_fusion": True}, "moe_router_fusion"),
        (MOE, 1, {}, {"moe_expert_capacity_factor": 1.0}, "log-probs would depend on the micro-batches"),
        (MOE, 1, {}, {"mtp_loss_scaling_factor": 0.3}, "multi-token prediction is not trained here"),
        (MOE, 1, {}, {"dsa_indexer_loss_coeff": 0.1}, "indexers of sparse attention are not trained here"),
        (MOE, 1, {}, {"qk_clip": True}, "it would have no effect. Leave it out"),
        (DENSE, 1, {"moe_enable_routing_replay": True}, {}, "the model has no experts"),
        (MOE, 1, SEQ_LOSS, {}, "got seq_aux_loss, but its gradient depends on the number of sequences"),
        (MOE, 2, {CP: 2, **SEQ_LOSS}, {}, "megatron_config.moe_router_load_balancing_type: got seq_aux_loss"),
        (MOE, 1, {}, GLOBAL_LOSS, "kwargs.moe_router_load_balancing_type: got global_aux_loss, but it counts"),
        (MOE, 1, {"moe_router_load_balancing_type": "sinkhorn"}, {}, "got 'sinkhorn'; expected none or aux_loss"),
        (MOE, 1, {"moe_aux_loss_coeff": 0.01}, {}, "megatron_config.moe_router_load_balancing_type=aux_loss"),
        (MOE, 1, {**AUX_LOSS, "moe_aux_loss_coeff": -0.01}, {}, "moe_aux_loss_coeff: got -0.01; expected 0 or more"),
        (DENSE, 1, AUX_LOSS, {}, "moe_aux_loss_coeff: the model has no experts"),
        (DENSE, 1, {}, {"moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff: the model has no experts"),
        (MOE, 1, AUX_LOSS, {"moe_router_fusion": True}, "the loss of moe_aux_loss_coeff counts padding"),
        (MOE, 1, {}, {"moe_z_loss_coeff": -0.1}, "moe_z_loss_coeff: got -0.1; expected 0 or more"),
        (
            MOE,
            4,
            {TP: 2, CP: 2},
            {"moe_z_loss_coeff": 0.001},
            "got 0.001; Megatron-Core 0.16.1 adds only 1/4 of the z-loss's gradient with tensor_model_parallel_size=2 "
            "and context_parallel_size=2. Leave it out, or split the model only with expert_model_parallel_size",
        ),
        (
            MOE,
            1,
            {},
            {"moe_router_load_balancing_type": ["aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]},
            "Megatron would use only the first of two equal kinds",
        ),
        (
            MOE,
            1,
            {"moe_aux_loss_coeff": 0.01},
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
            "1 coefficients for 2 kinds",
        ),
        (MOE, 2, {PP: 2, "moe_token_dispatcher_type": "allgather"}, {}, "use alltoall"),
        (MOE, 1, {"moe_token_dispatcher_type": "flex"}, {}, "needs DeepEP"),
        (MOE, 1, {}, {"moe_permute_fusion": True}, "only with Transformer Engine"),
        (MOE, 1, {}, {"num_layers": 2}, "the model's configuration sets it"),
        (MOE, 1, {}, {"bf16": True}, "set trainer.bf16"),
        (MOE, 1, {}, {"variable_seq_lengths": True}, "the numbers of stages and chunks determine it; leave it out"),
        ({**MOE, "norm_topk_prob": False}, 1, {}, {"moe_router_pre_softmax": False}, "normalise scores before"),
        (MOE, 1, {}, {"moe_router_pre_softmax": True}, "got true, but the model's routers normalise scores after"),
    ],
)
def test_settings_that_cannot_work_are_refused_whichever_section_set_them(
    spec_of, model, world_size, options, passed, complaint
):
    assert complaint in refusal(spec_of(model, options, **passed), world_size)


def test_losses_of_routers_that_are_exact_are_accepted(spec_of):
    refuse(spec_of(MOE, {TP: 2, CP: 2, **AUX_LOSS}), 4)
    refuse(spec_of(MOE, {EP: 2, PP: 2, **AUX_LOSS}, moe_z_loss_coeff=0.001), 4)
    refuse(spec_of(MOE, {TP: 2, **SEQ_LOSS, "moe_aux_loss_coeff": 0.0}, moe_z_loss_coeff=0.0), 2)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("optimizer_cpu_offload", True, "expected False: .* use trainer.strategy=fsdp with fsdp_config.cpu_offload"),
        ("use_precision_aware_optimizer", True, "expected False: .* split the optimizer's state over more"),
        ("optimizer_offload_fraction", 1.0, "got 1.0, but this field cannot be set here; leave it out"),
        ("decoupled_lr", 1e-3, "cannot be set here; leave it out"),
        ("exp_avg_dtype", "bf16", "cannot be set here; leave it out"),
        ("lr", 1e-3, "set trainer.policy.optimizer_config.lr instead"),
    ],
)
def test_an_unsupported_field_of_the_optimizer_is_refused(spec_of, field, value, complaint):
    spec = spec_of(DENSE, {"optimizer_config_kwargs": {field: value}})
    where = rf"^trainer\.policy\.megatron_config\.optimizer_config_kwargs\.{field}: "
    with pytest.raises(ConfigError, match=where) as error:
        megatron.validate(spec, 1)
    assert re.search(complaint, str(error.value))


def test_fields_of_the_optimizer_with_their_only_supported_value_are_accepted(spec_of):
    fields = {"optimizer": "adam", "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False}
    megatron.validate(spec_of(DENSE, {"optimizer_config_kwargs": fields}), 1)


def test_an_error_names_the_pass_through_section_if_it_set_the_value(spec_of):
    message = refusal(spec_of(DENSE, {}, **{TP: 3}), 3)
    assert message.startswith(f"trainer.policy.megatron_config.transformer_config_kwargs.{TP}: 3")


def test_a_missing_config_json_skips_only_the_checks_that_read_it(spec_of):
    refuse(spec_of(None, {TP: 3}), 3)
    assert "does not divide the 4 ranks" in refusal(spec_of(None, {TP: 3}), 4)


def test_a_token_budget_holds_the_longest_sequence_padded_for_the_mesh():
    def config_of(budget):
        values = {
            "trainer.policy.model.path": "model",
            "trainer.max_prompt_length": 9,
            "generator.sampling_params.max_generate_length": 5,
            "trainer.max_tokens_per_microbatch": budget,
        }
        return from_mapping(values)

    mesh = Mesh(world_size=4, tensor=2, context=2)
    with pytest.raises(ConfigError, match=r"14 tokens .* padded to 16, a multiple of the 8"):
        require_token_budget(config_of(15), mesh)
    require_token_budget(config_of(16), mesh)
    require_token_budget(config_of(-1), mesh)


@pytest.mark.parametrize(
    ("model", "mesh", "lora", "message"),
    [
        (MOE, {EP: 2}, {}, r"down_proj, gate_proj, up_proj of experts .* with expert_model_parallel_size=2"),
        (MOE, {TP: 2}, {"target_modules": ("down_proj",)}, r"down_proj of .* with tensor_model_parallel_size=2"),
        (MOE, {EP: 2}, {"target_modules": ("q_proj", "k_proj", "v_proj")}, None),
        (MOE, {PP: 2}, {}, None),
        (DENSE, {TP: 2}, {"merge_lora": False}, None),
        (
            LATENT,
            {PP: 2},
            {"target_modules": ("q_proj", "k_proj", "v_proj")},
            r"k_proj, q_proj, v_proj cannot have adapters here",
        ),
        (
            LATENT,
            {PP: 2},
            {"target_modules": ("o_proj", "gate_proj", "up_proj")},
            r"gate_proj, up_proj of experts .* peft",
        ),
        (LATENT, {PP: 2}, {"target_modules": ("o_proj",)}, None),
        (DENSE, {}, {"target_modules": ("q_proj",)}, r"k_proj, q_proj, v_proj are one matrix"),
        (DENSE, {}, {"target_modules": ("o_proj",), "exclude_modules": ("o_proj",)}, r"no layer is left"),
        (DENSE, {}, {"target_modules": ("lm_head",)}, r"got 'lm_head'; expected layers .*q_proj, "),
    ],
)
def test_only_layers_that_can_have_adapters_are_accepted(spec_of, model, mesh, lora, message, monkeypatch):
    monkeypatch.setattr("rl_megatron.checks.refusals.find_spec", lambda _: None)
    spec = spec_of(model, mesh)
    spec = attrs.evolve(spec, model=attrs.evolve(spec.model, lora=LoraConfig(rank=4, **lora)))
    if message is None:
        megatron.validate(spec, 2)
        return
    with pytest.raises(ConfigError, match=rf"^trainer\.policy\.model\.lora\.target_modules: {message}"):
        megatron.validate(spec, 2)


@pytest.mark.parametrize("lora_type", ["lora", "canonical_lora"])
def test_projections_fused_in_one_matrix_get_adapters_together_or_not_at_all(lora_type):
    lora = LoraConfig(rank=4, target_modules=("gate_proj", "o_proj"))
    with pytest.raises(ConfigError, match=r"^trainer\.policy\.model\.lora\.target_modules: gate_proj, up_proj are one"):
        bridge_layers(lora, lora_type, "trainer.policy")


def test_experts_that_would_share_an_adapter_are_refused(spec_of, monkeypatch):
    monkeypatch.setattr("rl_megatron.checks.refusals.find_spec", lambda name: name)
    adapted = attrs.evolve(spec_of(MOE, {}).model, lora=LoraConfig(rank=4))
    message = refusal(attrs.evolve(spec_of(MOE, {PP: 2}), model=adapted), 2)
    assert "all experts of a rank would share in grouped products" in message
    assert "megatron_config.moe_grouped_gemm=false" in message
    refuse(attrs.evolve(spec_of(MOE, {PP: 2, "moe_grouped_gemm": False}), model=adapted), 2)


@pytest.mark.parametrize("mixed", [{**MOE, "mlp_only_layers": [0]}, {**LATENT, "first_k_dense_replace": 0}])
def test_adapters_that_peft_would_not_load_are_refused(mixed, spec_of):
    lora = LoraConfig(rank=4, target_modules=("o_proj", "down_proj"))
    message = refusal(attrs.evolve(spec_of(mixed, {}), model=attrs.evolve(spec_of(mixed, {}).model, lora=lora)), 1)
    assert "down_proj of experts would have adapters, and peft 0.21 would not load" in message
    for model, names in ((mixed, ("o_proj",)), (MOE, ("o_proj", "down_proj"))):
        fine = attrs.evolve(spec_of(model, {}).model, lora=LoraConfig(rank=4, target_modules=names))
        refuse(attrs.evolve(spec_of(model, {}), model=fine), 1)


def test_refusing_imports_neither_torch_nor_megatron():
    code = "import sys, rl_megatron.checks.refusals; print({'torch', 'megatron', 'transformers'} & sys.modules.keys())"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    ).stdout
    assert printed.strip() == "set()"


def test_selective_checkpointing_must_be_set_with_megatrons_own_keys(spec_of):
    spec = attrs.evolve(spec_of(DENSE, {}), gradient_checkpointing="selective")
    assert "recompute_granularity=selective" in refusal(spec, 1)
    spec = attrs.evolve(spec_of(DENSE, {}, recompute_granularity="selective"), gradient_checkpointing=True)
    assert "recomputes whole layers; set trainer.gradient_checkpointing=false" in refusal(spec, 1)
    refuse(attrs.evolve(spec, gradient_checkpointing=False), 1)


def test_every_field_of_ddp_config_is_a_key_or_has_a_reason_why_not():
    """Every field of `DistributedDataParallelConfig` is in `DdpOptions`, or in `UNSUPPORTED` with a reason."""
    options = {field.name for field in attrs.fields(DdpOptions)}
    fields = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}
    answered = {name for name in fields if f"{DDP}.{name}" in UNSUPPORTED}
    assert fields.keys() == options | answered
    assert not options & answered
    for name in answered - {"use_distributed_optimizer", "average_in_collective"}:
        found = UNSUPPORTED[f"{DDP}.{name}"]
        assert found.is_harmless or fields[name] in found.harmless, (
            f"{name}: Megatron's default {fields[name]!r} is refused"
        )
    for name in options - {"overlap_grad_reduce", "overlap_param_gather"}:
        chosen = MegatronOptions(ddp_config=DdpOptions(**{name: True}))
        assert getattr(ddp_config(chosen), name) is True


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data_parallel_sharding_strategy=optim", r"data_parallel_sharding_strategy: .*choose trainer\.strategy=fsdp"),
        ("nccl_ub=true", r"nccl_ub: .*torch allocates the buffers"),
        ("num_distributed_optimizer_instances=2", r"num_distributed_optimizer_instances: .*over all data ranks"),
        (
            "pad_buckets_for_high_nccl_busbw=yes please",
            r"high_nccl_busbw: got .*expected true \| false",
        ),
        ("bucket_sizes=5", r"bucket_sizes: unknown key"),
    ],
)
def test_an_error_in_ddp_config_names_the_field(override: str, said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping({"trainer.strategy": "megatron"}, [f"{DDP}.{override}"])


def test_bucket_size_is_accepted_with_a_warning_that_it_has_no_effect():
    """Megatron itself uses a single bucket if gradient reduction does not overlap the backward pass."""
    with pytest.warns(ConfigWarning, match="bucket_size: has no effect .* in one piece"):
        from_mapping({"trainer.strategy": "megatron"}, [f"{DDP}.bucket_size=40000000"])
