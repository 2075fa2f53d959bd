"""Runs whose training samples are truncated by top-p, top-k and min-p: the trainer scores every token in the
distribution from which the engine sampled it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from rl_core.batch import Batch
from rl_core.config import Config
from rl_core.errors import GenerationError
from rl_core.interfaces import RankInfo, WorkerSpec
from rl_core.reports.jsonl import read_rows
from rl_core.trainer.run import run_training
from rl_fsdp.backend import FsdpBackend
from rl_fsdp.worker import FsdpWorker
from rl_rollout.local.plugin import LocalEnginePlugin

BuildConfig = Callable[..., Config]
TRUNCATED = {
    "generator__sampling_params__top_p": 0.5,
    "generator__sampling_params__top_k": 5,
    "generator__sampling_params__min_p": 0.1,
    "trainer__max_training_steps": 3,
    "trainer__eval_interval": 3,
}


def differences(run_dir: Path) -> list[float]:
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    return [row["rollout/logprob_diff_max"] for row in rows if "rollout/logprob_diff_max" in row]


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__algorithm__use_kl_loss": True, "trainer__update_epochs_per_batch": 2},
        {"trainer__algorithm__advantage_estimator": "gae", "trainer__critic_mini_batch_size": 4},
        {"generator__sampling_params__temperature": 0.7, "trainer__share_prefixes": True},
        {"trainer__use_sample_packing": False, "trainer__algorithm__off_policy_correction__tis_ratio_type": "token"},
    ],
    ids=["reference", "critic", "temperature and shared prefixes", "padded rows and correction"],
)
def test_the_trainer_scores_the_distribution_that_was_sampled(small_run: BuildConfig, tmp_path: Path, changes):
    run_training(small_run(tmp_path / "run", **TRUNCATED, **changes))
    found = differences(tmp_path / "run")
    assert len(found) == 3
    assert max(found) <= 1e-4
    if "trainer__algorithm__use_kl_loss" in changes:
        # In the first step, policy and reference are the same model: their log-probs differ only if one of them ignores
        # what was kept.
        first = next(row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"] == 1)
        assert first["policy/kl"] < 1e-3


class ForgetfulWorker(FsdpWorker):
    """Scores and trains in the whole distribution."""

    def forward(self, batch: Batch, *args, **kwargs):
        return super().forward(batch.without_columns("kept_counts", "kept_ids"), *args, **kwargs)

    def forward_backward(self, batch: Batch, *args, **kwargs):
        return super().forward_backward(batch.without_columns("kept_counts", "kept_ids"), *args, **kwargs)


class ForgetfulBackend(FsdpBackend):
    def create_worker(self, spec: WorkerSpec, rank: RankInfo):
        return ForgetfulWorker(spec, rank, "fsdp2")


forgetful = ForgetfulBackend()


def test_without_the_kept_tokens_the_log_probs_would_differ_by_more_than_three_tenths(
    small_run: BuildConfig, tmp_path: Path
):
    run_training(small_run(tmp_path / "run", **TRUNCATED, trainer__strategy=f"{__name__}:forgetful"))
    assert min(differences(tmp_path / "run")) >= 0.3


def test_groups_that_a_resumed_run_continues_keep_their_tokens(small_run: BuildConfig, tmp_path: Path):
    """With `pipeline_depth`, a checkpoint has finished groups, which the resumed run trains on."""
    changes = {**TRUNCATED, "trainer__max_staleness": 1, "trainer__max_training_steps": 4}
    run_training(small_run(tmp_path / "run", **changes))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    assert (checkpoint / "finished_groups.json").is_file()
    resuming = {"trainer__resume_mode": "from_path", "trainer__resume_path": str(checkpoint)}
    run_training(small_run(tmp_path / "run", **changes, **resuming))
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows][-2:] == [3, 4]
    assert max(differences(tmp_path / "run")) <= 1e-4


class ForgetfulPlugin(LocalEnginePlugin):
    """Claims to return kept tokens, but never asks its engine for them."""

    async def create(self, spec):
        return await super().create(attrs.evolve(spec, return_kept_tokens=False))


forgetful_engine = ForgetfulPlugin()


def test_samples_that_lack_their_kept_tokens_are_never_trained_on(small_run: BuildConfig, tmp_path: Path):
    engine = f"{__name__}:forgetful_engine"
    with pytest.raises(GenerationError, match="the samples lack kept_tokens, without which the trainer cannot score"):
        run_training(small_run(tmp_path / "run", **TRUNCATED, generator__inference_engine__backend=engine))
