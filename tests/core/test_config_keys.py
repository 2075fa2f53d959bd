"""Keys from other trainers are read, dropped with a warning, or refused with an error that names their successor or the
reason."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from rl_core.config import Config, ConfigWarning, from_mapping
from rl_core.config.keys import ALIASES, LOSS_SECTIONS, RENAMED, SUCCESSORS, TAKEN_AS, UNSUPPORTED
from rl_core.config.loading import known_paths
from rl_core.config.plugin_options import installed_paths
from rl_core.errors import ConfigError, ConfigErrors

DOCUMENTED = [
    "trainer.algorithm.advantage_estimator=grpo",
    "data.train_data=['data/gsm8k/train.parquet']",
    "data.val_data=['data/gsm8k/validation.parquet']",
    "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.strategy=fsdp",
    "trainer.strategy=fsdp2",
    "trainer.strategy=deepspeed",
    "deepspeed_config.train.zero_optimization.offload_param.device=cpu",
    "deepspeed_config.train.zero_optimization.offload_optimizer.device=cpu",
    "deepspeed_config.train.zero_optimization.sub_group_size=1e8",
    "deepspeed_config.train.zero_optimization.reduce_bucket_size=1e8",
    "deepspeed_config.eval.zero_optimization.offload_param.device=cpu",
    "trainer.ref.fsdp_config.cpu_offload=true",
    "trainer.policy.fsdp_config.cpu_offload=false",
    "trainer.use_sample_packing=false",
    "trainer.remove_microbatch_padding=true",
    "trainer.micro_train_batch_size_per_gpu=8",
    "trainer.micro_forward_batch_size_per_gpu=32",
    "trainer.placement.colocate_all=false",
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.critic.optimizer_config.lr=5.0e-6",
    "trainer.critic_mini_batch_size=256",
    "trainer.policy.model.lora.rank=32",
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
    "generator.max_turns=5",
    "generator.max_input_length=4096",
    "generator.step_wise_trajectories=true",
    "generator.merge_stepwise_output=true",
    "generator.inference_engine.num_engines=8",
    "generator.inference_engine.backend=vllm",
    "trainer.resume_mode=null",
    "trainer.logger=wandb",
]
"""Overrides as the documentation of other trainers writes them."""


@pytest.mark.parametrize("override", DOCUMENTED)
def test_a_documented_key_loads_without_a_warning(override: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_mapping({"trainer.strategy": "deepspeed"} if "deepspeed" in override else {}, [override])


def test_a_backend_section_outside_of_a_model_applies_to_trained_models_or_the_reference():
    keys = ["train.zero_optimization.sub_group_size=1e8", "eval.zero_optimization.offload_param.device=cpu"]
    config = from_mapping({"trainer.strategy": "deepspeed"}, [f"deepspeed_config.{key}" for key in keys])
    options = [model.options("deepspeed_config") for model in (config.trainer.policy, config.trainer.critic)]
    assert [zero.zero_optimization.sub_group_size for zero in options] == [100_000_000, 100_000_000]
    assert [zero.zero_optimization.offload_param.device for zero in options] == ["none", "none"]
    assert config.trainer.ref.options("deepspeed_config").zero_optimization.offload_param.device == "cpu"
    with pytest.raises(ConfigErrors, match=r"trainer\.policy\.fsdp_config\.zero: unknown key"):
        from_mapping({}, ["fsdp_config.train.zero=1"])


def test_other_spellings_of_values_are_accepted():
    assert from_mapping({}, ["trainer.strategy=fsdp2"]).trainer.strategy == "fsdp"
    assert from_mapping({}, ["trainer.resume_mode=null"]).trainer.resume_mode == "none"
    assert from_mapping({}, ["data.val_data=null"]).data.val_data == ()


@pytest.mark.parametrize(
    ("override", "successor"),
    [
        ("trainer.fully_async.max_staleness_steps=4", r"use trainer\.max_staleness"),
        ("generator.use_conversation_multi_turn=false", r"never re-rendered as text"),
        ("trainer.algorithm.value_head_prefix=score", r"head is called value_head"),
        ("generator.enable_http_endpoint=true", r"set generator\.inference_engine\.router_port"),
    ],
)
def test_the_error_for_a_key_from_elsewhere_names_its_successor_or_the_reason(override: str, successor: str):
    with pytest.raises(ConfigError, match=successor):
        from_mapping({}, [override])


@pytest.mark.parametrize(
    "override",
    [
        "generator.inference_engine.num_prefill=0",
        "generator.use_conversation_multi_turn=true",
        "trainer.flash_attn=true",
        "trainer.flash_attn=false",
        "generator.batched=true",
        "hydra.run.dir=outputs",
        "generator.enable_http_endpoint=false",
        "generator.override_existing_update_group=enable",
        "trainer.algorithm.use_tis=false",
        "trainer.algorithm.tis_imp_ratio_cap=-1.0",
        "trainer.num_logger_train_samples=-1",
        "trainer.policy.model.lora.lora_sync_path=adapters",
        "trainer.policy.megatron_config.ddp_config.average_in_collective=true",
        "generator.sampling_params.logprobs=1",
    ],
)
def test_a_foreign_key_without_effect_is_dropped_with_a_warning(override: str):
    with pytest.warns(ConfigWarning, match="has no effect and can be removed"):
        assert from_mapping({}, [override]) == from_mapping({})


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["trainer.policy.gradient_checkpointing=false"], ["trainer.gradient_checkpointing=false"]),
        (
            ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=4"],
            [
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
                "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=4",
            ],
        ),
        (
            ["trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.cispo.cispo_anchor=rollout"],
            [
                "trainer.algorithm.policy_loss_type=cispo",
                "trainer.algorithm.policy_loss_params.cispo_anchor=rollout",
            ],
        ),
        (["environment.skyrl_gym.search.topk=3"], ["environment.options.search.topk=3"]),
        (
            ["generator.backend=vllm", "generator.num_inference_engines=2", "generator.gpu_memory_utilization=0.5"],
            [
                "generator.inference_engine.backend=vllm",
                "generator.inference_engine.num_engines=2",
                "generator.inference_engine.gpu_memory_utilization=0.5",
            ],
        ),
        (["trainer.num_logger_train_samples=3"], ["trainer.num_logged_samples=3"]),
    ],
)
def test_a_key_with_another_name_here_is_read_with_a_warning(overrides: list[str], same: list[str]):
    with pytest.warns(ConfigWarning, match="here and was read as that key"):
        assert from_mapping({}, overrides) == from_mapping({}, same)


def test_settings_of_fully_async_runs_are_read_as_max_staleness():
    staleness = "trainer.fully_async.max_staleness_steps=2"
    with pytest.warns(ConfigWarning) as said:
        config = from_mapping({}, ["trainer.fully_async.enabled=true", staleness])
    assert config.trainer.max_staleness == 2
    assert ["no effect" in str(one.message) for one in said] == [True, False]
    with pytest.warns(ConfigWarning) as said:
        assert from_mapping({}, ["trainer.fully_async.enabled=false", staleness]) == from_mapping({})
    assert "trainer.fully_async.enabled is false, so trainer.max_staleness is 0" in str(said[1].message)
    with pytest.raises(ConfigError, match=r"trainer\.max_staleness above 0 makes a run asynchronous"):
        from_mapping({}, ["trainer.fully_async.enabled=true"])


def test_nccl_and_gloo_are_names_of_the_broadcast_transport():
    for name in ("nccl", "gloo"):
        engine = from_mapping({}, [f"generator.inference_engine.weight_sync_backend={name}"]).generator.inference_engine
        assert engine.weight_sync_backend == "broadcast"
    with pytest.warns(ConfigWarning, match="weight_sync_backend: is called"):
        old = from_mapping({}, ["generator.weight_sync_backend=nccl"]).generator.inference_engine
    assert old.weight_sync_backend == "broadcast"


def test_parameters_of_a_loss_that_is_not_chosen_are_dropped_with_a_warning():
    with pytest.warns(ConfigWarning, match=r"cispo_anchor: has no effect.*policy_loss_type=cispo"):
        assert from_mapping({}, ["trainer.algorithm.cispo.cispo_anchor=rollout"]) == from_mapping({})


def test_merge_lora_of_the_megatron_section_sets_the_models_key():
    config = from_mapping({}, ["trainer.policy.megatron_config.lora_config.merge_lora=false"])
    assert not config.trainer.policy.model.lora.merge_lora


def test_false_is_not_read_as_a_harmless_zero():
    with pytest.raises(ConfigError, match=r"generator\.inference_engine\.num_prefill: not supported"):
        from_mapping({}, ["generator.inference_engine.num_prefill=false"])


MODELS = ("policy", "ref", "critic")


def test_tables_of_foreign_keys_contain_no_own_key_and_their_successors_exist():
    known = {*known_paths(Config), *installed_paths()}
    assert not known & {*ALIASES, *RENAMED, *UNSUPPORTED, *TAKEN_AS, *SUCCESSORS, *LOSS_SECTIONS}
    named = (*ALIASES.values(), *RENAMED.values(), *TAKEN_AS.values(), *(one.key for one in SUCCESSORS.values()))
    successors = {successor.partition("=")[0] for successor in named}
    elsewhere = ("trainer.algorithm.policy_loss_params.", *(f"trainer.{model}.fsdp_config." for model in MODELS))
    assert {key for key in successors if not key.startswith(elsewhere)} <= known


def test_a_configuration_with_own_keys_does_not_load_the_names_of_other_trainers():
    code = (
        "import sys; from rl_core.config import from_mapping; "
        "from_mapping({{'trainer.epochs': 2, 'trainer.strategy': 'fsdp2'{}}}); "
        "assert ('rl_core.config.keys' in sys.modules) is {}"
    )
    subprocess.run([sys.executable, "-c", code.format("", False)], check=True)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.format(", 'trainer.flash_attn': True", True)], check=True
    )
