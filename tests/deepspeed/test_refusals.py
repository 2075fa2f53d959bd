"""Configurations that are refused before any process starts, and the configuration that DeepSpeed receives."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import ModelConfig, OptimizerConfig, WorkerSpec
from rl_deepspeed import DeepSpeedOptions, OffloadOptimizer, OffloadParam, ZeroOptimization, deepspeed
from rl_deepspeed.engine_config import engine_config


def spec_of(options: DeepSpeedOptions, **fields: Any) -> WorkerSpec:
    defaults: dict[str, Any] = {
        "role": "policy",
        "model": ModelConfig(path="model"),
        "optimizer": OptimizerConfig(lr=1e-3),
        "bf16": False,
        "gradient_checkpointing": False,
        "use_sample_packing": True,
        "logprobs_chunk_size": 64,
        "total_optimizer_steps": None,
        "seed": 0,
    }
    return WorkerSpec(options=options, **{**defaults, **fields})


def zero(**settings: Any) -> DeepSpeedOptions:
    return DeepSpeedOptions(zero_optimization=ZeroOptimization(**settings))


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        (
            zero(stage=2, offload_param=OffloadParam(device="cpu")),
            2,
            r"offload_param\.device: got 'cpu', .* set stage=3",
        ),
        (zero(stage=1, overlap_comm=True), 2, r"overlap_comm: .* set stage=2"),
        (DeepSpeedOptions(extra={"zero_optimization": None}), 1, r"extra\.zero_optimization: got None; expected keys"),
        (zero(reduce_bucket_size=0), 2, r"reduce_bucket_size: got 0; expected at least 1"),
        (zero(stage3_max_live_parameters=-1), 2, r"stage3_max_live_parameters: got -1; expected at least 0"),
        (zero(stage=2, allgather_bucket_size=3), 2, r"allgather_bucket_size: got 3; expected an even number"),
        (DeepSpeedOptions(sequence_parallel_size=2), 3, r"mesh: sequence 2 does not divide the 3 ranks"),
        (
            DeepSpeedOptions(extra={"gradient_clipping": 1.0}),
            1,
            r"gradient_clipping: set by optimizer_config\.max_grad",
        ),
        (DeepSpeedOptions(extra={"bf16": {"enabled": True}}), 1, r"extra\.bf16: set by trainer\.bf16; leave it out"),
        (
            DeepSpeedOptions(extra={"zero_optimization": {"stage": 2}}),
            1,
            r"set deepspeed_config\.zero_optimization\.stage instead",
        ),
        (
            DeepSpeedOptions(extra={"zero_optimization": {"zero_hpz_partition_size": 2}}),
            2,
            r"extra\.zero_optimization\.zero_hpz_partition_size: not supported",
        ),
    ],
)
def test_invalid_options_are_refused_with_their_key(options: DeepSpeedOptions, world_size: int, message: str):
    with pytest.raises(ConfigError, match=message):
        deepspeed.validate(spec_of(options), world_size)


def test_selective_checkpointing_is_refused_where_parameters_are_gathered_inside_layers():
    for stage in (1, 2):
        deepspeed.validate(spec_of(zero(stage=stage), gradient_checkpointing="selective"), 2)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: selective, .* set .*stage=2"):
        deepspeed.validate(spec_of(zero(stage=3), gradient_checkpointing="selective"), 2)


def test_router_replay_of_a_critic_is_refused():
    options = DeepSpeedOptions(moe_enable_routing_replay=True)
    with pytest.raises(ConfigError, match=r"trainer\.critic\.deepspeed_config\.moe_enable_routing_replay"):
        deepspeed.validate(spec_of(options, role="critic"), 1)


def test_extra_keys_are_merged_into_the_generated_config():
    extra = {"wall_clock_breakdown": True, "zero_optimization": {"zero_quantized_weights": True}}
    config = engine_config(spec_of(DeepSpeedOptions(extra=extra)))
    assert config["wall_clock_breakdown"] is True
    assert config["zero_optimization"]["zero_quantized_weights"] is True
    assert config["zero_optimization"]["stage"] == 3
    assert config["gradient_clipping"] == 0.0, (
        "DeepSpeed must not clip: the worker clips each step by that step's settings"
    )


def test_only_requested_and_existing_parts_are_offloaded():
    asked = zero(offload_param=OffloadParam(device="cpu"), offload_optimizer=OffloadOptimizer(device="cpu"))
    of_policy = engine_config(spec_of(asked))["zero_optimization"]
    of_reference = engine_config(spec_of(asked, role="reference", optimizer=None))["zero_optimization"]
    unasked = engine_config(spec_of(zero()))["zero_optimization"]
    assert of_policy["offload_param"] == of_policy["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert "offload_param" in of_reference
    assert "offload_optimizer" not in of_reference
    assert not {"offload_param", "offload_optimizer"} & unasked.keys()


@pytest.mark.parametrize(("stage", "expected"), [(1, 2), (2, 2), (3, 3)])
def test_bfloat16_sums_gradients_in_float32_and_replaces_stage_1_by_2(stage: int, expected: int):
    config = engine_config(spec_of(zero(stage=stage), bf16=True))
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["zero_optimization"]["stage"] == expected
    assert engine_config(spec_of(zero(stage=stage)))["zero_optimization"]["stage"] == stage
