"""`rl import-config` reads the bash of a script: variables, arrays, branches, commands; what it cannot, it lists."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_examples.importing.reading import read
from rl_examples.importing.shell import Shell, shown, unexpanded
from rl_examples.importing.translation import translate
from tests.carrying_over.commands import write, written


@pytest.mark.parametrize(("operator", "epochs"), [(":=", 4), ("=", None)])
def test_only_a_default_with_a_colon_replaces_an_empty_variable(
    operator: str, epochs: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EPOCHS", "")
    script = f': "${{EPOCHS{operator}4}}"\npython -m skyrl_train.main trainer.epochs=$EPOCHS trainer.seed=1\n'
    assert read(write(tmp_path, "run.sh", script)).values == {"trainer.epochs": epochs, "trainer.seed": 1}


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


def test_each_command_of_a_line_is_read_separately(tmp_path: Path):
    text = "python data.py a=1 b=2 && python -m skyrl.train.main trainer.epochs=2 trainer.seed=3 2>&1 | tee $LOG x=4\n"
    translation = translate(read(write(tmp_path, "run.sh", text)))
    assert (written(translation), translation.left) == ({"trainer.epochs": 2, "trainer.seed": 3}, ())


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
