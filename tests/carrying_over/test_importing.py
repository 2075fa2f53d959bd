"""`rl import-config`: scripts and YAML files of other trainers become files for `rl train`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rl_core.config import from_mapping, load
from rl_core.config.resolving import value_at
from rl_core.errors import ConfigError
from rl_examples.importing.command import import_config
from rl_examples.importing.reading import read
from rl_examples.importing.shell import Shell, shown, unexpanded
from rl_examples.importing.translation import SKYRL_DEFAULTS, Translation, translate
from rl_examples.importing.verl_keys import KEYS, NO_EFFECT
from tests.carrying_over.commands import SCRIPT

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


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def written(translation: Translation) -> dict[str, Any]:
    """The translated values, without the keys of SKYRL_DEFAULTS."""
    return {key: value for key, value in translation.values.items() if key not in SKYRL_DEFAULTS}


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


@pytest.mark.parametrize(("operator", "epochs"), [(":=", 4), ("=", None)])
def test_only_a_default_with_a_colon_replaces_an_empty_variable(
    operator: str, epochs: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EPOCHS", "")
    script = f': "${{EPOCHS{operator}4}}"\npython -m skyrl_train.main trainer.epochs=$EPOCHS trainer.seed=1\n'
    assert read(write(tmp_path, "run.sh", script)).values == {"trainer.epochs": epochs, "trainer.seed": 1}


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


def test_keys_in_arrays_of_a_script_are_read(tmp_path: Path):
    text = """\
EPOCHS=3
DATA=(
    data.train_data="['/d/train.parquet']"  # the rows
    # trainer.epochs=99
    trainer.epochs=${EPOCHS}
)
MORE=(generator.n_samples_per_prompt=8)
MORE+=(trainer.seed=7 "${DATA[@]}")
python -m skyrl.train.main "${MORE[@]}" trainer.strategy=fsdp2 "$@"
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    assert written(translation) == {
        "generator.n_samples_per_prompt": 8,
        "trainer.seed": 7,
        "data.train_data": ["/d/train.parquet"],
        "trainer.epochs": 3,
        "trainer.strategy": "fsdp",
    }


@pytest.mark.parametrize(
    ("lines", "steps", "left"),
    [
        ('if [ "$QUICK" = 1 ]; then\n  ARGS+=(\n    trainer.max_training_steps=3\n  )\nfi', {"0": None, "1": 3}, []),
        ('[ "$QUICK" = 1 ] && ARGS+=(trainer.max_training_steps=$((1 + 2)))', {"0": 3}, ["ARGS"]),
        ("if [ -f x ]; then ARGS+=(trainer.max_training_steps=3); fi", {"0": 3}, ["ARGS"]),
    ],
)
def test_what_a_branch_appends_to_an_array_is_not_read_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, steps: dict[str, int | None], left: list[str]
):
    text = f"ARGS=(trainer.epochs=2 trainer.seed=1)\n{lines}\npython -m skyrl.train.main ${{ARGS[@]}}\n"
    for quick, expected in steps.items():
        monkeypatch.setenv("QUICK", quick)
        translation = translate(read(write(tmp_path, "run.sh", text)))
        assert (translation.values["trainer.epochs"], translation.values.get("trainer.max_training_steps")) == (
            2,
            expected,
        )
        assert [reason.partition(":")[0] for reason in translation.left] == left


def test_keys_after_a_value_that_only_bash_can_compute_are_read(tmp_path: Path):
    text = """\
N=$(nvidia-smi -L | wc -l)
python -m skyrl.train.main trainer.placement.policy_num_gpus_per_node=$N trainer.epochs=2 trainer.run_name=a`b | c` \\
  trainer.seed=3
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert written(translation) == {"trainer.epochs": 2, "trainer.seed": 3}
    assert translation.left == (
        "trainer.placement.policy_num_gpus_per_node=$(nvidia-smi -L | wc -l): $(nvidia-smi -L | wc -l) is not "
        "computed; write its value into the script",
        "trainer.run_name=a`b | c`: `b | c` is not computed; write its value into the script",
    )


@pytest.mark.parametrize("option", ["--wrap=", "--wrap "])
def test_the_command_of_a_batch_job_is_read(tmp_path: Path, option: str):
    text = f'sbatch -N 2 {option}"python -m skyrl.train.main trainer.epochs=2 trainer.seed=3"\n'
    assert written(translate(read(write(tmp_path, "run.sh", text)))) == {"trainer.epochs": 2, "trainer.seed": 3}


def test_bash_expansions_are_replaced_by_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/elsewhere/me")
    monkeypatch.setenv("SEED_OF_MINE", "11")
    text = """\
NODES=2
DATA_DIR="${DATA_DIR_OF_MINE:-$HOME/my data}"
TOTAL=$((NODES * 8)) # not SEED=99
python -m skyrl.train.main \\
  data.train_data="['$DATA_DIR/train.parquet']" \\
  trainer.train_batch_size=$(( (TOTAL + 16) * 4 )) \\
  trainer.policy_mini_batch_size=$(($TOTAL/3)) \\
  trainer.epochs=${EPOCHS_OF_MINE:-${NODES}} \\
  trainer.seed=$SEED_OF_MINE \\
  trainer.run_name='a b' # trainer.epochs=99
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    assert written(translation) == {
        "data.train_data": ["/elsewhere/me/my data/train.parquet"],
        "trainer.train_batch_size": 128,
        "trainer.policy_mini_batch_size": 5,
        "trainer.epochs": 2,
        "trainer.seed": 11,
        "trainer.run_name": "a b",
    }


def test_quotients_are_exact_and_rounded_towards_zero():
    assert Shell({}).text("$((-7/2)),$((-7%2)),$((9007199254740993/1))") == "-3,-1,9007199254740993"
    assert Shell({}).text(f"$(({10**400}/{10**399}))") == "10"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("${M//\\//_}", "a_b-c_d"),
        ("${M/\\//_}", "a_b-c/d"),
        ("${M//-/$SEP}", "a/b+c/d"),
        ("x_${M##*/}.y", "x_d.y"),
        ("${M##*:}", "a/b-c/d"),
        ("${M//[a-c]/_}", None),
        ("${M//#a/_}", None),
        ("${M##*[a]}", None),
        ("${UNSET_OF_MINE##*/}", None),
    ],
)
def test_replacements_of_fixed_text_are_evaluated(expression: str, result: str | None):
    value = Shell({"M": "a/b-c/d", "SEP": "+"}).text(expression)
    assert shown(value) == (expression if result is None else result)
    assert bool(unexpanded(value)) is (result is None)


def test_text_that_a_script_appends_to_a_variable_is_read(tmp_path: Path):
    text = """\
readonly SEED=1
typeset -i EPOCHS=2
ARGS="trainer.seed=$SEED trainer.epochs=$EPOCHS"
ARGS+=" trainer.train_batch_size=8"
NAME=run
export NAME+=_$SEED
python -m skyrl.train.main $ARGS trainer.run_name=$NAME trainer.project_name=${#NAME}
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert written(translation) == {
        "trainer.seed": 1,
        "trainer.epochs": 2,
        "trainer.train_batch_size": 8,
        "trainer.run_name": "run_1",
    }
    assert translation.left == (
        "trainer.project_name=${#NAME}: ${#NAME} is not computed; write its value into the script",
    )


def test_values_that_only_bash_can_compute_are_listed_and_not_loaded(tmp_path: Path):
    text = """\
RUN=run_$(date +%Y)
python -m skyrl.train.main trainer.epochs=2 trainer.run_name=$RUN trainer.seed=${A_B##*_} trainer.tags=[$((1/0))] \\
  $MORE_KEYS ~trainer.ref.fsdp_config --config-name=base trainer.project_name="\\${trainer.strategy}" "$@"
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert written(translation) == {"trainer.epochs": 2, "trainer.project_name": "${trainer.strategy}"}
    more, removed, file, name, seed, tags = translation.left
    assert more.startswith(
        "$MORE_KEYS has no value in the script or the environment; set it: MORE_KEYS=… rl import-config"
    )
    assert more.endswith("its keys are missing")
    assert removed.startswith("~trainer.ref.fsdp_config: a key cannot be removed here; it keeps its default")
    assert file.startswith("--config-name=base: names a file of Hydra's")
    assert name.startswith("trainer.run_name=run_$(date")
    assert seed.endswith("${A_B##*_} is not computed; write its value into the script")
    assert tags.startswith("trainer.tags=[$((1/0))]")


@pytest.mark.parametrize(
    "lines",
    [
        'if [ "$BIG" ]; then\n  EPOCHS=3\nfi',
        'if [ "$BIG" ]; then EPOCHS=3; fi',
        '[[ -n "$BIG" ]] && EPOCHS=3',
        "for EPOCHS in 3 4; do\n  EPOCHS=5\ndone",
        'case "$BIG" in yes) EPOCHS=3;; *) EPOCHS=5;; esac',
        'case "$BIG" in\n  yes) EPOCHS=3 ;;\n  *) EPOCHS=5 ;;\nesac',
    ],
)
def test_a_variable_set_in_a_branch_is_listed_for_checking(tmp_path: Path, lines: str):
    text = f"EPOCHS=2\nSEED=1\n{lines}\nSEED=4\npython -m skyrl.train.main trainer.epochs=$EPOCHS trainer.seed=$SEED\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    value = translation.values["trainer.epochs"]
    assert translation.left == (
        f"EPOCHS: is set in a branch or a loop, and '{value}' was used; check the keys that use EPOCHS",
    )


@pytest.mark.parametrize(
    "change",
    [
        "((EPOCHS++))",
        "let EPOCHS=EPOCHS*2",
        "((EPOCHS += 3, SEED = 9))",
        "read -r EPOCHS <<< 7",
        "printf -v EPOCHS %d 7",
        "IFS=, read -r A EPOCHS <<< 1,7",
        "true; ((EPOCHS = 7))",
    ],
)
def test_a_variable_that_bash_changes_otherwise_is_listed_and_not_used(tmp_path: Path, change: str):
    text = f"EPOCHS=2\nSEED=1\n{change}\nSEED=4\npython -m skyrl.train.main trainer.epochs=$EPOCHS trainer.seed=$SEED\n"
    used = subprocess.run(["bash", "-c", text.replace("python -m", "echo")], capture_output=True, text=True, check=True)
    assert "trainer.epochs=2" not in used.stdout
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert "trainer.epochs" not in translation.values
    assert translation.values["trainer.seed"] == 4
    (left,) = translation.left
    assert "is not computed; write its value into the script" in left


def test_a_variable_that_is_unset_has_no_value(tmp_path: Path):
    text = "EPOCHS=2\nunset EPOCHS\npython -m skyrl.train.main trainer.epochs=${EPOCHS:-5} trainer.seed=1\n"
    assert translate(read(write(tmp_path, "run.sh", text))).values["trainer.epochs"] == 5


def test_arguments_of_a_function_with_the_command_are_listed(tmp_path: Path):
    text = (
        'log() { echo "$1"; }\ntrain() {\n  python -m skyrl.train.main trainer.seed=1 trainer.epochs=${1:-2} "$@"\n}\n'
        "log begins\ntrain 3 trainer.project_name=x\n"
    )
    (left,) = translate(read(write(tmp_path, "run.sh", text))).left
    assert left.startswith("train 3 trainer.project_name=x: the arguments of the function train are not read")


def test_arguments_of_verls_chat_template_are_kept(tmp_path: Path):
    key = "data.apply_chat_template_kwargs.enable_thinking"
    text = f"python -m verl.trainer.main_ppo data.train_files=a.parquet +{key}=False\n"
    values = translate(read(write(tmp_path, "run.sh", text))).values
    assert values["generator.chat_template_kwargs.enable_thinking"] is False


BRANCHES = """\
: "${MODE:=slow}"
LEVEL=2
ARGS=""
if [ "$MODE" = "slow" ]; then # the default
  ARGS="trainer.epochs=3"
  if [[ "$LEVEL" -gt 1 ]]; then
    ARGS="$ARGS trainer.seed=5"
  fi
elif [ "$MODE" != quick ]
then
  ARGS="trainer.epochs=4"
  case "$MODE" in other) ;; esac
else
  ARGS="trainer.epochs=5"
  for LEVEL in 1 2; do
    ARGS=none; done
fi
if [ -z "$ARGS" ]; then
  python -m skyrl.train.main trainer.epochs=99 trainer.seed=99
fi
python -m skyrl.train.main $ARGS trainer.train_batch_size=8 trainer.policy_mini_batch_size=8
"""


@pytest.mark.parametrize(
    ("mode", "epochs", "seed"),
    [(None, 3, 5), ("slow", 3, 5), ("other", 4, None)],
)
def test_a_condition_whose_values_are_known_chooses_its_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, epochs: int, seed: int | None
):
    monkeypatch.delenv("MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("MODE", mode)
    translation = translate(read(write(tmp_path, "run.sh", BRANCHES)))
    assert translation.left == ()
    assert (translation.values["trainer.epochs"], translation.values.get("trainer.seed")) == (epochs, seed)


def test_a_loop_in_the_branch_that_runs_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODE", "quick")
    translation = translate(read(write(tmp_path, "run.sh", BRANCHES)))
    assert [reason.partition(":")[0] for reason in translation.left] == ["ARGS"]


@pytest.mark.parametrize("test", ["-f run.sh", '"$UNSET_OF_MINE" = a', "a -a b", '"$A" == a*', "$(date) = now"])
def test_a_condition_that_is_not_evaluated_lists_what_it_sets(tmp_path: Path, test: str):
    text = (
        f"A=a\nEPOCHS=2\nif [[ {test} ]]; then\n  EPOCHS=3\nelse\n  EPOCHS=4\nfi\n"
        "python -m skyrl.train.main trainer.epochs=$EPOCHS trainer.seed=1\n"
    )
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert [reason.partition(":")[0] for reason in translation.left] == ["EPOCHS"]
    assert translation.values["trainer.epochs"] == 4


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


def test_the_command_of_bash_c_is_read(tmp_path: Path):
    text = """\
EXTRA="trainer.seed=7 trainer.epochs=3"
srun bash -lc "python -m skyrl.train.main data.train_data=\\"['/d/my data/t.parquet']\\" $EXTRA"
"""
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == ()
    assert written(translation) == {
        "data.train_data": ["/d/my data/t.parquet"],
        "trainer.seed": 7,
        "trainer.epochs": 3,
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


def test_each_command_of_a_line_is_read_separately(tmp_path: Path):
    text = "python data.py a=1 b=2 && python -m skyrl.train.main trainer.epochs=2 trainer.seed=3 2>&1 | tee $LOG x=4\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert (written(translation), translation.left) == ({"trainer.epochs": 2, "trainer.seed": 3}, ())


def test_an_empty_mapping_removes_no_keys(tmp_path: Path):
    section = "trainer.policy.megatron_config.transformer_config_kwargs"
    text = f"python -m skyrl.train.main trainer.strategy=megatron {section}.recompute_granularity=full {section}={{}}\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert "recompute_granularity: full" in translation.as_yaml()


def test_a_single_key_is_read_unless_another_command_has_more_keys(tmp_path: Path):
    single = "uv run -m skyrl.train.main trainer.epochs=3; python report.py a.b=2\n"
    assert written(translate(read(write(tmp_path, "run.sh", single)))) == {"trainer.epochs": 3}
    several = f"{single}python -m skyrl.train.main trainer.epochs=4 trainer.run_name=last;\npython report.py a.b=2\n"
    several_values = written(translate(read(write(tmp_path, "run.sh", several))))
    assert several_values == {"trainer.epochs": 4, "trainer.run_name": "last"}


def test_a_key_with_spaces_around_its_equals_sign_is_listed(tmp_path: Path):
    text = "python -m skyrl.train.main trainer.seed=4 trainer.run_name=a --verbose trainer.epochs = 3\n"
    assert translate(read(write(tmp_path, "run.sh", text))).left == (
        "trainer.epochs = …: was not read; remove the spaces around =",
    )


def test_a_value_that_bash_would_split_is_listed(tmp_path: Path):
    text = 'OUT="/data/my dir"\npython main.py --verbose trainer.ckpt_path=$OUT/ckpts trainer.seed=4 > log.txt\n'
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert translation.left == (
        "dir/ckpts: is not key=value; if it belongs to 'trainer.ckpt_path=/data/my', put both in one pair of quotes",
    )


def test_multiline_text_is_not_reported_as_an_unreadable_command(tmp_path: Path):
    text = "echo 'one\ntwo'\npython main.py trainer.epochs=2 trainer.seed=4\n"
    assert translate(read(write(tmp_path, "run.sh", text))).left == ()


def test_an_unreadable_command_is_named_if_it_is_the_only_command(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"found neither\n.*'python main\.py a=\"1 b=2' cannot be read as a command"):
        read(write(tmp_path, "run.sh", 'python main.py a="1 b=2\n'))


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
