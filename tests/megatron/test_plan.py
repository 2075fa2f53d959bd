"""`rl plan` against real ranks: it predicts parameter counts exactly, and activation bytes within a factor of two."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from rl_core.cli.app import rl
from rl_core.errors import ConfigError
from rl_core.layout.packing import padded_lengths
from rl_deepspeed import deepspeed
from rl_fsdp import fsdp
from rl_megatron import MegatronOptions, megatron
from rl_transformers.testing.backend import LIMITS, PRELOADED, TEMPERATURE
from rl_transformers.testing.cases import LOSS, Variant, open_case
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.rank_process import SuiteHost
from tests.megatron.probes import probed

PRELOADED.update(dict.fromkeys(["rl_megatron.rank.worker", "tests.megatron.probes"]))
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FACTOR = 2.0
"""Largest ratio between planned and measured activations: attention kernels and gathers keep more bytes than the plan
assumes, or fewer."""
CASES = {
    "dense, one rank": (1, {}, {}, {"num_hidden_layers": 4}),
    "untied, tp2": (2, {TP: 2}, {}, {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "critic, pp2": (2, {PP: 2}, {"role": "critic"}, {"num_hidden_layers": 4}),
    "qwen2 with biases, pp2": (2, {PP: 2}, {}, {"family": "qwen2", "num_hidden_layers": 4}),
    "recomputed, pp2 vpp2": (2, {PP: 2, VPP: 2}, {"gradient_checkpointing": True}, {"num_hidden_layers": 4}),
    "experts, tp2 ep2 etp1 cp2": (
        4,
        {TP: 2, EP: 2, ETP: 1, CP: 2},
        {},
        {"family": "qwen3_moe", "num_hidden_layers": 4},
    ),
    "latent attention, pp2 ep2": (4, {PP: 2, EP: 2}, {}, {"family": "deepseek_v3", "num_hidden_layers": 4}),
}


def run_plan(*overrides: str):
    return CliRunner().invoke(rl, ["plan", "quickstart", *overrides], obj={"traceback": False})


def test_every_backend_is_a_planner():
    assert all(backend.can_plan for backend in (megatron, fsdp, deepspeed))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_was_planned(name, tmp_path):
    world_size, sizes, spec, checkpoint = CASES[name]
    path = make_checkpoint(tmp_path / "model", **{"vocab_size": 50, **checkpoint})
    variant = Variant(world_size=world_size, options=MegatronOptions(**sizes), spec=spec, checkpoint=checkpoint)
    with open_case(probed, MegatronOptions(), variant, tmp_path, checkpoint=path, timeout_s=240.0) as case:
        group = case.start()
        lengths_N = padded_lengths(case.batch.lengths.numpy(), group.mesh.sequence_multiple)
        parts = group._group._parts(case.batch, LIMITS)
        tokens = max(int(lengths_N[part.sent[list(m)]].sum()) for part in parts for m in part.plan if len(m))
        plans = probed.plan(
            case.spec, world_size, micro_batch_tokens=tokens, num_micro_batches=max(len(part.plan) for part in parts)
        )
        assert group.call(SuiteHost.ask, "num_parameters") == [plan.num_parameters for plan in plans]

        if case.spec.role == "critic":
            return  # the suite's batch has no returns, so it cannot train a critic
        call = group.ranks.call_on_parts(
            SuiteHost.ask_on_part, case.batch, parts, "forward_backward_measured", LOSS, temperature=TEMPERATURE
        )
        for plan, kept_bytes in zip(plans, asyncio.run(call), strict=True):
            ratio = plan.activation_bytes / kept_bytes
            assert 1 / FACTOR <= ratio <= FACTOR, (
                f"rank {plan.rank}: {plan.activation_bytes} planned, {kept_bytes} kept"
            )


def test_the_table_names_every_rank(tmp_path: Path):
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=4)
    sizes = [f"trainer.policy.megatron_config.{name}=2" for name in (TP, PP)]
    result = run_plan(
        f"trainer.policy.model.path={path}",
        "trainer.strategy=megatron",
        "trainer.placement.policy_num_gpus_per_node=8",
        *sizes,
    )
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("│") and line[2].isdigit()]
    assert len(rows) == 8
    assert "tensor 2 × pipeline 2 × data 2" in result.output
    assert [row.split("│")[4].strip() for row in rows] == ["0-1"] * 4 + ["2-3"] * 4


def test_the_plan_also_refuses_an_impossible_mesh(tmp_path: Path):
    path = make_checkpoint(tmp_path / "model")
    result = run_plan(
        f"trainer.policy.model.path={path}",
        "trainer.strategy=megatron",
        "trainer.placement.policy_num_gpus_per_node=3",
        f"trainer.policy.megatron_config.{TP}=3",
    )
    assert "3 does not divide the model's 4 attention heads" in str(result.exception)


@pytest.mark.slow
def test_the_plan_also_refuses_a_model_that_megatron_computes_differently(tmp_path: Path):
    path = make_checkpoint(tmp_path / "model", is_causal=False)
    result = run_plan(f"trainer.policy.model.path={path}", "trainer.strategy=megatron")
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(f"trainer.policy.model.path: megatron does not compute {path} (qwen3) as ")
    assert "log-probs of a small copy of it differ by " in str(result.exception)
