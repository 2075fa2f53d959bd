"""`rl rehearse`: a full-size step of one rank without data, its refusals, and the table of docs/planning.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch.distributed as dist

from rl_core import config as configuration
from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import OptimizerConfig
from rl_core.trainer.before.planned_run import arranged_models, longest_sequence, planned_model
from rl_core.trainer.before.rehearsed_run import planned_phase, rehearsed_model
from rl_fsdp import FsdpOptions, fsdp
from rl_fsdp.backend import fsdp1

AT_OUTPUT = 1536 * 151_936
IN_LAYERS = 1_543_714_304 - AT_OUTPUT
"""Parameters of Qwen2.5-1.5B, whose embeddings and output layer share one matrix."""
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def table_row(model: str, mesh: str) -> tuple[int, float, float]:
    """The row's tokens, rehearsed GiB and planned GiB."""
    found = re.search(rf"^\| {re.escape(model)} \| {re.escape(mesh)} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    tokens, rehearsed, planned, _ = found.group(1).split(" | ")
    return int(tokens.replace(",", "")), float(rehearsed), float(planned)


def test_a_full_size_step_takes_what_the_table_says_and_the_plan_agrees():
    config = configuration.load("qwen2_5_1_5b").config
    model = arranged_models(config)["policy"]
    rehearsed = rehearsed_model(config, "policy", model)
    tokens, in_table, planned_in_table = table_row("Qwen2.5-1.5B", "8 ranks")
    assert rehearsed.micro_batch_tokens == tokens
    train, step = rehearsed.phases
    total = sum(train.parts.values()) / 2**30
    assert total == pytest.approx(in_table, abs=0.06)
    planned = planned_model(config, "policy", model, longest_sequence(config))
    expected = planned_phase(planned, "train")
    assert sum(expected.values()) / 2**30 == pytest.approx(planned_in_table, abs=0.06)
    assert sum(expected.values()) / 2**30 == pytest.approx(total, rel=0.1)
    # Memory held between steps is planned exactly, except a few KiB of padding and buffers.
    for kind in ("parameters", "gradients", "optimizer"):
        assert step.parts[kind] == pytest.approx(expected[kind], rel=1e-3)
    # Each parameter of the decoder layers takes 6 operations per token, and 2 more for recomputation; each parameter of
    # the output layer takes 6 per response token. There are two micro-batches. Attention adds a little.
    response = config.generator.sampling_params.max_generate_length / longest_sequence(config)
    products = 2 * tokens * (8 * IN_LAYERS + 6 * response * AT_OUTPUT)
    assert 1 < train.flops / products < 1.05
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"options": FsdpOptions(cpu_offload=True)}, "cpu_offload"),
        ({"options": FsdpOptions(moe_enable_routing_replay=True)}, "moe_enable_routing_replay"),
        ({"optimizer": OptimizerConfig(name="adafactor")}, "optimizer_config.name"),
    ],
)
def test_a_configuration_that_cannot_be_rehearsed_is_refused(fields: dict[str, Any], key: str):
    assert fsdp.can_rehearse
    spec = arranged_models(configuration.load("qwen2_5_1_5b").config)["policy"].spec
    batch = Batch.from_sequences([{"tokens": [1, 2]}])
    with pytest.raises(ConfigError, match=key):
        fsdp.rehearse(attrs.evolve(spec, **fields), 8, batch=batch, plan=[[0]], loss=None)


def test_fsdp1_is_refused_with_the_change_to_make():
    spec = arranged_models(configuration.load("qwen2_5_1_5b").config)["policy"].spec
    batch = Batch.from_sequences([{"tokens": [1, 2]}])
    with pytest.raises(ConfigError, match=r"trainer\.strategy=fsdp"):
        fsdp1.rehearse(spec, 8, batch=batch, plan=[[0]], loss=None)


def test_a_backend_without_rehearsals_is_refused():
    config = configuration.load("qwen2_5_1_5b", ["trainer.strategy=megatron"]).config
    with pytest.raises(ConfigError, match=r"megatron.* cannot rehearse a step"):
        rehearsed_model(config, "policy", arranged_models(config)["policy"])
