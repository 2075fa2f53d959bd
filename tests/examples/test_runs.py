"""Whole runs with a real model and engine: from a configuration to the files that the run leaves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.config import Config, load
from rl_core.errors import ConfigError, DataError, GenerationError, NonFiniteError, PluginError
from rl_core.interfaces import TrajectoryStep
from rl_core.rank_kit.learning_rates import learning_rate
from rl_core.reports.jsonl import read_rows
from rl_core.reports.samples import read_samples
from rl_core.trainer.before.data import read_rows as read_data
from rl_core.trainer.run import run_evaluation, run_generation, run_training
from tests.examples.environments import PressesTheKey
from tests.examples.kept_samples import SAMPLES

BuildConfig = Callable[..., Config]


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return list(read_rows(run_dir / "metrics.jsonl"))


def test_a_run_writes_its_files(small_run: BuildConfig, tmp_path: Path):
    config = small_run(tmp_path / "run", trainer__log_sample_logprobs=True, trainer__logger=["console", "tensorboard"])
    summary = run_training(config)
    run_dir = tmp_path / "run"
    assert summary.steps == 6
    assert not summary.interrupted
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 3, 6]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [f"step_00000{n}" for n in (2, 4, 6)]
    assert load(str(run_dir / "config.yaml")).config == config
    assert "<svg" in (run_dir / "report.html").read_text()
    assert list((run_dir / "tensorboard").iterdir())
    samples = list(read_samples(run_dir))
    train = [sample for sample in samples if sample.purpose == "train"]
    assert len(train) == 6 * 8
    for sample in train:
        assert sample.rollout_logprobs
        assert sample.trainer_logprobs
        # The engine returns no log-probs of prompt tokens (0.0); the trainer scores them too.
        pairs = [pair for pair in zip(sample.rollout_logprobs[0], sample.trainer_logprobs[0], strict=True) if pair[0]]
        assert pairs
        assert [engine for engine, _ in pairs] == pytest.approx([trainer for _, trainer in pairs], abs=1e-4)
    AutoTokenizer.from_pretrained(run_dir / "model")
    AutoModelForCausalLM.from_pretrained(run_dir / "model")


def test_every_metric_of_a_run_is_documented(small_run: BuildConfig, tmp_path: Path):
    changes = {
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__critic_mini_batch_size": 4,
        "trainer__algorithm__use_kl_loss": True,
        "trainer__algorithm__zero_variance_filter": True,
        "generator__apply_overlong_filtering": True,
        "trainer__algorithm__off_policy_correction__tis_ratio_type": "token",
        "trainer__max_training_steps": 3,
    }
    run_training(small_run(tmp_path / "run", **changes))
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([^`]+)`", page)) | {"environment/accuracy"}
    documented |= {f"critic/{name}" for name in ("loss", "grad_norm", "learning_rate", "skipped_steps")}
    assert {name for row in rows_of(tmp_path / "run") for name in row} <= documented
    row = rows_of(tmp_path / "run")[1]
    assert row["rollout/sampled_tokens"] == pytest.approx(row["rollout/response_length"] * 32)
    assert row["rollout/tokens"] == row["rollout/sampled_tokens"] + 32 * 6


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_asynchronous_training_keeps_the_staleness_bound(small_run: BuildConfig, tmp_path: Path, max_staleness: int):
    run_training(small_run(tmp_path / "run", trainer__max_staleness=max_staleness, trainer__max_training_steps=8))
    rows = rows_of(tmp_path / "run")[1:]
    assert len(rows) == 8
    assert max(row["rollout/staleness_max"] for row in rows) <= max_staleness
    # Generation really runs ahead: the last step trains on groups that were started with older weights.
    assert rows[-1]["rollout/staleness_max"] >= 1
    # A step lacks this metric if all its tokens were sampled with earlier versions.
    differences = [row["rollout/logprob_diff_max"] for row in rows if "rollout/logprob_diff_max" in row]
    assert max(differences) < 1e-4


def test_the_kl_to_the_frozen_reference_grows(small_run: BuildConfig, tmp_path: Path):
    changes = {"trainer__algorithm__use_kl_loss": True, "trainer__algorithm__kl_loss_coef": 0.1}
    run_training(small_run(tmp_path / "run", **changes))
    rows = rows_of(tmp_path / "run")[1:]
    assert rows[0]["policy/kl"] < rows[-1]["policy/kl"]


def test_the_adaptive_coefficient_of_kl_in_the_reward_changes(small_run: BuildConfig, tmp_path: Path):
    changes = {
        "trainer__algorithm__use_kl_in_reward": True,
        "trainer__algorithm__kl_ctrl__type": "adaptive",
        "trainer__algorithm__kl_ctrl__horizon": 100,
        "trainer__algorithm__kl_estimator_type": "k1",
    }
    run_training(small_run(tmp_path / "run", **changes))
    coefficients = [row["policy/kl_coef"] for row in rows_of(tmp_path / "run")[1:]]
    assert coefficients[0] == pytest.approx(0.001)
    assert len(set(coefficients)) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__run_name": ""}, r"trainer\.run_name: got ''"),
        (
            {
                "trainer__algorithm__policy_loss_type": "rl_core.algorithms:dppo_loss",
                "trainer__algorithm__off_policy_correction__tis_ratio_type": "token",
            },
            r"off_policy_correction: the loss 'rl_core.algorithms:dppo_loss' corrects by itself",
        ),
    ],
)
def test_run_training_refuses_invalid_settings_before_creating_anything(
    small_run: BuildConfig, tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        run_training(small_run(tmp_path / "run", **changes))
    assert not list(tmp_path.iterdir())


def test_remax_scores_the_models_greedy_answer_to_every_prompt(small_run: BuildConfig, tmp_path: Path):
    """One sample per prompt. The greedy rewards equal those of transformers' own greedy search."""
    changes = {
        "trainer__algorithm__advantage_estimator": "remax",
        "generator__n_samples_per_prompt": 1,
        "trainer__max_training_steps": 1,
        "trainer__callbacks": "tests.examples.kept_samples:KeptSamples",
        "environment__env_class": "tests.examples.environments:Spelled",
    }
    config = small_run(tmp_path / "run", **changes)
    SAMPLES.clear()
    run_training(config)
    assert len(SAMPLES) == config.trainer.train_batch_size
    row = rows_of(tmp_path / "run")[-1]
    greedy = [sample.greedy_reward for sample in SAMPLES]
    assert len(set(greedy)) > 1
    assert greedy == [greedy_reward(config, sample.steps[0]) for sample in SAMPLES]
    assert row["rollout/greedy_reward"] == pytest.approx(sum(greedy) / len(greedy))
    assert row["rollout/greedy_tokens"] > 0
    assert row["rollout/sampled_tokens"] == sum(sum(sample.steps[0].sampled) for sample in SAMPLES)


def greedy_reward(config: Config, step: TrajectoryStep) -> float:
    """The reward (`Spelled`) of the start model's greedy answer to the prompt of `step`, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy_model_path)
    model = AutoModelForCausalLM.from_pretrained(config.policy_model_path, dtype=torch.float32)
    prompt = torch.tensor([list(step.tokens[: step.sampled.index(True)])])
    most = config.generator.sampling_params.max_generate_length
    answer = model.generate(prompt, do_sample=False, max_new_tokens=most, attention_mask=torch.ones_like(prompt))
    text = tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)
    return float(sum(map(ord, text)))


def test_dynamic_sampling_trains_on_full_batches_of_groups_with_a_signal(small_run: BuildConfig, tmp_path: Path):
    changes = {
        "trainer__algorithm__dynamic_sampling__type": "filter",
        "trainer__max_training_steps": 1,
        "trainer__train_batch_size": 2,
        "trainer__policy_mini_batch_size": 2,
        "trainer__callbacks": "tests.examples.kept_samples:KeptSamples",
    }
    SAMPLES.clear()
    run_training(small_run(tmp_path / "run", **changes))
    assert rows_of(tmp_path / "run")[-1]["rollout/dropped_zero_variance"] > 0
    assert len(SAMPLES) == 2 * 4
    rewards_of: dict[int, set[float]] = {}
    for sample in SAMPLES:
        rewards_of.setdefault(sample.group_id, set()).add(sample.reward)
    assert list(rewards_of.values()) == [{0.0, 1.0}, {0.0, 1.0}]


@pytest.mark.parametrize(
    ("environment", "failure"),
    [("Failing", "ConnectionError: the judge is gone"), ("Exits", "SystemExit: 0"), ("Cancels", "CancelledError: ")],
)
def test_failures_of_an_environment_are_counted_and_recorded_with_their_reasons(
    small_run: BuildConfig, tmp_path: Path, environment: str, failure: str
):
    changes = {
        "environment__env_class": f"tests.examples.environments:{environment}",
        "environment__options": {"fails": "odd"},
        "trainer__max_training_steps": 2,
        "trainer__max_failure_rate": 1.0,
        # With this seed, three of the first twelve groups fail. More than eight in a row would end the run.
        "trainer__seed": 3,
    }
    run_training(small_run(tmp_path / "run", **changes))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 0 < rows[0]["eval/failed"] < 40
    failed = [sample for sample in read_samples(tmp_path / "run") if sample.failure]
    place = re.escape(failure.strip()) + r" \(environments\.py:\d+\)$"
    assert all(re.search(place, sample.failure or "") for sample in failed)
    for purpose, name, file in (("train", "rollout/failed", "train.parquet"), ("eval", "eval/failed", "few.parquet")):
        found = [sample.failure or "" for sample in failed if sample.purpose == purpose]
        assert 0 < len(found) == sum(row.get(name, 0) for row in rows), "every failure must be in the rows of samples"
        assert len(found) == sum(row.get(f"{name}/{failure.split(':')[0]}", 0) for row in rows)
        assert all(file in text for text in found)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Failed samples" in page


def test_a_run_in_which_most_samples_fail_stops_with_a_checkpoint_and_says_why(
    small_run: BuildConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    changes = {
        "environment__env_class": "tests.examples.environments:FailsLater",
        "environment__options": {"after": 100},
        "trainer__eval_before_train": False,
        "trainer__eval_interval": -1,
    }
    message = r"\d+ of \d+ finished samples failed.*\(\d+ ConnectionError\), more than trainer\.max_failure_rate=0\.5"
    with pytest.raises(GenerationError, match=message):
        run_training(small_run(tmp_path / "run", **changes))
    assert "a sample failed: " in caplog.text
    last = rows_of(tmp_path / "run")[-1]["step"]
    assert last > 0
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:06d}").is_dir()
    assert len([sample for sample in read_samples(tmp_path / "run") if sample.failure]) > 16


def test_a_signal_is_answered_while_environments_block_in_an_evaluation(small_run: BuildConfig, tmp_path: Path):
    """Each environment would block for ten minutes, longer than a test may take."""
    changes = {
        "environment__env_class": "tests.examples.environments:PressesTheKey",
        "trainer__eval_before_train": True,
    }
    try:
        summary = run_training(small_run(tmp_path / "run", **changes))
    finally:
        PressesTheKey.released.set()
    assert summary.interrupted
    assert summary.steps == 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Failing", "groups in a row gave nothing to train on.*the judge is gone"),
        ("NotFinite", "groups in a row gave nothing to train on.*reward is nan"),
    ],
)
def test_a_run_in_which_every_rollout_fails_ends_with_the_reason(
    small_run: BuildConfig, tmp_path: Path, environment: str, message: str
):
    changes = {
        "environment__env_class": f"tests.examples.environments:{environment}",
        "environment__options": {"fails": "all"},
        "trainer__eval_before_train": False,
        "trainer__max_failure_rate": 1.0,
    }
    with pytest.raises(GenerationError, match=message):
        run_training(small_run(tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("reward", "the limit is 8 .one batch of trainer.train_batch_size.*reward is 1e.39, expected a finite number"),
        ("metric", "metric 'accuracy' is 'high', expected a finite number"),
        ("name", "metric 'reward' has a name that the trainer uses"),
        ("tuple", r"the environment's metrics have the name \('a', 1\); expected text as names"),
    ],
)
def test_rewards_and_metrics_that_cannot_be_used_are_failures_of_their_rollouts(
    small_run: BuildConfig, tmp_path: Path, odd: str, message: str
):
    changes = {
        "environment__env_class": "tests.examples.environments:OddNumbers",
        "environment__options": {"odd": odd},
        "trainer__eval_before_train": False,
        "trainer__max_failure_rate": 1.0,
    }
    with pytest.raises(GenerationError, match=message):
        run_training(small_run(tmp_path / "run", **changes))


@pytest.fixture
def unknown_environment(tmp_path: Path) -> dict[str, Any]:
    """Overrides for a run whose row names an environment that is not installed."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "12+34=", "answer": "640", "env_class": "arithmetik"}\n')
    return {
        "data__train_data": [str(data)],
        "data__val_data": [str(data)],
        "environment__env_class": None,
        "trainer__max_training_steps": 1,
    }


def test_a_row_of_an_unknown_environment_is_refused_before_anything_is_made(
    small_run: BuildConfig, tmp_path: Path, unknown_environment: dict[str, Any]
):
    with pytest.raises(PluginError, match=r"train\.jsonl:1: env_class: 'arithmetik' is not"):
        run_training(small_run(tmp_path / "run", **unknown_environment))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_row_of_an_unknown_environment_ends_the_run_with_a_plugin_error(
    small_run: BuildConfig, tmp_path: Path, unknown_environment: dict[str, Any], evaluates: bool
):
    """Before a run, rows' environments are checked only if `generator.type` is `environment`. Here it is a path."""
    changes = {
        **unknown_environment,
        "generator__type": "rl_rollout.generator_plugin:environment",
        "trainer__eval_before_train": evaluates,
    }
    with pytest.raises(PluginError, match=r"train\.jsonl:1: the row's env_class: 'arithmetik' is not"):
        run_training(small_run(tmp_path / "run", **changes))


def test_a_prompt_whose_message_has_no_content_is_named(small_run: BuildConfig, tmp_path: Path):
    """Reading the rows does not check the content of messages, and `gsm8k` returns them unchanged."""
    data = tmp_path / "train.jsonl"
    answer = {"ground_truth": "46"}
    rows = [
        {"prompt": "12+34=", "reward_spec": answer},
        {"prompt": [{"role": "user", "content": None}], "reward_spec": answer},
    ]
    data.write_text("\n\n".join(json.dumps(row) for row in rows))
    config = small_run(
        tmp_path / "run", data__train_data=[str(data)], data__val_data=[], environment__env_class="gsm8k"
    )
    with pytest.raises(DataError, match=r"train\.jsonl:3: 'prompt' must be text or a list of messages"):
        run_training(config)


@pytest.mark.parametrize("damage", ["cut off", "not weights"])
def test_a_damaged_model_file_is_named(small_run: BuildConfig, start: Path, tmp_path: Path, damage: str):
    shutil.copytree(start / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000] if damage == "cut off" else b"version https://git-lfs")
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path: .*model\.safetensors: the local engine"):
        run_training(small_run(tmp_path / "run", trainer__policy__model__path=str(tmp_path / "model")))


def test_gradients_that_are_not_finite_skip_the_step_and_then_stop_the_run(small_run: BuildConfig, tmp_path: Path):
    changes = {"trainer__algorithm__advantage_estimator": f"{__name__}:not_a_number"}
    with pytest.raises(NonFiniteError, match="3 optimizer steps of the policy in a row"):
        run_training(small_run(tmp_path / "run", **changes))
    rows = rows_of(tmp_path / "run")
    assert rows[1]["policy/skipped_steps"] == 1.0
    assert "policy/grad_norm" not in rows[1]


def not_a_number(scores_N: Any) -> Any:
    return scores_N * float("nan")


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_the_learning_rate_reaches_zero_after_the_last_step_if_long_prompts_are_left_out(
    small_run: BuildConfig, tmp_path: Path, scheduler: str
):
    rows = [{"prompt": "12+34=" * (1 + n % 2), "answer": "640", "env_class": "arithmetic"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data__train_data": [str(tmp_path / "train.jsonl")],
        "data__on_long_prompt": "drop",
        "trainer__max_prompt_length": 10,
        "trainer__max_training_steps": None,
        "trainer__epochs": 1,
        "trainer__train_batch_size": 1,
        "trainer__policy_mini_batch_size": 1,
        "trainer__policy__optimizer_config__scheduler": scheduler,
        "trainer__policy__optimizer_config__num_warmup_steps": 0,
    }
    config = small_run(tmp_path / "run", **changes)
    assert run_training(config).steps == 4
    rates = [row["policy/learning_rate"] for row in rows_of(tmp_path / "run")[1:]]
    optimizer = config.trainer.policy.optimizer_config
    assert rates == pytest.approx([learning_rate(step, optimizer, 4) for step in range(4)])
    assert learning_rate(4, optimizer, 4) == pytest.approx(0.0)


def test_rows_that_the_environment_refuses_are_left_out_if_configured(
    small_run: BuildConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    answers = ["640", "\\frac{1}{", "641", "12.", "\\{n^2 \\mid n>0\\}", "642", "643", "1/0"]
    rows = [{"prompt": "12+34=", "answer": answer} for answer in answers]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data__train_data": [str(tmp_path / "train.jsonl")],
        "data__val_data": [str(tmp_path / "train.jsonl")],
        "environment__env_class": "mathematics",
        "trainer__max_training_steps": None,
        "trainer__epochs": 1,
        "trainer__train_batch_size": 1,
        "trainer__policy_mini_batch_size": 1,
    }
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*data\.on_refused_row=drop leaves out all rows"):
        run_training(small_run(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
    config = small_run(tmp_path / "run", **changes, data__on_refused_row="drop")
    assert run_training(config).steps == 5
    said = [message for message in caplog.messages if "left out" in message]
    assert [message.partition(": the")[0] for message in said] == [
        f"data.{name}_data: left out 3 of 8 rows that the environment refuses; the first: {tmp_path}/train.jsonl:2"
        for name in ("train", "val")
    ]
    two_epochs = small_run(tmp_path / "run", **{**changes, "trainer__epochs": 2}, data__on_refused_row="drop")
    assert run_training(two_epochs).steps == 10  # resumes: the same rows are left out
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match=r"refuses all its rows; the first: .*:1: the reference answer"):
        run_training(small_run(tmp_path / "other", **{**changes, "data__val_data": []}, data__on_refused_row="drop"))


def test_evaluation_and_generation_play_the_configured_rows(small_run: BuildConfig, tmp_path: Path):
    config = small_run(tmp_path / "run")
    metrics = run_evaluation(config)
    assert metrics["eval/failed"] == 0.0
    assert 0.0 <= metrics["eval/accuracy"] <= 1.0
    output = tmp_path / "samples.jsonl"
    assert run_generation(config, output) == 40 * 4
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    with pytest.raises(DataError, match="already exists"):
        run_generation(config, output)
    assert run_generation(config, tmp_path / "few.jsonl", limit=3) == 3 * 4
    assert (tmp_path / "few.jsonl").read_text() == "".join(output.read_text().splitlines(keepends=True)[: 3 * 4])


def test_generation_in_which_every_sample_fails_writes_why(small_run: BuildConfig, tmp_path: Path):
    config = small_run(
        tmp_path / "run",
        trainer__max_failure_rate=1.0,
        environment__env_class="tests.examples.environments:Failing",
        environment__options={"fails": "all"},
    )
    with pytest.raises(GenerationError, match=r"all 8 samples failed; the first: .*the judge is gone.* has them all$"):
        run_generation(config, tmp_path / "samples.jsonl", limit=2)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["group"], row["sample"]) for row in rows] == [(n // 4, n % 4) for n in range(8)]
    assert all("ConnectionError: the judge is gone" in row["failure"] for row in rows)
    with pytest.raises(GenerationError, match="evaluation: all 40 samples failed"):
        run_evaluation(config)


def test_an_interrupted_generation_keeps_its_finished_samples(
    small_run: BuildConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data = small_run(tmp_path).data.val_data
    prompts = [row.row["prompt"] for row in read_data(data, key="data.val_data")]
    config = small_run(
        tmp_path / "run",
        trainer__eval_batch_size=1,
        environment__env_class="tests.examples.environments:Interrupting",
        environment__options={"prompt": prompts[2]},
    )
    with pytest.raises(KeyboardInterrupt):
        run_generation(config, tmp_path / "samples.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [(prompts[n // 4], n % 4) for n in range(8)]
    assert "samples.jsonl has the 8 finished samples" in caplog.text


def test_the_output_of_generation_is_created_before_anything_is_sampled(small_run: BuildConfig, tmp_path: Path):
    output = tmp_path / "samples.jsonl"
    config = small_run(
        tmp_path / "run",
        environment__env_class="tests.examples.environments:SeesFile",
        environment__options={"file": str(output)},
    )
    assert run_generation(config, output, limit=2) == 2 * 4
    assert {json.loads(line)["metrics"]["is_there"] for line in output.read_text().splitlines()} == {1.0}
    with pytest.raises(DataError, match=r"--output: /proc/samples\.jsonl cannot be created: .*Choose another file"):
        run_generation(config, Path("/proc/samples.jsonl"))
