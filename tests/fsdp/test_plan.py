"""`rl plan` for sharded models predicts exactly how many parameters real ranks hold; after scoring, FSDP1 frees
what it gathered."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from rl_core.interfaces import LoraConfig, ModelConfig, OptimizerConfig, RankInfo, Worker, WorkerSpec
from rl_core.rank_kit.optimizers import state_tensors
from rl_fsdp import FsdpOptions, fsdp
from rl_fsdp.backend import FsdpBackend
from rl_fsdp.options import MixedPrecision
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import LIMITS, TEMPERATURE, Variant, open_case
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.rank_process import SuiteHost

PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "tests.fsdp.test_plan"]))


@attrs.frozen(kw_only=True)
class CountingBackend(FsdpBackend):
    """A backend whose ranks report how many parameters they hold."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from torch.distributed.tensor import DTensor

        from rl_fsdp.worker import FsdpWorker

        class CountingWorker(FsdpWorker):
            def num_parameters(self) -> int:
                parameters = self.scorer.parameters()
                return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)

            def state_bytes(self) -> int:
                """Bytes of the optimizer's state before the first step."""
                self.shards.state(with_optimizer=True)
                kept = [t for state in self.optimizer.state.values() for t in state_tensors(state).values()]
                return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in kept)

        return CountingWorker(spec, rank, "fsdp2")


@attrs.frozen(kw_only=True)
class CountingFlatBackend(FsdpBackend):
    """FSDP1, whose ranks report how many elements their flat parameters have."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        from rl_fsdp.worker import FsdpWorker

        class CountingWorker(FsdpWorker):
            def handles(self) -> list[Any]:
                units = [unit for unit in self.shards.module.modules() if isinstance(unit, FSDP)]
                return [unit._handle for unit in units if unit._handle is not None]

            def num_parameters(self) -> int:
                return sum(handle.flat_param.numel() for handle in self.handles())

            def state_bytes(self) -> int:
                """Bytes of the optimizer's state before the first step."""
                self.shards.state(with_optimizer=True)
                return sum(t.nbytes for state in self.optimizer.state.values() for t in state_tensors(state).values())

            def num_gathered_units(self) -> int:
                return sum(not handle.needs_unshard() for handle in self.handles())

        return CountingWorker(spec, rank, "fsdp1")


counting = CountingBackend()
counting_flat = CountingFlatBackend(name="fsdp1", is_fsdp1=True)


@pytest.mark.parametrize(
    ("world_size", "options", "checkpoint"),
    [
        (1, {}, {}),
        (2, {}, {"tie_word_embeddings": False}),
        (3, {}, {"family": "qwen2"}),
        (4, {"fsdp_size": 2, "sequence_parallel_size": 2}, {"family": "qwen3_moe"}),
    ],
)
def test_ranks_hold_the_parameters_that_were_planned(world_size, options, checkpoint, tmp_path):
    options = FsdpOptions(**options)
    variant = Variant(world_size=world_size, options=options, checkpoint=checkpoint)
    with open_case(counting, FsdpOptions(), variant, tmp_path) as case:
        plans = counting.plan(case.spec, world_size, micro_batch_tokens=64, num_micro_batches=1)
        assert case.start().call(SuiteHost.ask, "num_parameters") == [plan.num_parameters for plan in plans]
        assert [plan.data_part for plan in plans] == [
            rank // options.sequence_parallel_size for rank in range(world_size)
        ]
        assert all(plan.optimizer_bytes == 2 * plan.gradient_bytes == 8 * plan.num_parameters for plan in plans)


@pytest.mark.parametrize(
    ("backend", "name", "params", "in_weights"),
    [
        (counting, "adamw", {}, 2),
        (counting, "muon", {}, 1.5),
        (counting, "sgd", {}, 0),
        (counting, "sgd", {"momentum": 0.9}, 1),
        (counting, "adafactor", {}, 0.2),
        (counting_flat, "muon", {}, 1.5),
    ],
)
def test_the_state_of_each_optimizer_is_planned_to_the_byte(backend, name, params, in_weights, tmp_path):
    """`in_weights`: the most bytes that a state may have, in multiples of the weights' bytes on one rank."""
    variant = Variant(world_size=2, spec={"optimizer": OptimizerConfig(name=name, params=params)})
    with open_case(backend, FsdpOptions(), variant, tmp_path) as case:
        plans = backend.plan(case.spec, 2, micro_batch_tokens=64, num_micro_batches=1)
        planned = [plan.optimizer_bytes for plan in plans]
        assert case.start().call(SuiteHost.ask, "state_bytes") == planned
        assert all(plan.optimizer_bytes <= in_weights * plan.parameter_bytes for plan in plans)
        assert min(planned) > 0 or in_weights == 0


@pytest.mark.parametrize(("world_size", "family", "reshards"), [(2, "qwen2", False), (3, "qwen3_moe", True)])
def test_flat_parameters_are_planned_with_padding_and_none_stay_gathered_after_scoring(
    world_size, family, reshards, tmp_path
):
    options = FsdpOptions(reshard_after_forward=reshards)
    variant = Variant(world_size=world_size, options=options, checkpoint={"family": family})
    with open_case(counting_flat, FsdpOptions(), variant, tmp_path) as case:
        plans = counting_flat.plan(case.spec, world_size, micro_batch_tokens=64, num_micro_batches=1)
        group = case.start()
        assert group.call(SuiteHost.ask, "num_parameters") == [plan.num_parameters for plan in plans]
        group.forward(case.batch, LIMITS, temperature=TEMPERATURE)
        assert group.call(SuiteHost.ask, "num_gathered_units") == [0] * world_size


def planned(tmp_path, world_size=4, *, options=None, **spec):
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=4)
    model = ModelConfig(path=str(path), lora=spec.pop("lora", LoraConfig()))
    fields = {
        "role": "policy",
        "optimizer": OptimizerConfig(),
        "bf16": True,
        "gradient_checkpointing": True,
        "use_sample_packing": True,
        "logprobs_chunk_size": 64,
        "total_optimizer_steps": None,
        "seed": 0,
        **spec,
    }
    built = WorkerSpec(model=model, options=options or FsdpOptions(), **fields)
    return fsdp.plan(built, world_size, micro_batch_tokens=256, num_micro_batches=1)[0]


def test_gathered_bytes_and_host_memory_follow_the_options(tmp_path):
    usual = planned(tmp_path)
    assert planned(tmp_path, options=FsdpOptions(reshard_after_forward=False)).gathered_bytes > usual.gathered_bytes
    in_bf16 = FsdpOptions(mixed_precision=MixedPrecision(reduce_dtype="bf16"))
    assert planned(tmp_path, options=in_bf16).gathered_bytes < usual.gathered_bytes
    assert planned(tmp_path, optimizer=None).gathered_bytes < usual.gathered_bytes
    assert usual.on_host == ()
    assert planned(tmp_path, options=FsdpOptions(cpu_offload=True)).on_host == ("parameters", "gradients", "optimizer")


def test_only_the_adapters_have_planned_gradients_and_moments(tmp_path):
    usual, adapted = planned(tmp_path), planned(tmp_path, lora=LoraConfig(rank=2))
    assert 0 < adapted.gradient_bytes < usual.gradient_bytes / 4
    assert adapted.parameter_bytes < 0.7 * usual.parameter_bytes, "the frozen weights must be planned in bfloat16"
    assert adapted.optimizer_bytes == 2 * adapted.gradient_bytes
    assert adapted.gathered_bytes < usual.gathered_bytes
