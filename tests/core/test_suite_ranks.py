"""Ranks of the conformance suite that fail, die or hang: what the call raises, and which processes go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_core.batch import Batch
from rl_core.errors import CheckpointError, DeadlineError, WorkerError
from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_core.workers.rank import Part
from rl_transformers.testing import ranks
from rl_transformers.testing.backend import Variant, open_case
from rl_transformers.testing.cases import Case
from rl_transformers.testing.ranks import _shuffled
from tests.core.plain_backend import NoOptions, PlainBackend, PlainWorker


class Fails(PlainWorker):
    """Fails in `save_model` in the way that the folder's name says."""

    def save_model(self, directory):
        fault, ranks = directory.name.split("-")
        if ranks == "late" and self.rank.rank == 1:
            self.compute_for_a_second()
        if ranks in ("all", "late") or int(ranks) == self.rank.rank:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                self.sleep_in_a_named_function()
            raise CheckpointError("no room") if fault == "user" else ArithmeticError("made up")

    def sleep_in_a_named_function(self):
        time.sleep(600)

    def compute_for_a_second(self):
        begin = time.process_time()
        while time.process_time() - begin < 1.0:
            pass


class RefusesToStart(PlainWorker):
    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        if rank.rank == 1:
            raise ArithmeticError("made up")
        super().__init__(spec, rank)


@pytest.fixture
def case(tmp_path: Path):
    with open_case(PlainBackend(worker_class=Fails), NoOptions(), Variant(world_size=2), tmp_path) as case:
        yield case


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raise-1", WorkerError, "rank 1 of 2: ArithmeticError: made up"),
        ("raise-all", WorkerError, "rank 0 of 2: ArithmeticError: made up"),
        ("user-0", CheckpointError, "no room"),
        ("kill-1", WorkerError, "rank 1 of 2: its process ended with exit code -9"),
    ],
)
def test_a_rank_that_fails_ends_the_call_and_all_ranks(case: Case, fault: str, error: type[Exception], message: str):
    require_end_of_all_ranks(case, fault, error, message)


def test_a_rank_that_hangs_ends_the_call_and_all_ranks_and_shows_its_stack(tmp_path: Path):
    backend = PlainBackend(worker_class=Fails)
    with open_case(backend, NoOptions(), Variant(world_size=2), tmp_path, timeout_s=2.0) as case:
        require_end_of_all_ranks(case, "hang-1", DeadlineError, r"within 2 s: (.|\n)*sleep_in_a_named_function")


def require_end_of_all_ranks(case: Case, fault: str, error: type[Exception], message: str) -> None:
    group = case.start()
    pids = [process.pid for process in group.ranks._processes]
    with pytest.raises(error, match=message):
        group.call(Worker.save_model, case.directory / fault)
    assert group.ranks.has_ended
    assert ended(pids)
    with pytest.raises(WorkerError, match="have ended"):
        group.gradients()


@pytest.mark.parametrize("fault", ["user-all", "user-late"])
def test_a_mistake_that_all_ranks_find_leaves_them_running_until_the_case_ends(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """In the second case, a rank computes for longer than the suite waits for idle ranks."""
    monkeypatch.setattr(ranks, "_SETTLE_S", 0.5)
    with open_case(PlainBackend(worker_class=Fails), NoOptions(), Variant(world_size=2), tmp_path) as case:
        group = case.start()
        pids = [process.pid for process in group.ranks._processes]
        with pytest.raises(CheckpointError, match="no room"):
            group.call(Worker.save_model, case.directory / fault)
        assert not group.ranks.has_ended
        group.gradients()
        assert not ended(pids)
    assert ended(pids), "a process is left after the case"


def test_a_process_counts_as_working_if_one_thread_is_busy_but_not_if_many_threads_only_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock_s, run_ms, state = 0.0, dict.fromkeys(map(str, range(60)), 0.0), "S"
    monkeypatch.setattr(ranks.time, "monotonic", lambda: clock_s)
    activity = ranks._Activity(tmp_path)

    def has_worked(**busy_ms: float) -> bool:
        """Advances the clock by 0.1 s and returns whether the process worked in that time. Each thread is busy for 1 ms
        or for the milliseconds given."""
        nonlocal clock_s
        clock_s += 0.1
        for name in run_ms:
            run_ms[name] += busy_ms.get(f"thread_{name}", 1.0)
            (tmp_path / name).mkdir(exist_ok=True)
            waited_ms = run_ms[name] / 4
            (tmp_path / name / "schedstat").write_text(
                f"{int((run_ms[name] - waited_ms) * 1e6)} {int(waited_ms * 1e6)} 7\n"
            )
            (tmp_path / name / "stat").write_text(f"{name} (gloo (1)) {state} 1 1\n")
        return activity.has_worked()

    assert has_worked(), "the first look has nothing to compare with"
    assert not has_worked()
    assert has_worked(thread_7=11.0)
    assert not has_worked(thread_7=9.0)
    state = "D"
    assert has_worked(), "a thread waits for a disk"
    assert not ranks._Activity(tmp_path / "of a process that has ended").has_worked()


def test_a_rank_that_does_not_start_is_named(tmp_path: Path):
    backend = PlainBackend(worker_class=RefusesToStart)
    with (
        open_case(backend, NoOptions(), Variant(world_size=2), tmp_path) as case,
        pytest.raises(WorkerError, match="rank 1 of 2: ArithmeticError: made up"),
    ):
        case.start()


def test_the_suite_shuffles_a_ranks_sequences_and_plan_consistently():
    batch = Batch.from_sequences([{"tokens": [i] * (i + 1)} for i in range(6)])
    sequences = np.array([0, 2, 3, 5])
    shuffled = _shuffled(Part(sequences=sequences, sent=sequences, plan=((0, 1), (2, 3))))
    assert shuffled.sent.tolist() != sequences.tolist()
    computed = [sorted(int(shuffled.sent[i]) for i in micro_batch) for micro_batch in shuffled.plan]
    assert computed == [[0, 2], [3, 5]], "each micro-batch must keep its sequences"
    assert [i for micro_batch in shuffled.plan for i in micro_batch] != [0, 1, 2, 3]
    positions = batch.token_index(torch.from_numpy(shuffled.sequences))
    assert batch["tokens"][positions].tolist() == batch.select(torch.from_numpy(shuffled.sent))["tokens"].tolist()
