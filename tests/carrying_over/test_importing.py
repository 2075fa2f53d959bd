"""`rl import-config`: scripts and YAML files of other trainers become files for `rl train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_core.config import from_mapping, load
from rl_core.config.resolving import value_at
from rl_core.errors import ConfigError
from rl_examples.importing.command import import_config
from rl_examples.importing.reading import read
from rl_examples.importing.translation import Translation, translate
from rl_examples.importing.verl_keys import KEYS, NO_EFFECT
from tests.carrying_over.commands import SCRIPT, write, written

SKYRL = """\
#!/bin/bash
set -x
# a comment with key=value trainer.epochs=99
: "${DATA_DIR:="$HOME/data/gsm8k"}"
: "${NUM_GPUS:=4}"
: "${EPOCHS:=1}" # change to 20 for a full run
LOGGER=console  # default to "console"
INFERENCE_BACKEND="vllm"

uv run --isolated --extra $INFERENCE_BACKEND -m skyrl_train.entrypoints.main_base \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  trainer.algorithm.advantage_estimator="grpo" \\
  trainer.policy.model.path="org/model" \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  generator.num_inference_engines=$NUM_GPUS \\
  # generator.n_samples_per_prompt=77 \\
  generator.backend=$INFERENCE_BACKEND \\
  generator.weight_sync_backend=nccl \\
  generator.batched=true \\
  trainer.policy.optimizer_config.lr=1.0e-6 \\
  trainer.epochs=$EPOCHS \\
  trainer.recompute_old_logprobs_per_minibatch=true \\
  trainer.run_name="$RUN" \\
  trainer.logger="$LOGGER" \\
  $@
"""

VERL = """\
set -x
export VLLM_ATTENTION_BACKEND=XFORMERS
n=8

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files="['$HOME/data/gsm8k/test.parquet']" \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=org/model \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.clip_ratio=0.2 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=$n \\
    +actor_rollout_ref.rollout.repetition_penalty=1.05 \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console"]' \\
    trainer.project_name='examples' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""


def test_a_script_of_skyrl_becomes_a_file_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/elsewhere/me")
    monkeypatch.delenv("RUN", raising=False)
    file, output = write(tmp_path, "run.sh", SKYRL), tmp_path / "out" / "run.yaml"
    result = CliRunner().invoke(import_config, [str(file), "--output", str(output)])
    assert result.exception is None, result.output
    assert "generator.batched: has no effect and can be removed" in result.stderr
    assert "not translated   trainer.recompute_old_logprobs_per_minibatch: not supported" in result.stderr
    assert (
        "trainer.run_name=$RUN: $RUN has no value in the script or the environment; set it: RUN=… rl" in result.stderr
    )
    assert "# Not translated: trainer.recompute_old_logprobs_per_minibatch" in output.read_text()
    config = load(str(output)).config
    assert config.trainer.run_name == "run"
    assert config.data.train_data == ("/elsewhere/me/data/gsm8k/train.parquet",)
    assert config.trainer.placement.policy_num_gpus_per_node == 4
    engine = config.generator.inference_engine
    assert (engine.backend, engine.num_engines, engine.weight_sync_backend) == ("vllm", 4, "broadcast")
    assert (config.generator.n_samples_per_prompt, config.trainer.epochs) == (5, 1)
    again = CliRunner().invoke(import_config, [str(file), "--output", str(output)])
    assert "already exists" in str(again.exception)
    unread = CliRunner().invoke(import_config, [str(file), "--output", str(output.with_suffix(".txt"))])
    assert "expected a name that ends in .yaml" in str(unread.exception)
    assert not output.with_suffix(".txt").exists()
    unwritable = CliRunner().invoke(import_config, [str(file), "--output", str(file / "run.yaml")])
    assert "run.yaml cannot be written: File exists. Choose another file" in str(unwritable.exception)


def test_a_script_of_verl_becomes_a_file_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/elsewhere/me")
    translation = translate(read(write(tmp_path, "run.sh", VERL)))
    assert translation.dialect == "verl"
    config = load(str(write(tmp_path, "run.yaml", translation.as_yaml()))).config
    assert config.data.train_data == ("/elsewhere/me/data/gsm8k/train.parquet",)
    assert config.data.val_data == ("/elsewhere/me/data/gsm8k/test.parquet",)
    trainer, algorithm = config.trainer, config.trainer.algorithm
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.epochs) == (1024, 256, 15)
    assert (trainer.ckpt_interval, trainer.eval_interval) == (20, 5)
    assert trainer.policy.optimizer_config.lr == 1e-6
    assert (algorithm.use_kl_loss, algorithm.kl_estimator_type) == (True, "k3")
    assert (algorithm.eps_clip_low, algorithm.eps_clip_high) == (0.2, 0.2)
    assert config.data.on_long_prompt == "drop"
    assert config.generator.n_samples_per_prompt == 8
    assert config.generator.inference_engine.num_engines == 4
    left = "\n".join(translation.left)
    assert "repetition_penalty=1.05: no equivalent key" in left
    assert "reward: verl chooses a function by data_source" in left
    changed = "\n".join(translation.changed)
    assert "fsdp_config.param_offload: has no effect here" in changed


def test_the_package_comment_of_a_yaml_file_gives_the_section_of_its_keys(tmp_path: Path):
    policy = """\
# @package megatron_config.policy
tensor_model_parallel_size: 2
ddp_config:
  average_in_collective: true
"""
    translation = translate(read(write(tmp_path, "policy.yaml", policy)))
    assert translation.left == ()
    assert translation.values == {"trainer.policy.megatron_config.tensor_model_parallel_size": 2}
    assert any("average_in_collective: has no effect" in said for said in translation.changed)
    nested = "trainer:\n  strategy: fsdp2\n  run_name: ${oc.env:NAME}\ndefaults: [x]\n"
    translation = translate(read(write(tmp_path, "base.yaml", nested)))
    assert translation.values == {"trainer.strategy": "fsdp"}
    assert [reason.partition(":")[0] for reason in translation.left] == ["trainer.run_name", "defaults"]


VERL_NESTED = """\
data:
  train_files: /d/train.parquet
  train_batch_size: 64
actor_rollout_ref:
  model: {path: org/model}
  actor:
    ppo_mini_batch_size: 32
    optim: {lr: 1e-6}
  rollout: {n: 4, name: vllm, tensor_model_parallel_size: 2}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1, total_epochs: 3}
"""
VERL_DOTTED = """\
data.train_files: /d/train.parquet
data.train_batch_size: 64
actor_rollout_ref.model.path: org/model
actor_rollout_ref.actor.ppo_mini_batch_size: 32
actor_rollout_ref.actor.optim.lr: 1e-6
actor_rollout_ref.rollout.n: 4
actor_rollout_ref.rollout.name: vllm
actor_rollout_ref.rollout:
  tensor_model_parallel_size: 2
algorithm.adv_estimator: grpo
trainer: {n_gpus_per_node: 8, nnodes: 1}
trainer.total_epochs: 3
"""


@pytest.mark.parametrize("text", [VERL_NESTED, VERL_DOTTED], ids=["nested", "dotted keys"])
def test_a_yaml_file_of_verl_becomes_a_file_that_loads(tmp_path: Path, text: str):
    file, output = write(tmp_path, "verl.yaml", text), tmp_path / "ours.yaml"
    result = CliRunner().invoke(import_config, [str(file), "--output", str(output)])
    assert result.exception is None, result.output
    config = load(str(output)).config
    assert config.data.train_data == ("/d/train.parquet",)
    trainer, generator = config.trainer, config.generator
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size, trainer.epochs) == (64, 32, 3)
    assert (trainer.policy.model.path, trainer.policy.optimizer_config.lr) == ("org/model", 1e-6)
    assert (generator.n_samples_per_prompt, generator.inference_engine.num_engines) == (4, 4)
    assert "not translated   reward: verl chooses a function by data_source" in result.stderr


def of_verl(folder: Path, *keys: str) -> Translation:
    return translate(read(write(folder, "run.sh", f"python3 -m verl.trainer.main_ppo {' '.join(keys)}\n")))


def test_engines_of_verl_share_its_gpus(tmp_path: Path):
    axes = ("tensor_model", "pipeline_model", "data")
    sizes = [f"actor_rollout_ref.rollout.{axis}_parallel_size=2" for axis in axes]
    translation = of_verl(tmp_path, *sizes, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert translation.values["generator.inference_engine.num_engines"] == 2
    wrong = of_verl(tmp_path, sizes[0].replace("2", "0"), "trainer.n_gpus_per_node=8")
    assert "generator.inference_engine.num_engines" not in wrong.values
    assert any("tensor_parallel_size: got 0" in reason for reason in wrong.left)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_verls_threshold_limits_the_kind_of_ratio_that_is_used(tmp_path: Path, kind: str):
    correction = "algorithm.rollout_correction.rollout_is"
    values = of_verl(tmp_path, f"{correction}_threshold=3.0", f"{correction}={kind}").values
    ours = "trainer.algorithm.off_policy_correction."
    assert values == {f"{ours}tis_ratio_type": kind, f"{ours}{kind}_tis_ratio_clip_high": 3.0}


@pytest.mark.parametrize("is_in_reward", [False, True])
def test_neither_of_verls_two_kl_estimators_is_dropped_silently(tmp_path: Path, is_in_reward: bool):
    translation = of_verl(
        tmp_path,
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "algorithm.kl_penalty=kl",
        f"algorithm.use_kl_in_reward={is_in_reward}",
    )
    assert translation.values["trainer.algorithm.kl_estimator_type"] == "k3"
    unused = "algorithm.kl_penalty: has no effect without algorithm.use_kl_in_reward"
    conflicting = "algorithm.kl_penalty=kl: trainer.algorithm.kl_estimator_type is already k3, from another key of verl"
    assert (unused in translation.changed) is not is_in_reward
    assert (conflicting in translation.left) is is_in_reward


def test_every_key_of_a_documented_script_is_translated(tmp_path: Path):
    words = " \\\n  ".join(SCRIPT)
    file = write(
        tmp_path, "run.sh", f"DATA=/d\nMODEL=org/model\nuv run -m skyrl.train.entrypoints.main_base \\\n  {words}\n"
    )
    translation = translate(read(file))
    assert translation.left == ()
    assert load(str(write(tmp_path, "run.yaml", translation.as_yaml()))).config.trainer.train_batch_size == 1024


def test_an_unknown_key_is_listed_and_the_other_keys_load(tmp_path: Path):
    text = "python -m skyrl.train.main trainer.epochs=2 trainer.secret=3 generator.secret=3 trainer.seed=abc\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert written(translation) == {"trainer.epochs": 2}
    assert [reason.partition(":")[0] for reason in translation.left] == [
        "trainer.secret",
        "trainer.seed",
        "generator.secret",
    ]
    assert "(code" not in "".join(translation.left)


def test_an_environment_of_skyrl_gym_keeps_its_name_and_its_section(tmp_path: Path):
    text = (
        "python -m skyrl.train.main trainer.epochs=2 environment.env_class=text2sql "
        "environment.skyrl_gym.text2sql.db_path=/d/sql environment.skyrl_gym.max_env_workers=8\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    environment = load(str(write(tmp_path, "run.yaml", translation.as_yaml()))).config.environment
    assert environment.env_class == "skyrl_gym"
    assert environment.options == {"env": "text2sql", "config": {"db_path": "/d/sql"}, "max_turns": 1}
    assert any("text2sql is taken from skyrl-gym" in said for said in translation.changed)
    own = translate(read(write(tmp_path, "own.sh", text.replace("=text2sql ", "=mine.module:Mine "))))
    assert own.values["environment.env_class"] == "mine.module:Mine"


def test_an_environment_with_options_of_skyrl_gym_is_not_replaced_by_one_of_the_same_name(tmp_path: Path):
    """SkyRL passes `generator.max_turns` to the environment, whose own default for its number of turns differs."""
    text = (
        "python -m skyrl.train.main trainer.epochs=2 environment.env_class=search generator.max_turns=4 "
        "environment.skyrl_gym.search.topk=3 environment.skyrl_gym.search.search_url=http://localhost:8000/retrieve\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    environment = load(str(write(tmp_path, "run.yaml", translation.as_yaml()))).config.environment
    config = {"topk": 3, "search_url": "http://localhost:8000/retrieve"}
    assert (environment.env_class, environment.options) == (
        "skyrl_gym",
        {"env": "search", "config": config, "max_turns": 4},
    )
    here = translate(read(write(tmp_path, "here.sh", "python -m skyrl.train.main environment.env_class=gsm8k\n")))
    assert here.values["environment.env_class"] == "gsm8k"


@pytest.mark.parametrize(
    ("module", "keys", "values", "said"),
    [
        (
            "examples.train.async.main_async",
            "trainer.epochs=2",
            {"trainer.max_staleness": 1},
            "trainer.max_staleness=1: main_async generates one step ahead",
        ),
        (
            "examples.train.fully_async.main_fully_async",
            "trainer.fully_async.max_staleness_steps=2 trainer.fully_async.num_parallel_generation_workers=64 "
            "generator.n_samples_per_prompt=4",
            {"trainer.max_staleness": 2, "generator.max_concurrency": 256},
            "",
        ),
        (
            "skyrl.train.entrypoints.main_base",
            "trainer.fully_async.enabled=true trainer.fully_async.num_parallel_generation_workers=64",
            {"trainer.max_staleness": 4, "generator.max_concurrency": 320},
            "trainer.max_staleness=4: ",
        ),
        (
            "skyrl.train.entrypoints.main_base",
            "trainer.fully_async.enabled=false trainer.fully_async.num_parallel_generation_workers=64",
            {},
            "",
        ),
    ],
)
def test_a_script_of_an_asynchronous_trainer_stays_asynchronous(
    tmp_path: Path, module: str, keys: str, values: dict[str, Any], said: str
):
    text = f"python -m {module} {keys} trainer.seed=3\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    config = load(str(write(tmp_path, "run.yaml", translation.as_yaml()))).config
    assert {key: value_at(config, key) for key in values} == values
    assert ("trainer.max_staleness" in translation.values) is bool(values)
    assert said in "\n".join(translation.added)


def test_what_a_scripts_own_module_does_is_listed(tmp_path: Path):
    module = "examples.train.algorithms.dapo.main_dapo"
    translation = translate(read(write(tmp_path, "run.sh", f"uv run -m {module} trainer.epochs=2 trainer.seed=3\n")))
    assert len(translation.left) == 1
    assert translation.left[0].startswith(f"{module}: the code of this module is not translated")
    own = "python -m examples.train.algorithms.dapo.main_dapo_fully_async trainer.fully_async.max_staleness_steps=2\n"
    asynchronous = translate(read(write(tmp_path, "async.sh", own)))
    assert asynchronous.values["trainer.max_staleness"] == 2
    assert len(asynchronous.left) == 1
    generating = "python -m skyrl.train.entrypoints.main_generate trainer.epochs=2 trainer.seed=3\n"
    result = CliRunner().invoke(import_config, [str(write(tmp_path, "generate.sh", generating))])
    assert result.exit_code == 0
    assert "main_generate: only evaluates; the command here is rl eval" in result.stderr
    supervised = "python -m skyrl.train.main_sft strategy=fsdp num_steps=3\n"
    with pytest.raises(ConfigError, match=r"main_sft: .*docs/supervised\.md"):
        translate(read(write(tmp_path, "sft.sh", supervised)))


def test_a_slash_in_the_name_of_a_run_is_replaced(tmp_path: Path):
    text = (
        "M=org/model\npython -m skyrl.train.main trainer.epochs=2 trainer.run_name=gsm8k_$M trainer.ckpt_path=/d/$M\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.values["trainer.run_name"] == "gsm8k_org_model"
    assert translation.values["trainer.ckpt_path"] == "/d/org/model"
    assert "trainer.run_name: each / became _; here the name is also that of a directory" in translation.changed


def test_arguments_of_verls_chat_template_are_kept(tmp_path: Path):
    key = "data.apply_chat_template_kwargs.enable_thinking"
    text = f"python -m verl.trainer.main_ppo data.train_files=a.parquet +{key}=False\n"
    values = translate(read(write(tmp_path, "run.sh", text))).values
    assert values["generator.chat_template_kwargs.enable_thinking"] is False


def test_mappings_are_merged_and_need_no_space_after_a_colon(tmp_path: Path):
    section = "trainer.policy.megatron_config.transformer_config_kwargs"
    text = (
        f"python -m skyrl.train.main trainer.strategy=megatron {section}.recompute_granularity=full "
        f"'{section}={{recompute_num_layers: 1}}' generator.chat_template_kwargs={{thinking:false,word:'a:b'}}\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    assert written(translation) == {
        "trainer.strategy": "megatron",
        f"{section}.recompute_granularity": "full",
        f"{section}.recompute_num_layers": 1,
        "generator.chat_template_kwargs.thinking": False,
        "generator.chat_template_kwargs.word": "a:b",
    }


def test_a_script_of_skyrl_keeps_defaults_that_change_what_is_trained(tmp_path: Path):
    text = "python -m skyrl.train.main trainer.epochs=2 trainer.seed=3"
    result = CliRunner().invoke(import_config, [str(write(tmp_path, "run.sh", text))])
    assert (
        "added            trainer.algorithm.use_kl_loss=true: the script does not set it; this is SkyRL's"
        in result.stderr
    )
    assert result.exit_code == 0
    config = load(str(write(tmp_path, "run.yaml", result.stdout))).config
    assert config.trainer.algorithm.use_kl_loss
    assert config.generator.inference_engine.backend == "vllm"
    own = f"{text} trainer.algorithm.use_kl_loss=false generator.backend=local"
    translation = translate(read(write(tmp_path, "own.sh", own)))
    assert translation.added == ()
    assert translation.values["generator.inference_engine.backend"] == "local"


def test_an_empty_mapping_removes_no_keys(tmp_path: Path):
    section = "trainer.policy.megatron_config.transformer_config_kwargs"
    text = f"python -m skyrl.train.main trainer.strategy=megatron {section}.recompute_granularity=full {section}={{}}\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert "recompute_granularity: full" in translation.as_yaml()


def test_messages_about_keys_without_a_counterpart_name_the_alternative(tmp_path: Path):
    text = (
        "python -m skyrl.train.main trainer.epochs=2 trainer.fully_async.enabled=true "
        "trainer.fully_async.max_staleness_steps=2 trainer.fully_async.num_parallel_generation_workers=64 "
        "+trainer.algorithm.overlong_buffer.len=512 trainer.policy.use_torch_compile=true\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert written(translation) == {
        "trainer.epochs": 2,
        "trainer.max_staleness": 2,
        "generator.max_concurrency": 320,
    }
    (overlong,) = translation.left
    assert "overlong_buffer" in overlong
    assert "the recipe dapo" in overlong
    assert any("use_torch_compile: has no effect" in said for said in translation.changed)


@pytest.mark.parametrize(("name", "text"), [("run.sh", "echo hello\n"), ("empty.yaml", "{}\n"), ("list.yaml", "- a\n")])
def test_a_file_without_keys_says_what_is_expected(tmp_path: Path, name: str, text: str):
    with pytest.raises(ConfigError, match=r"found neither|holds `key: value` lines"):
        read(write(tmp_path, name, text))


def test_every_key_in_the_table_maps_to_an_existing_key():
    config = from_mapping({"generator.inference_engine.backend": "vllm", "trainer.strategy": "megatron"})
    plain = from_mapping({"generator.inference_engine.backend": "vllm"})
    for there, here in KEYS.items():
        if ".engine_init_kwargs." in here.key:
            continue
        section = here.key.partition("_config.")[0].rpartition(".")[2]
        tree = config if section == "megatron" else plain
        if section in ("megatron", "fsdp"):
            model, _, option = here.key.partition(f".{section}_config.")
            options = value_at(tree, model).options(f"{section}_config")
            assert hasattr(options, option), there
        else:
            value_at(tree, here.key)
    assert not KEYS.keys() & NO_EFFECT.keys()
