"""The command line: its output, its exit codes, and error messages without traceback for a user's mistakes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.cli import main
from rl_core.config import Config, from_mapping, load, resolving
from rl_core.errors import CheckpointError, ConfigError, DataError, DiskFullError, PluginError, RLError, WorkerError
from rl_core.trainer import run as trainer_run
from rl_core.trainer.state.checkpoint import RunState, begin_checkpoint, complete_checkpoint
from rl_core.trainer.state.run_directory import MARK, RunSummary, write_summary
from rl_core.trainer.state.run_lock import held_directories
from tests.core.conftest import Run
from tests.core.unwritable import KINDS, unwritable


def finish_with(monkeypatch: pytest.MonkeyPatch, result: RunSummary | BaseException) -> list[Config]:
    """Replaces training itself with a fake that returns or raises `result`; the checks and preparation before training
    stay. Returns the list of configurations that the fake receives."""
    seen: list[Config] = []

    async def train(config: Config, *_: object) -> RunSummary:
        seen.append(config)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(trainer_run, "_train", train)
    return seen


def play_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces sampling in `rl eval` and `rl generate` with fakes; the checks and preparation before sampling stay."""

    async def evaluate(config: Config) -> dict[str, float]:
        return {"eval/reward": 0.5}

    async def generate(config: Config, reads: str, output: Path, limit: int | None) -> int:
        output.write_text("")
        return limit or 3

    monkeypatch.setattr(trainer_run, "_evaluate", evaluate)
    monkeypatch.setattr(trainer_run, "_generate", generate)


def summary(*, interrupted: bool) -> RunSummary:
    return RunSummary(
        run_dir=Path("runs/run"),
        steps=7,
        interrupted=interrupted,
        accuracy_before=0.25,
        accuracy_after=0.9,
        rl_seconds=3.0,
        total_seconds=4.0,
        seed=0,
    )


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom rl_core.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'yaml', 'rich', 'attrs', 'rl_core.config', 'rl_core.plugins'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert all(command in done.stdout for command in ("train", "eval", "generate", "config", "plugins", "doctor"))


def test_a_current_directory_that_was_removed_is_an_error_without_traceback(tmp_path: Path):
    program = (
        "import os\nfrom rl_core.cli import main\n"
        f"os.chdir({str(tmp_path)!r})\nos.rmdir({str(tmp_path)!r})\nmain(['config', 'quickstart'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the current directory cannot be used: No such file or directory; change to another directory\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'RECIPE'"),
        (["trian"], "No such command 'trian'"),
        (["train", "nope"], "error: 'nope' is not among the installed recipes"),
        (["train", "smal"], "Did you mean 'small'?"),
        (["train", "nope.yaml"], "error: nope.yaml: cannot be read"),
        (["train", "trainer.epochs=2"], "got 'trainer.epochs=2' where a recipe is expected"),
        (
            ["train", "small", "trainer.epoch=2"],
            "error: trainer.epoch: unknown key (command line). Did you mean trainer.epochs?",
        ),
        (["train", "small", "trainer.policy_mini_batch_size=3"], "3 does not divide trainer.train_batch_size=4"),
        (["train", "small", "--tiny"], "has no tiny variant; remove --tiny"),
        (["train", "small", "--trainer.seed=1"], "A configuration key has no dashes: write trainer.seed=value"),
        (["train", "small", "trainer.seed", "=", "1"], "key.path=value without spaces"),
        (["train", "cli_recipes:unprepared"], "error: data.train_data: the file train.jsonl does not exist"),
        (
            ["train", "small", "trainer.policy.slim_config.width=13"],
            "error: trainer.policy.slim_config.width: 13 does not fit",
        ),
        (["generate", "small"], "Missing option '--output'"),
        (["train", "json:loads"], "error: 'json:loads' is not a recipe: it is the function loads. Expected a"),
        (["train", "site"], "error: site: is a directory; use a recipe's name, a .yaml file or package.module:recipe"),
        (["train", "site/cli_recipes.py"], "is a file whose name does not end in .yaml"),
        (
            ["train", "small", "trainer.callbacks=[json:dumps]"],
            "trainer.callbacks: 'json:dumps' is not a callback: it",
        ),
        (["train", "small", "trainer.callbacks=[cli_recipes:WantsArguments]"], "missing a required argument: 'folder'"),
        (["train", "small", "--dry-run", "trainer.run_name="], "error: trainer.run_name: got ''; expected a name"),
        (["eval", "small", "trainer.run_name=../x"], "error: trainer.run_name: got '../x'; expected a name"),
        (
            [
                *("train", "small", "--dry-run", "trainer.algorithm.policy_loss_type=dppo"),
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            ],
            "error: trainer.algorithm.off_policy_correction: the loss 'dppo' corrects by itself, so it cannot use a",
        ),
        (["eval", "small", "data.val_data=[]"], "error: data.val_data: got no file; set e.g. data.val_data="),
    ],
)
def test_a_users_mistake_exits_with_2_and_an_error_message(rl: Run, arguments: list[str], message: str):
    code, out, err = rl(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("given", ["math:sqrt", "math:pi", "os:path", "builtins:max", "pathlib:Path", "json:nope"])
@pytest.mark.parametrize(
    "key",
    [
        "trainer.strategy",
        "trainer.algorithm.policy_loss_type",
        "trainer.algorithm.advantage_estimator",
        "trainer.logger",
        "trainer.callbacks",
        "generator.type",
        "generator.inference_engine.backend",
        "generator.inference_engine.weight_sync_backend",
        "trainer.ref.inference_backend",
        "environment.env_class",
    ],
)
def test_the_dry_run_reports_a_wrong_object_for_a_plug_in_key(rl: Run, key: str, given: str):
    value = f"[{given}]" if key == "trainer.callbacks" else given
    code, out, err = rl("train", "small", f"{key}={value}", "--dry-run")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {key}: {given!r}")
    assert "Expected" in err or "has no 'nope'" in err
    assert err.count("\n") == 1, "there must be one message and no traceback"


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (
            "math:sqrt",
            "'math:sqrt' is not a recipe: it is the function sqrt. Expected a Recipe (rl_core.interf",
        ),
        ("os:getcwd", "os:getcwd: the function returned str; expected a Recipe"),
        (
            "cli_recipes:prepared_by_a_number",
            "the recipe's `prepare`: 'math:pi' is not a function that prepares",
        ),
        (
            "cli_recipes:prepared_by_nothing",
            "the recipe's `prepare`: 'cli_recipes:nothing': cli_recipes has no",
        ),
    ],
)
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["eval"]], ids=["dry run", "eval"])
def test_a_wrong_recipe_or_a_wrong_prepare_function_is_one_error(
    rl: Run, command: list[str], recipe: str, problem: str
):
    code, out, err = rl(*command, recipe)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {problem}")
    assert err.count("\n") == 1, "there must be one message and no traceback"


REFUSED = {
    "unknown key": ["trainer.sead=1"],
    "wrong type": ["trainer.epochs=lots"],
    "wrong backend": ["trainer.strategy=slimm"],
    "three at once": ["trainer.sead=1", "trainer.epochs=lots", "trainer.strategy=slimm"],
    "run name": ["trainer.run_name=a/b"],
    "out of bounds": ["trainer.seed=-1"],
    "combination": ["trainer.policy_mini_batch_size=3"],
    "missing file": ["data.train_data=[mine.jsonl]"],
    "missing model": ["trainer.policy.model.path=./mine"],
    "run directory": ["trainer.run_dir=site/cli_recipes.py/run"],
    "engine": ["generator.inference_engine.backend=vlm"],
    "generator": ["generator.type=mine"],
    "environment": ["environment.env_class=mine"],
    "transport": ["generator.inference_engine.weight_sync_backend=mine"],
    "tracker": ["trainer.logger=mine"],
    "loss": ["trainer.algorithm.policy_loss_type=mine"],
    "estimator": ["trainer.algorithm.advantage_estimator=mine"],
    "estimator of greedy answers": [
        "trainer.algorithm.advantage_estimator=remax",
        "trainer.algorithm.zero_variance_filter=true",
    ],
    "setting of the loss": ["trainer.algorithm.policy_loss_params.sharpness=1"],
    "correction": [
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.algorithm.policy_loss_type=cross_entropy",
    ],
    "routes": ["generator.inference_engine.enable_return_routed_experts=true"],
    "callback": ["trainer.callbacks=[json:dumps]"],
    "callback with arguments": ["trainer.callbacks=[cli_recipes:WantsArguments]"],
    "callback that is not there": ["trainer.callbacks=[no_module:Class]"],
    "row without prompt": ["data.val_data=[no_prompt.jsonl]"],
    "environment of a row": ["generator.type=environment", "data.train_data=[rows.jsonl]"],
    "too few rows": ["data.train_data=[rows.jsonl]", "trainer.epochs=1"],
    "what the backend refuses": ["trainer.policy.slim_config.width=13"],
    "independent ones": [
        *("trainer.seed=-1", "data.train_data=[mine.jsonl]", "generator.inference_engine.backend=vlm"),
        *("trainer.logger=[mine, other]", "trainer.callbacks=[json:dumps]", "trainer.policy.slim_config.width=13"),
    ],
}
"""Kind of mistake → overrides of the recipe `small` that contain it."""


@pytest.mark.parametrize("overrides", REFUSED.values(), ids=REFUSED)
def test_run_training_raises_the_error_that_rl_train_prints(rl: Run, overrides: list[str]):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "env_class": "arithmetik"}\n')
    Path("no_prompt.jsonl").write_text('{"question": "1+1="}\n')
    code, out, err = rl("train", "small", *overrides)
    assert (code, out) == (2, "")
    assert rl("train", "small", "--dry-run", *overrides) == (2, "", err)
    with pytest.raises(RLError) as refused:
        trainer_run.run_training(load("small", overrides))
    assert f"error: {refused.value}\n" == err
    assert not {"prepared", "runs"} & {path.name for path in Path().iterdir()}


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.run_name=a/b"],
        ["trainer.seed=-1", "generator.type=mine", "trainer.policy.model.path=./mine"],
        ["generator.inference_engine.backend=vlm", "data.val_data=[mine.jsonl]"],
        ["generator.type=environment", "data.val_data=[rows.jsonl]"],
    ],
)
def test_run_evaluation_and_run_generation_raise_the_errors_that_rl_eval_and_rl_generate_print(
    rl: Run, overrides: list[str]
):
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "env_class": "arithmetik"}\n')
    loaded, output = load("small", overrides), Path("new/samples.jsonl")
    with pytest.raises(RLError) as refused:
        trainer_run.run_evaluation(loaded)
    assert rl("eval", "small", *overrides) == (2, "", f"error: {refused.value}\n")
    with pytest.raises(RLError) as refused:
        trainer_run.run_generation(loaded, output)
    assert rl("generate", "small", *overrides, "--output", str(output)) == (2, "", f"error: {refused.value}\n")
    assert not {"prepared", "new"} & {path.name for path in Path().iterdir()}


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"]], ids=["train", "dry run"])
def test_a_wrong_key_a_wrong_type_and_missing_plug_ins_are_reported_at_once(rl: Run, command: list[str]):
    plugins = ["trainer.strategy=fspd", "trainer.callbacks=[clip]", "trainer.ref.inference_backend=vlm"]
    code, out, err = rl(*command, "small", "trainer.sead=1", "trainer.epochs=lots", *plugins)
    assert (code, out) == (2, "")
    first, *lines = err.splitlines()
    assert first == "error: 5 mistakes:"
    assert lines[0] == "  1. trainer.epochs: got 'lots' (str, command line); expected int."
    assert lines[1] == "  2. trainer.sead: unknown key (command line). Did you mean trainer.seed?"
    assert lines[2].startswith("  3. trainer.strategy: 'fspd' is not among the installed training backends")
    assert lines[3].startswith("  4. trainer.ref.inference_backend: 'vlm' is not among the installed")
    assert lines[4].startswith("  5. trainer.callbacks: 'clip' is not among the installed")
    assert len(lines) == 5


def test_independent_mistakes_are_reported_together(rl: Run):
    err = rl("train", "small", *REFUSED["independent ones"])[2]
    keys = [line.partition(". ")[2].partition(":")[0] for line in err.splitlines()[1:]]
    assert keys == [
        "trainer.seed",
        "data.train_data",
        "generator.inference_engine.backend",
        "trainer.logger",
        "trainer.logger",
        "trainer.callbacks",
        "trainer.policy.slim_config.width",
    ]


def test_a_missing_model_is_reported_with_the_other_mistakes(rl: Run):
    err = rl("train", "small", "trainer.policy.model.path=null", "data.train_data=nowhere.jsonl", "--dry-run")[2]
    assert "data.train_data: the file nowhere.jsonl does not exist" in err
    assert "trainer.policy.model.path: got no model; set it to a Hugging Face model directory or name" in err


def test_run_training_creates_missing_files_only_if_it_gets_the_recipe(rl: Run, monkeypatch: pytest.MonkeyPatch):
    seen = finish_with(monkeypatch, summary(interrupted=False))
    loaded = load("small")
    with pytest.raises(ConfigError, match=r"data\.train_data: the file train\.jsonl does not exist"):
        trainer_run.run_training(loaded.config)
    assert not Path("prepared").exists()
    trainer_run.run_training(loaded)
    assert Path("prepared").exists()
    assert seen == [loaded.config]


def test_files_that_the_recipe_created_are_checked_like_existing_files(rl: Run):
    code, _, err = rl("train", "small", "generator.type=environment", "trainer.train_batch_size=400")
    assert Path("prepared").exists()
    assert code == 2
    assert "train.jsonl:1: the row has no 'env_class' and environment.env_class is not set" in err
    assert "data.train_data: 4 epochs of 3 rows do not fill one batch of 400 prompts" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("row 3"), 2), (PluginError("x"), 2), (WorkerError("rank 0"), 1), (CheckpointError("y"), 1)],
)
def test_an_error_of_the_run_decides_the_exit_code(rl: Run, monkeypatch: pytest.MonkeyPatch, error: RLError, code: int):
    finish_with(monkeypatch, error)
    assert rl("train", "small")[::2] == (code, f"error: {error}\n")


def test_the_traceback_is_shown_on_request(rl: Run, monkeypatch: pytest.MonkeyPatch):
    finish_with(monkeypatch, WorkerError("rank 0"))
    code, _, err = rl("train", "small", "--traceback")
    assert code == 1
    assert "Traceback" in err
    monkeypatch.setenv("RL_DEBUG", "1")
    assert "Traceback" in rl("train", "small")[2]


def test_a_bug_is_not_reported_as_a_users_mistake(rl: Run, monkeypatch: pytest.MonkeyPatch):
    finish_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train", "small"])


def test_training_creates_missing_files_then_runs_and_prints_the_results(rl: Run, monkeypatch: pytest.MonkeyPatch):
    seen = finish_with(monkeypatch, summary(interrupted=False))
    code, out, _ = rl("train", "small", "trainer.seed=9")
    assert code == 0
    assert Path("train.jsonl").exists()
    assert [config.trainer.seed for config in seen] == [9]
    first = "7 steps done; this command took 4 s (3 s of training and evaluation)\n"
    assert out == first + "held-out accuracy 0.250 → 0.900\nreport: runs/run/report.html\n"


def test_the_results_of_a_run_without_accuracy_are_called_reward(
    rl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    rows = [{"step": 0, "eval/reward": 1.5}, {"step": 7, "eval/reward": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish_with(monkeypatch, write_summary(tmp_path, interrupted=False, total_seconds=4.0, seed=0))
    assert "held-out reward 1.500 → 2.000\n" in rl("train", "small")[1]
    assert json.loads((tmp_path / "summary.json").read_text())["measure"] == "reward"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ending", "code"), [("whole", 0), ("interrupted", 130), ("failed", 1)])
def test_a_run_whose_output_cannot_be_written_goes_on_and_exits_as_usual(
    rl: Run, monkeypatch: pytest.MonkeyPatch, kind: str, ending: str, code: int
):
    async def train(*_: object) -> RunSummary:
        logging.getLogger("rl_core").warning("stopping at the next step boundary")
        if ending == "failed":
            raise WorkerError("rank 0")
        return summary(interrupted=ending == "interrupted")

    monkeypatch.setattr(trainer_run, "_train", train)
    with unwritable(kind) as out, unwritable(kind) as err, monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", out)
        streams.setattr(sys, "stderr", err)
        assert rl("train", "small") == (code, "", "")
        # The interpreter flushes these streams when it ends, and exits with 120 if that fails.
        out.flush()
        err.flush()


@pytest.mark.parametrize("ending", ["after a step", "at once"])
def test_an_interrupted_run_exits_with_130_and_prints_the_command_that_resumes_it(
    rl: Run, monkeypatch: pytest.MonkeyPatch, ending: str
):
    finish_with(monkeypatch, summary(interrupted=True) if ending == "after a step" else KeyboardInterrupt())

    def interrupted() -> str:
        code, _, err = rl("train", "small", "trainer.run_dir=my run")
        assert code == 130
        assert "Traceback" not in err
        return err

    assert "nothing was written; to start again, run the same command" in interrupted()
    Path("my run").mkdir()
    Path("my run", MARK).touch()
    Path("my run/config.yaml").touch()
    assert "no checkpoint yet; to start again:\n  rl train 'my run/config.yaml'\n" in interrupted()
    state = RunState(step=7, next_group=1, restart_groups=(), kl_coef=0.0, nonfinite_steps=0)
    complete_checkpoint(begin_checkpoint(Path("my run/checkpoints"), state))
    going_on = "to resume from step_000007:\n  rl train 'my run/config.yaml' trainer.resume_mode=latest\n"
    assert going_on in interrupted()
    finish_with(monkeypatch, WorkerError("rank 0"))
    assert rl("train", "small", "trainer.run_dir=my run")[::2] == (1, f"error: rank 0\n{going_on}")
    finish_with(monkeypatch, CheckpointError("step_000007: damaged"))
    assert going_on not in rl("train", "small", "trainer.run_dir=my run")[2]
    finish_with(monkeypatch, DiskFullError("disk full"))
    assert rl("train", "small", "trainer.run_dir=my run")[::2] == (1, f"error: disk full\n{going_on}")


def test_a_config_file_below_a_directory_with_an_equals_sign_in_its_name_is_loaded(rl: Run):
    config = Path("runs/lr=1e-6/config.yaml")
    config.parent.mkdir(parents=True)
    config.write_text(rl("config", "small", "--yaml", "trainer.seed=9")[1])
    assert ["trainer.seed", "9"] in [line.split()[:2] for line in rl("config", str(config))[1].splitlines()]


def test_a_key_given_twice_is_one_warning_line(rl: Run):
    code, out, err = rl("config", "small", "trainer.seed=1", "trainer.seed=2")
    assert code == 0
    assert err == "warning: trainer.seed: set twice (command line): 1, then 2; the last one is used\n"
    assert "trainer.seed  " in out


def test_a_warning_that_several_keys_cause_is_shown_once(rl: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(resolving._SECTION_PACKAGES, "absent_config", "rl-absent")
    keys = [f"trainer.{model}.absent_config.a=1" for model in ("policy", "ref", "critic")]
    code, _, err = rl("config", "small", *keys)
    assert code == 0
    assert err.splitlines() == [
        "warning: absent_config: kept unchecked; its backend comes with rl-absent, which is not installed",
        f"warning: {', '.join(key.removesuffix('=1') for key in keys)}: without effect: "
        "trainer.strategy=slim reads only slim_config",
    ]


def test_a_character_that_the_terminal_cannot_show_does_not_end_a_command(
    rl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    finish_with(monkeypatch, summary(interrupted=False))
    shown = tmp_path / "shown"
    for arguments in (["train", "small"], ["config", "small", "--yaml", "trainer.tags=[日本]"]):
        with shown.open("w", encoding="latin-1") as out, monkeypatch.context() as streams:
            streams.setattr(sys, "stdout", out)
            assert rl(*arguments)[0] == 0
        if arguments[0] == "train":
            assert r"held-out accuracy 0.250 \u2192 0.900" in shown.read_text("latin-1")
    shown.rename("run.yaml")
    assert load("run.yaml").config.trainer.tags == ("日本",)


def test_a_dry_run_checks_and_counts_steps_but_starts_and_creates_nothing(
    rl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen = finish_with(monkeypatch, summary(interrupted=False))
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, _ = rl("train", "small", "--dry-run")
    assert (code, seen) == (0, [])
    assert "depends on the data (train.jsonl will be created first)" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    rl("train", "small")
    assert "steps      3 (3 prompts, 4 epochs)\n" in rl("train", "cli_recipes:unprepared", "--dry-run")[1]
    drops = rl("train", "cli_recipes:unprepared", "--dry-run", "data.on_long_prompt=drop")[1]
    assert "steps      at most 3 (3 prompts, 4 epochs); prompts that are too long are left out at the start\n" in drops


def test_a_dry_run_says_that_more_than_one_rank_needs_ray(rl: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert rl("train", "small", "--dry-run")[0] == 0
    code, _, err = rl("train", "small", "trainer.placement.policy_num_gpus_per_node=2", "--dry-run")
    assert code == 2
    assert "trainer.placement: the ranks of the policy (2) run on Ray, which is not installed: pip install" in err


def test_no_file_is_created_if_another_run_uses_the_directory(rl: Run):
    with held_directories(from_mapping({"trainer.run_dir": "mine"})):
        for more in ([], ["--dry-run"]):
            code, _, err = rl("train", "small", "trainer.run_dir=mine", *more)
            assert code == 2
            assert err.startswith(f"error: trainer.run_dir: mine is in use: process {os.getpid()} on ")
            assert err.count("\n") == 1
    assert not Path("prepared").exists()


PLAYING = [["eval"], ["generate", "--output", "samples.jsonl"]]


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"]], ids=["train", "dry run"])
def test_missing_training_data_that_the_recipe_cannot_create_is_an_error_before_it_creates_files(
    rl: Run, command: list[str]
):
    code, _, err = rl(*command, "small", "data.train_data=[mine.jsonl]")
    assert code == 2
    assert "error: data.train_data: the file mine.jsonl does not exist" in err
    assert not Path("prepared").exists()


@pytest.mark.parametrize("command", PLAYING, ids=["eval", "generate"])
@pytest.mark.parametrize(
    "override",
    [
        "data.train_data=[mine.jsonl]",
        "trainer.policy_mini_batch_size=3",
        "trainer.algorithm.policy_loss_type=mine",
        "trainer.algorithm.advantage_estimator=mine",
        "trainer.ref.model.path=./mine",
        "trainer.logger=mine",
        "trainer.resume_path=mine",
    ],
)
def test_eval_and_generate_ignore_mistakes_in_keys_that_only_training_reads(
    rl: Run, monkeypatch: pytest.MonkeyPatch, command: list[str], override: str
):
    play_nothing(monkeypatch)
    assert rl("train", "small", "trainer.algorithm.use_kl_loss=true", override)[0] == 2
    code, _, err = rl(*command, "small", "trainer.algorithm.use_kl_loss=true", override)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("command", PLAYING, ids=["eval", "generate"])
def test_eval_and_generate_name_the_trained_model_if_they_play_another(
    rl: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    play_nothing(monkeypatch)
    trained = Path("done/model")
    trained.mkdir(parents=True)
    assert rl(*command, "small", "trainer.run_dir=done")[2] == ""
    (trained / "config.json").write_text("{}")
    Path("samples.jsonl").unlink(missing_ok=True)
    code, _, err = rl(*command, "small", "trainer.run_dir=done")
    assert code == 0
    assert err.startswith("warning: ")
    assert err.endswith(
        " is used, not this run's trained model; to use that, add trainer.policy.model.path=done/model\n"
    )


@pytest.mark.parametrize(
    "command", [["train"], ["train", "--dry-run"], *PLAYING], ids=["train", "dry run", "eval", "generate"]
)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.val_data=[mine.jsonl]", "data.val_data: the file mine.jsonl does not exist"),
        ("trainer.policy.model.path=./mine", "trainer.policy.model.path: the directory ./mine does not exist"),
    ],
)
def test_a_missing_path_that_the_recipe_cannot_create_is_an_error_before_it_creates_files(
    rl: Run, command: list[str], override: str, message: str
):
    code, _, err = rl(*command, "small", override)
    assert code == 2
    assert f"error: {message}" in err
    assert not Path("prepared").exists()


def test_an_existing_directory_that_the_recipe_would_create_is_checked(rl: Run):
    Path("model").mkdir()
    code, _, err = rl("train", "small")
    assert code == 2
    assert "model has no config.json" in err
    assert not Path("prepared").exists()


def test_a_directory_given_for_a_config_file_is_refused_unless_a_recipe_has_its_name(rl: Run):
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    assert "error: run: is a directory; use run/config.yaml" in rl("train", "run")[2]
    Path("small").mkdir()
    assert rl("config", "small")[0] == 0


def test_a_key_without_effect_causes_a_warning_only_if_the_user_set_it(rl: Run):
    assert "clip_ratio_c" not in rl("train", "cli_recipes:with_unread_key", "--dry-run")[2]
    err = rl("train", "cli_recipes:with_unread_key", "--dry-run", "trainer.algorithm.clip_ratio_c=6")[2]
    assert "warning: trainer.algorithm.clip_ratio_c: has no effect with" in err


@pytest.mark.parametrize(
    ("second_row", "message"),
    [
        ('{"prompt": "1+1="}', "rows.jsonl:2: the row has no 'env_class' and environment.env_class is not set"),
        ('{"prompt": "1+1=", "env_class": "arithmetik"}', "rows.jsonl:2: env_class: 'arithmetik' is not among the"),
    ],
)
def test_a_row_without_a_known_environment_is_an_error_before_the_recipe_creates_files(
    rl: Run, second_row: str, message: str
):
    idle = "tests.core.idle_plugins:Environment"
    Path("rows.jsonl").write_text(f'{{"prompt": "1+1=", "env_class": "{idle}"}}\n{second_row}\n')
    arguments = ("generator.type=environment", "data.train_data=[rows.jsonl]")
    code, _, err = rl("train", "small", *arguments)
    assert code == 2
    assert f"error: {message}" in err
    assert not Path("prepared").exists()
    assert rl("train", "small", "--dry-run", *arguments, f"environment.env_class={idle}")[0] == 0


def test_generate_creates_the_directory_of_its_output(rl: Run, monkeypatch: pytest.MonkeyPatch):
    play_nothing(monkeypatch)
    code, out, _ = rl("generate", "small", "--output", "new/folder/samples.jsonl", "--limit", "3")
    assert (code, out) == (0, "3 samples in new/folder/samples.jsonl\n")
    assert "--limit" in rl("generate", "small", "--output", "samples.jsonl", "--limit", "0")[2]
    code, _, err = rl("generate", "small", "--output", "train.jsonl/samples.jsonl")
    assert code == 2
    assert "error: --output: train.jsonl/samples.jsonl cannot be created: " in err
    assert "train.jsonl is not a writable directory. Choose another file" in err


@pytest.mark.parametrize("content", ["", "a row\n"])
def test_generation_that_fails_leaves_no_empty_output(rl: Run, monkeypatch: pytest.MonkeyPatch, content: str):
    async def generate(config: Config, reads: str, output: Path, limit: int | None) -> int:
        assert output.read_text() == ""
        output.write_text(content)
        raise WorkerError("the engine failed")

    monkeypatch.setattr(trainer_run, "_generate", generate)
    assert rl("generate", "small", "--output", "samples.jsonl")[::2] == (1, "error: the engine failed\n")
    assert Path("samples.jsonl").exists() == bool(content)


def test_progress_bars_of_hugging_face_are_off_unless_the_user_enables_them(rl: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    rl("config", "small")
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    rl("config", "small")
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
