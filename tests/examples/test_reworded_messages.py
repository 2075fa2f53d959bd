"""No check depends on the wording of an error: with every message replaced by its hash, the same keys are reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.config import Config, dump_yaml, load
from rl_core.errors import ConfigErrors, Mistakes, RLError
from rl_core.trainer.before.preflight import preflight, prepare_playing

BuildConfig = Callable[..., Config]
WRONG = (
    "trainer.sede=1 trainer.epochs=0 trainer.strategy=3 generator.sampling_params.top_p=yes",
    "trainer.strategy=fspd trainer.policy.fsdp_config.fsdp_size=x generator.inference_engine.backend=lokal",
    "trainer.run_dir=${trainer.nothing}/x trainer.ckpt_path=${trainer.run_dir}/c",
    "generator.type=nothing trainer.algorithm.policy_loss_type=nothing generator.tensor_parallel_size=0",
    "generator.inference_engine.gpu_memory_utilization=2 generator.inference_engine.tensor_parallel_size=0",
    "trainer.policy_mini_batch_size=0 trainer.train_batch_size=0 trainer.max_staleness=-1 trainer.pipeline_depth=3",
    "trainer.algorithm.advantage_estimator=pass_at_k trainer.algorithm.advantage_params.k=0",
    "trainer.algorithm.policy_loss_params.no_such=1 trainer.algorithm.off_policy_correction.geo_mask_low=9",
    "trainer.policy.fsdp_config.fsdp_size=3 trainer.placement.policy_num_gpus_per_node=2 trainer.epochs=0",
    "trainer.strategy=megatron trainer.policy.megatron_config.tensor_model_parallel_size=0",
    "trainer.strategy=megatron trainer.policy.megatron_config.transformer_config_kwargs.fp8=e4m3",
    "trainer.strategy=deepspeed trainer.policy.deepspeed_config.zero_optimization.stage=2 "
    "trainer.policy.deepspeed_config.zero_optimization.offload_param.device=cpu",
    "environment.env_class=code environment.options.limits.cpu_s=0",
    "environment.env_class=gsm8k data.val_data=missing.parquet trainer.max_prompt_length=1",
    "trainer.policy.model.path=/missing/model trainer.policy.model.lora.rank=4 trainer.policy.model.lora.dropout=2",
    "trainer.resume_mode=from_path trainer.export_path=s3://bucket/model trainer.run_dir=/proc/x/y",
    "environment.reward_functions=[a.b:c] generator.n_samples_per_prompt=1 trainer.max_ckpts_to_keep=0",
)


def reported(check: Callable[[], object]) -> list[str | None]:
    """The keys of the errors that a check raises, in order."""
    try:
        check()
    except ConfigErrors as errors:
        return [error.key for error in errors.errors]
    except RLError as error:
        return [error.key]
    return []


def replace_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    initialise = RLError.__init__

    def hashed(self: RLError, text: object = "", *, key: str | None = None) -> None:
        initialise(self, hashlib.sha1(str(text).encode()).hexdigest(), key=key)

    monkeypatch.setattr(RLError, "__init__", hashed)


@pytest.mark.filterwarnings("ignore::rl_core.config.layers.ConfigWarning")
@pytest.mark.parametrize("wrong", WRONG)
def test_rewording_every_message_changes_no_reported_key(
    wrong: str, small_run: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(small_run(tmp_path / "run")))

    def checks() -> list[list[str | None]]:
        return [
            reported(lambda: preflight(load(str(file), wrong.split()))),
            reported(lambda: prepare_playing(load(str(file), wrong.split()), reads="data.val_data")),
        ]

    as_written = checks()
    replace_messages(monkeypatch)
    assert checks() == as_written
    assert set(as_written[0]) - {None}  # errors about rows have no key


def test_a_check_that_reads_a_message_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def keys() -> list[str | None]:
        mistakes = Mistakes()
        mistakes.add(RLError("trainer.epochs: got 0"))
        return reported(mistakes.raise_found) if any("epochs" in str(error) for error in mistakes.errors) else []

    as_written = keys()
    replace_messages(monkeypatch)
    assert keys() != as_written
