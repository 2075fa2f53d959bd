"""Launch scripts of other trainers: their keys load, or the error says what to write instead."""

from __future__ import annotations

import warnings

import pytest

from rl_core.config import Config, ConfigWarning, from_mapping
from rl_core.config.keys import ALIASES, RENAMED, UNSUPPORTED
from rl_core.config.loading import known_paths
from rl_core.config.plugin_options import installed_paths
from rl_core.errors import ConfigError

DOCUMENTED = [
    "trainer.algorithm.advantage_estimator=grpo",
    "data.train_data=['data/gsm8k/train.parquet']",
    "data.val_data=['data/gsm8k/validation.parquet']",
    "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.strategy=fsdp",
    "trainer.strategy=fsdp2",
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
"""As the documents show them that users of this field start from."""


@pytest.mark.parametrize("override", DOCUMENTED)
def test_a_documented_key_loads_without_a_warning(override: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_mapping({}, [override])


def test_other_spellings_of_values_are_accepted():
    assert from_mapping({}, ["trainer.strategy=fsdp2"]).trainer.strategy == "fsdp"
    assert from_mapping({}, ["trainer.resume_mode=null"]).trainer.resume_mode == "none"


@pytest.mark.parametrize(
    ("override", "successor"),
    [
        ("trainer.policy.gradient_checkpointing=true", r"write trainer\.gradient_checkpointing"),
        ("trainer.fully_async.max_staleness_steps=4", r"write trainer\.max_staleness"),
        ("trainer.algorithm.use_tis=true", r"write trainer\.algorithm\.off_policy_correction\.tis_ratio_type=token"),
        ("trainer.algorithm.cispo.cispo_anchor=old", r"write trainer\.algorithm\.policy_loss_params\.cispo_anchor"),
        ("environment.skyrl_gym.search.topk=3", r"write environment\.options\.search\.topk"),
        ("trainer.strategy=deepspeed", r"trainer\.strategy: there is no deepspeed backend yet; choose fsdp"),
        ("deepspeed_config.train.zero_optimization.offload_param.device=cpu", r"there is no DeepSpeed backend yet"),
        ("generator.use_conversation_multi_turn=false", r"what was said is never written anew"),
        ("trainer.algorithm.value_head_prefix=score", r"head is called value_head"),
        (
            "trainer.policy.model.lora.lora_sync_path=adapters",
            r"with trainer\.policy\.model\.lora\.merge_lora=false, alone",
        ),
    ],
)
def test_a_key_from_elsewhere_names_its_successor_or_the_reason(override: str, successor: str):
    with pytest.raises(ConfigError, match=successor):
        from_mapping({}, [override])


@pytest.mark.parametrize(
    "override",
    [
        "generator.inference_engine.num_prefill=0",
        "generator.use_conversation_multi_turn=true",
        "trainer.flash_attn=true",
        "generator.sampling_params.logprobs=1",
    ],
)
def test_a_key_that_asks_for_nothing_that_is_missing_is_dropped_with_a_warning(override: str):
    with pytest.warns(ConfigWarning, match="has no effect and can go"):
        assert from_mapping({}, [override]) == from_mapping({})


def test_megatrons_switch_for_adapters_is_everyones():
    config = from_mapping({}, ["trainer.policy.megatron_config.lora_config.merge_lora=false"])
    assert not config.trainer.policy.model.lora.merge_lora


def test_a_harmless_value_is_compared_with_its_type():
    with pytest.raises(ConfigError, match=r"generator\.inference_engine\.num_prefill: not supported"):
        from_mapping({}, ["generator.inference_engine.num_prefill=false"])


MODELS = ("policy", "ref", "critic")


def test_the_tables_shadow_no_key_and_their_successors_exist():
    known = {*known_paths(Config), *installed_paths()}
    assert not known & {*ALIASES, *RENAMED, *UNSUPPORTED}
    successors = {successor.partition("=")[0] for successor in (*ALIASES.values(), *RENAMED.values())}
    elsewhere = ("trainer.algorithm.policy_loss_params.", *(f"trainer.{model}.fsdp_config." for model in MODELS))
    assert {key for key in successors if not key.startswith(elsewhere)} <= known
