"""`rl plan` for ZeRO predicts exactly the bytes of parameters, gradients and optimizer state that real ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.interfaces import LoraConfig, OptimizerConfig, RankInfo, RankPlan, Worker, WorkerSpec
from rl_deepspeed import DeepSpeedOptions, OffloadOptimizer, OffloadParam, ZeroOptimization
from rl_deepspeed.backend import DeepSpeedBackend
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Case, Variant, open_case
from rl_transformers.testing.rank_process import SuiteHost
from tests.deepspeed.test_conformance import zero

PRELOADED.update(dict.fromkeys(["rl_deepspeed.worker", "tests.deepspeed.test_plan"]))


@attrs.frozen(kw_only=True)
class CountingBackend(DeepSpeedBackend):
    """A backend whose ranks report how many bytes they hold."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from rl_deepspeed.worker import DeepSpeedWorker

        class CountingWorker(DeepSpeedWorker):
            def held(self) -> tuple[int, int, int]:
                zero, weights = self.shards.optimizer, [weight for _, weight in self.scorer.named_weights()]
                own = [getattr(weight, "ds_tensor", weight) for weight in weights]
                is_flat = hasattr(zero, "single_partition_of_fp32_groups")
                stepped = zero.single_partition_of_fp32_groups if is_flat else zero.fp32_partitioned_groups_flat
                moments = [m for state in zero.optimizer.state.values() for m in state.values() if m.numel() > 1]
                gradients = gradients_of(zero, weights) if is_flat else [zero.grad_partitions_flat_buffer]
                return bytes_of(own), bytes_of(gradients), bytes_of([*stepped, *moments])

        return CountingWorker(spec, rank)


def gradients_of(zero: Any, weights: list[Any]) -> list[Any]:
    """The gradients of ZeRO stages 1 and 2, wherever DeepSpeed stores them."""
    own = [weight.grad for weight in weights if weight.grad is not None]
    groups = [*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()]
    return own + [gradient for group in groups for gradient in group or ()]


def bytes_of(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


counting = CountingBackend()


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.parity),
        *(pytest.param(stage, bf16, marks=pytest.mark.parity) for stage in (1, 2) for bf16 in (False, True)),
    ],
)
def test_ranks_hold_what_was_planned(stage: int, bf16: bool, tmp_path: Path):
    variant = Variant(world_size=2, options=zero(stage), checkpoint={"family": "qwen2"}, spec={"bf16": bf16})
    with open_case(counting, DeepSpeedOptions(), variant, tmp_path) as case:
        plans = planned(case)
        group = case.start()
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        before = group.call(SuiteHost.ask, "held")
        group.optim_step()
        after = group.call(SuiteHost.ask, "held")
        assert [parameters for parameters, _, _ in before] == [plan.parameter_bytes for plan in plans]
        assert [gradients for _, gradients, _ in before] == [plan.gradient_bytes for plan in plans]
        assert [optimizer for _, _, optimizer in after] == [plan.optimizer_bytes for plan in plans]
        are_freed = [gradients == 0 for _, gradients, _ in after]
        assert are_freed == [plan.frees_gradients for plan in plans]


def planned(case: Case, world_size: int = 2, **changes: Any) -> tuple[RankPlan, ...]:
    spec = attrs.evolve(case.spec, **changes)
    return counting.plan(spec, world_size, micro_batch_tokens=64, num_micro_batches=1)


def test_the_plan_follows_the_options(tmp_path: Path):
    with open_case(counting, DeepSpeedOptions(), Variant(world_size=2, options=zero(3)), tmp_path) as case:

        def of(**settings: Any) -> RankPlan:
            return planned(case, options=DeepSpeedOptions(zero_optimization=ZeroOptimization(**settings)))[0]

        assert of(stage=3, reduce_bucket_size=1000).gathered_bytes < of(stage=3).gathered_bytes
        assert of(stage=2, overlap_comm=False).gathered_bytes < of(stage=2, overlap_comm=True).gathered_bytes
        assert of(stage=3).on_host == ()
        on_cpu = OffloadOptimizer(device="cpu")
        assert of(stage=2, offload_optimizer=on_cpu).on_host == ("gradients", "optimizer")
        everything = of(stage=3, offload_optimizer=on_cpu, offload_param=OffloadParam(device="cpu")).on_host
        assert everything == ("parameters", "gradients", "optimizer")
        reference = planned(case, optimizer=None)[0]
        assert (reference.gradient_bytes, reference.optimizer_bytes) == (0, 0)
        adapted = attrs.evolve(case.spec.model, lora=LoraConfig(rank=2))
        assert planned(case, model=adapted)[0].optimizer_bytes < planned(case)[0].optimizer_bytes / 4
        assert planned(case, optimizer=OptimizerConfig(), world_size=8)[0].num_parameters < of(stage=3).num_parameters
