"""`rl plan` for sharded models, against ranks that ran: parameters exactly."""

from __future__ import annotations

import attrs
import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_core.testing.backend import PRELOADED
from rl_core.testing.cases import Variant, open_case
from rl_core.testing.rank_process import SuiteHost
from rl_fsdp import FsdpOptions, fsdp1
from rl_fsdp.backend import FsdpBackend

PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "tests.fsdp.test_plan"]))


@attrs.frozen(kw_only=True)
class CountingBackend(FsdpBackend):
    """Its ranks say how much they hold."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        from torch.distributed.tensor import DTensor

        from rl_fsdp.worker import FsdpWorker

        class CountingWorker(FsdpWorker):
            def num_parameters(self) -> int:
                parameters = self.scorer.parameters()
                return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)

        return CountingWorker(spec, rank, "fsdp2")


counting = CountingBackend()


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


def test_flat_parameters_are_not_planned(tmp_path):
    with (
        open_case(fsdp1, FsdpOptions(), Variant(), tmp_path) as case,
        pytest.raises(ConfigError, match="plan with fsdp"),
    ):
        fsdp1.plan(case.spec, 1, micro_batch_tokens=64, num_micro_batches=1)
