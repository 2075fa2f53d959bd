"""One rank on a thread of the controller's process, and what a worker group does before and after it calls a rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import attrs
import pytest
import torch

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError, DeadlineError, ForeignCodeError, PluginError, WorkerError
from rl_core.interfaces import Backend, LossSpec, ModelConfig, RankInfo, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.workers import MicroBatchLimits, WorkerGroup
from tests.core.idle_plugins import Worker


class RecordedWorker(Worker):
    """Returns the tokens as log-probs, or fails as `fault` says."""

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.may_end = threading.Event()
        self.threads = [threading.get_ident()]
        self.plan: Any = None
        self.columns: list[str] = []

    def forward(self, batch: Batch, plan: Any, *, temperature: float, returns: Any = None) -> dict[str, torch.Tensor]:
        self.threads.append(threading.get_ident())
        self.plan, self.columns = plan, list(batch)
        if self.fault == "raise":
            raise ValueError("told to fail")
        if self.fault == "timeout":
            raise TimeoutError("the worker's own")
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "user":
            raise CheckpointError("told to fail")
        if self.fault == "hang":
            self.may_end.wait()
        if self.fault == "nothing":
            return None  # pyright: ignore[reportReturnType]
        if self.fault == "short":
            return {"logprobs": batch["tokens"].float()[:1]}
        return {"logprobs": batch["tokens"].float()}

    def forward_backward(
        self, batch: Batch, plan: Any, loss: LossSpec, *, temperature: float, returns: Any = ()
    ) -> Any:
        if self.fault == "means":
            return {"loss": (1.0, 1.0), "ratio": 1.0}
        return {"ratio": (5.0, 5.0)}

    def optim_step(self, update: Any = None) -> Any:
        return 0.5

    def close(self) -> None:
        self.threads.append(threading.get_ident())


@attrs.frozen
class RecordedBackend(Backend):
    """A backend that always returns the same worker."""

    worker: RecordedWorker
    name: str = "recorded"
    config_section: str = ""
    options_class: type = object

    def mesh(self, options: Any, world_size: int) -> Mesh:
        return Mesh(world_size=world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def needs_own_process(self) -> bool:
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Any:
        return self.worker


SPEC = WorkerSpec(
    role="policy",
    model=ModelConfig(),
    optimizer=None,
    options=None,
    bf16=False,
    gradient_checkpointing=False,
    use_sample_packing=True,
    logprobs_chunk_size=1,
    total_optimizer_steps=None,
    seed=0,
)
BATCH = Batch.from_sequences([{"tokens": [1, 2], "rewards": [0.0, 0.0]}, {"tokens": [3, 4, 5], "rewards": [0.0] * 3}])
LIMITS = MicroBatchLimits(max_sequences=1)


async def forward(worker: RecordedWorker) -> dict[str, torch.Tensor]:
    group = await WorkerGroup.launch(RecordedBackend(worker), SPEC, timeout_s=200.0)
    try:
        return await group.forward(BATCH, LIMITS, temperature=1.0)
    finally:
        await group.close()
        await group.close()


async def test_all_calls_are_made_by_one_thread_other_than_the_controllers():
    worker = RecordedWorker()
    scores = await forward(worker)
    assert scores["logprobs"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(worker.threads) == 3
    assert len(set(worker.threads[1:])) == 1
    assert threading.get_ident() not in worker.threads[1:]


async def test_the_error_about_a_long_sequence_names_it_even_if_prefixes_are_shared():
    """Sequences 0 and 1 are one family, so sequence 2 is the second item of the plan."""
    tokens = ([1] * 50, [1] * 49 + [2], [3] * 60)
    batch = Batch.from_sequences([{"tokens": row, "rewards": [0.0] * len(row)} for row in tokens])
    spec = attrs.evolve(SPEC, share_prefixes=True)
    group = await WorkerGroup.launch(RecordedBackend(RecordedWorker()), spec, timeout_s=200.0)
    try:
        with pytest.raises(ConfigError, match=r"sequence 2 has 60 tokens, .* is 55; 1 of 3 sequences exceed it"):
            await group.forward(batch, MicroBatchLimits(max_tokens=55), temperature=1.0)
    finally:
        await group.close()


async def test_a_worker_gets_the_columns_it_reads_and_its_own_plan():
    worker = RecordedWorker()
    await forward(worker)
    assert worker.columns == ["tokens"]
    assert [list(micro_batch) for micro_batch in worker.plan] == [[0], [1]]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nothing", "forward of the backend 'recorded' returned NoneType on rank 0; expected a dict"),
        ("short", r"logprobs: a rank returned shape \[1\] for a part of 5 tokens; expected one entry per token"),
    ],
)
async def test_the_error_for_missing_or_short_scores_says_what_was_expected(fault: str, message: str):
    with pytest.raises(WorkerError, match=message):
        await forward(RecordedWorker(fault))


async def test_a_training_pass_without_loss_or_requested_scores_is_an_error():
    group = await WorkerGroup.launch(RecordedBackend(RecordedWorker()), SPEC, timeout_s=200.0)
    try:
        with pytest.raises(WorkerError, match="'recorded': no rank returned the metric 'loss'; expected"):
            await group.forward_backward(BATCH, LIMITS, LossSpec(name="reinforce"), temperature=1.0)
        message = r"returned \['ratio'\] on rank 0; expected a dict with logprobs from this rank"
        with pytest.raises(WorkerError, match=message):
            await group.forward_backward(
                BATCH, LIMITS, LossSpec(name="reinforce"), temperature=1.0, returns=("logprobs",)
            )
    finally:
        await group.close()


async def test_results_of_other_types_are_errors_that_name_the_expected_type():
    group = await WorkerGroup.launch(RecordedBackend(RecordedWorker("means")), SPEC, timeout_s=200.0)
    try:
        with pytest.raises(WorkerError, match=r"'recorded' returned 1.0 for the metric 'ratio'; expected a pair"):
            await group.forward_backward(BATCH, LIMITS, LossSpec(name="reinforce"), temperature=1.0)
        with pytest.raises(WorkerError, match=r"optim_step of .* returned float; expected an OptimizerStep"):
            await group.optim_step()
    finally:
        await group.close()


async def test_a_backend_that_creates_no_worker_is_an_error_that_names_it():
    backend: Any = RecordedBackend(cast(Any, None))
    with pytest.raises(PluginError, match="create_worker of the backend 'recorded' returned None; expected a worker"):
        await WorkerGroup.launch(backend, SPEC, timeout_s=200.0)


@pytest.mark.parametrize("fault", ["raise", "timeout"])
async def test_a_failure_names_rank_and_phase_and_keeps_its_cause(fault):
    with pytest.raises(WorkerError, match=r"policy rank 0 failed in forward: (ValueError|TimeoutError): ") as raised:
        await forward(RecordedWorker(fault))
    assert isinstance(raised.value.__cause__, ValueError | TimeoutError)


async def test_a_failure_names_the_line_that_failed():
    with pytest.raises(WorkerError, match=r"ValueError: told to fail \(test_workers_inline\.py:\d+\)$"):
        await forward(RecordedWorker("raise"))


async def test_an_exit_on_a_rank_is_an_error_that_names_the_rank():
    message = r"policy rank 0 in forward raised SystemExit\(0\) \(test_workers_inline\.py:"
    with pytest.raises(ForeignCodeError, match=message):
        await forward(RecordedWorker("exit"))


async def test_a_users_mistake_is_raised_unchanged():
    with pytest.raises(CheckpointError, match=r"^told to fail$"):
        await forward(RecordedWorker("user"))


async def test_a_worker_that_hangs_in_its_constructor_misses_the_start_deadline():
    @attrs.frozen
    class HangingBackend(RecordedBackend):
        def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Any:
            threading.Event().wait()

    launch = WorkerGroup.launch(HangingBackend(RecordedWorker()), SPEC, timeout_s=600, start_timeout_s=0.1)
    message = r"rank 0 did not finish start within 0\.1 s \(trainer\.worker_start_timeout_s\)"
    with pytest.raises(DeadlineError, match=message):
        await launch


@pytest.fixture
async def hanging() -> AsyncIterator[WorkerGroup]:
    """A group whose worker hangs in `forward` until the end of the test."""
    worker = RecordedWorker("hang")
    yield await WorkerGroup.launch(RecordedBackend(worker), SPEC, timeout_s=0.1, start_timeout_s=200.0)
    worker.may_end.set()


async def test_no_call_waits_for_a_rank_that_missed_its_deadline(hanging: WorkerGroup):
    with pytest.raises(DeadlineError, match=r"rank 0 did not finish forward within 0\.1 s"):
        await hanging.forward(BATCH, LIMITS, temperature=1.0)
    for _ in range(2):
        with pytest.raises(WorkerError, match="policy rank 0 cannot run optim_step: it is still busy with forward"):
            await hanging.optim_step()


async def test_closing_a_rank_that_missed_its_deadline_does_not_replace_the_error(hanging: WorkerGroup):
    with pytest.raises(DeadlineError, match="rank 0 did not finish forward"):
        await hanging.forward(BATCH, LIMITS, temperature=1.0)
    await hanging.close()
    with pytest.raises(WorkerError, match="policy rank 0 cannot run optim_step: it is closed"):
        await hanging.optim_step()


async def test_a_closed_rank_says_so():
    group = await WorkerGroup.launch(RecordedBackend(RecordedWorker()), SPEC)
    await group.close()
    with pytest.raises(WorkerError, match="policy rank 0 cannot run optim_step: it is closed"):
        await group.optim_step()


WITHOUT_RAY = """
import asyncio, sys
sys.modules["ray"] = None
from rl_core.errors import ConfigError
from rl_core.workers import WorkerGroup
from tests.core.test_workers_inline import SPEC, RecordedBackend, RecordedWorker
try:
    asyncio.run(WorkerGroup.launch(RecordedBackend(RecordedWorker()), SPEC, ranks_per_node=2))
except ConfigError as error:
    print(error)
"""


def test_the_error_for_several_ranks_without_ray_names_the_extra_to_install():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=250)
    assert "pip install './packages/rl-core[ray]' in a clone" in ran.stdout, ran.stderr


@pytest.mark.parametrize(("max_tokens", "num_shared", "num_apart"), [(192, 1, 8), (128, 2, 16)])
async def test_shared_prompt_tokens_count_once_in_the_token_budget(max_tokens, num_shared, num_apart):
    """A prompt of 64 tokens has 16 answers of 8 tokens: 192 tokens together, or 16 × 72 separately."""
    sequences = [[*range(64), *range(100 * i, 100 * i + 8)] for i in range(1, 17)]
    batch, counts = Batch.from_sequences([{"tokens": tokens} for tokens in sequences]), []
    for shares in (True, False):
        worker = RecordedWorker()
        group = await WorkerGroup.launch(RecordedBackend(worker), attrs.evolve(SPEC, share_prefixes=shares))
        scores = await group.forward(batch, MicroBatchLimits(max_tokens=max_tokens), temperature=1.0)
        await group.close()
        assert scores["logprobs"].tolist() == batch["tokens"].tolist()
        assert sorted(i for micro_batch in worker.plan for i in micro_batch) == list(range(16))
        counts.append(len(worker.plan))
    assert counts == [num_shared, num_apart]
