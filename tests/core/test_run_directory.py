"""If a run resumes or goes back to an earlier step, or another run takes its directory, the directory loses at most an
unfinished checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import attrs
import pytest

from rl_core.config import Config, from_mapping, load
from rl_core.errors import CheckpointError, ConfigError
from rl_core.trainer.state.checkpoint import RunState, delete_old_checkpoints, list_checkpoints
from rl_core.trainer.state.run_directory import MARK, newest_config, open_run_directory, set_aside_later_steps
from tests.core.stored_checkpoints import save_checkpoint
from tests.core.test_trackers import steps_in


def config_of(run_dir: Path, **trainer: object) -> Config:
    keys = {f"trainer.{name}": value for name, value in trainer.items()}
    return from_mapping({"trainer.policy.model.path": "model", "trainer.run_dir": str(run_dir), **keys})


async def write_run(run_dir: Path, *, rows: range, checkpoints: list[int]) -> None:
    """Writes the files of a run that logged `rows` and saved `checkpoints`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / MARK).touch()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run_dir / name).write_text("".join(json.dumps({"step": step, "of": str(run_dir)}) + "\n" for step in rows))
    for step in checkpoints:
        state = RunState(step=step, next_group=step * 4, restart_groups=(), kl_coef=0.0, nonfinite_steps=0)
        await save_checkpoint(run_dir / "checkpoints", state)


def saved(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


async def test_going_back_in_a_run_moves_all_later_steps_aside(tmp_path: Path):
    run_dir = tmp_path / "run"
    await write_run(run_dir, rows=range(7), checkpoints=[2, 4, 6])
    for file in ("model/config.json", "model/step_000002/config.json", "model/step_000004/config.json", "report.html"):
        (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / file).write_text("of the old branch")
    path = run_dir / "checkpoints" / "step_000002"
    config = config_of(run_dir, resume_mode="from_path", resume_path=str(path))
    start = open_run_directory(config)
    assert (start.checkpoint, start.state.step) == (path, 2)
    set_aside_later_steps(config, 2)
    aside = run_dir / "replaced_1"
    assert saved(run_dir / "checkpoints") == ["step_000002"]
    assert saved(aside / "checkpoints") == ["step_000004", "step_000006"]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert steps_in(run_dir / name) == [0, 1, 2]
        assert steps_in(aside / name) == [3, 4, 5, 6]
    assert [path.name for path in (run_dir / "model").iterdir()] == ["step_000002"]
    assert sorted(path.name for path in (aside / "model").iterdir()) == ["config.json", "step_000004"]
    assert (aside / "report.html").exists()
    set_aside_later_steps(config, 2)
    assert not (run_dir / "replaced_2").exists()
    set_aside_later_steps(config, 1)
    assert steps_in(run_dir / "replaced_2" / "metrics.jsonl") == [2]


async def test_after_going_back_latest_resumes_the_new_branch(tmp_path: Path):
    run_dir = tmp_path / "run"
    await write_run(run_dir, rows=range(7), checkpoints=[2, 4, 6])
    set_aside_later_steps(config_of(run_dir), 2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "of": "the new branch"}\n')
    start = open_run_directory(config_of(run_dir, resume_mode="latest"))
    assert start.checkpoint == run_dir / "checkpoints" / "step_000002"


async def test_a_renamed_checkpoint_can_be_resumed_from(tmp_path: Path):
    run_dir = tmp_path / "run"
    await write_run(run_dir, rows=range(1, 5), checkpoints=[2, 4])
    best = (run_dir / "checkpoints" / "step_000002").rename(run_dir / "checkpoints" / "best")
    start = open_run_directory(config_of(run_dir, resume_mode="from_path", resume_path=str(best)))
    assert (start.checkpoint, start.state.step) == (best, 2)


async def test_latest_takes_a_whole_checkpoint_whose_rows_are_lost_and_says_which_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    await write_run(tmp_path / "run", rows=range(4), checkpoints=[2, 6])
    config = config_of(tmp_path / "run", resume_mode="latest")
    assert open_run_directory(config).state.step == 6
    assert "lacks the rows of 3 steps, 4 to 6; step_000006 is complete" in caplog.text
    assert saved(tmp_path / "run" / "checkpoints") == ["step_000002", "step_000006"]


async def test_a_run_moves_only_what_a_run_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    project = tmp_path / "project"
    await write_run(project, rows=range(3), checkpoints=[2])
    (project / "src").mkdir()
    (project / "notes.txt").write_text("mine")
    (project / "start" / "model").mkdir(parents=True)
    open_run_directory(config_of(project, resume_mode="none"))
    assert sorted(path.name for path in project.iterdir()) == [MARK, "config.yaml", "notes.txt", "src", "start"]
    assert sorted(path.name for path in (tmp_path / "project.1").iterdir()) == [
        MARK,
        "checkpoints",
        "metrics.jsonl",
        "samples.jsonl",
    ]
    assert "stays in place; only the files of the earlier run were moved out of it" in caplog.text


async def test_a_run_does_not_move_the_model_that_it_starts_from(tmp_path: Path):
    run_dir = tmp_path / "run"
    await write_run(run_dir, rows=range(3), checkpoints=[])
    (run_dir / "model" / "start").mkdir(parents=True)
    config = from_mapping(
        {"trainer.policy.model.path": str(run_dir / "model" / "start"), "trainer.run_dir": str(run_dir)}
    )
    open_run_directory(config)
    assert (run_dir / "model" / "start").is_dir()
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    values = {"trainer.run_dir": str(run_dir), "trainer.export_path": str(run_dir / "model" / "start")}
    with pytest.raises(ConfigError, match=r"trainer\.export_path: .* is the model that the run starts from"):
        open_run_directory(from_mapping({"trainer.policy.model.path": str(run_dir / "model" / "start"), **values}))


async def test_a_directory_with_a_foreign_metrics_file_is_refused_untouched(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"loss": 0.1}\n{"loss": 0.2}\n')
    for mode in ("none", "latest"):
        with pytest.raises(ConfigError, match=r"trainer\.run_dir: .*other is not a run directory: .*line 1"):
            open_run_directory(config_of(tmp_path / "other", resume_mode=mode))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["metrics.jsonl"]


FOREIGN = {
    "metrics.jsonl": '{"step": 1, "loss": 0.1}\n',
    "samples.jsonl": "",
    "config.yaml": "trainer:\n  max_training_steps: 3\n",
    "config.resumed-1.yaml": "mine",
    "summary.json": "{}",
    "report.html": "mine",
    "wandb_run_id.txt": "mine",
    "logs/mine.log": "mine",
    "model/config.json": "{}",
    "tensorboard/mine": "mine",
    "wandb/mine": "mine",
    "checkpoints/step_1/weights.bin": "mine",
    "replaced_1/mine": "mine",
}


@pytest.mark.parametrize("names", [*((name,) for name in FOREIGN), tuple(FOREIGN)], ids=lambda names: names[-1])
@pytest.mark.parametrize("mode", ["none", "latest"])
async def test_nothing_is_moved_or_written_in_a_directory_that_is_no_run(tmp_path: Path, names: tuple[str], mode: str):
    other = tmp_path / "other"
    for name in names:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(FOREIGN[name])
    listed = ", ".join(sorted({name.partition("/")[0] for name in names} - {"metrics.jsonl"}))
    with pytest.raises(ConfigError, match=rf"^trainer\.run_dir: .*other is not a run directory: it holds {listed}"):
        open_run_directory(config_of(other, resume_mode=mode))
    assert {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()} == set(names)
    assert all((other / name).read_text() == FOREIGN[name] for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    # The error message tells the user to create this file.
    (other / MARK).touch()
    open_run_directory(config_of(other, resume_mode=mode))


async def test_a_run_directory_is_recognised_by_its_mark_or_by_a_complete_checkpoint(tmp_path: Path):
    new, fetched, foreign = (tmp_path / name for name in ("new", "fetched", "foreign"))
    open_run_directory(config_of(new))
    open_run_directory(config_of(new, seed=2))
    for run_dir, rows, checkpoints in ((fetched, range(0), [2]), (foreign, range(3), [])):
        await write_run(run_dir, rows=rows, checkpoints=checkpoints)
        (run_dir / MARK).unlink()
    for path in (fetched / "metrics.jsonl", fetched / "samples.jsonl"):
        path.unlink()
    assert open_run_directory(config_of(fetched, resume_mode="latest")).state.step == 2
    with pytest.raises(ConfigError, match=r"nothing shows that a run wrote them"):
        open_run_directory(config_of(foreign))
    assert all((run_dir / MARK).exists() for run_dir in (new, fetched))


async def test_a_partly_fetched_checkpoint_does_not_make_a_directory_foreign(tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "step_000004.partial").mkdir(parents=True)
    (tmp_path / "run" / "logs").mkdir()
    open_run_directory(config_of(tmp_path / "run", resume_mode="latest"))


async def test_directories_that_are_named_like_checkpoints_are_left_alone(tmp_path: Path):
    for name in ("step_1", "step_2"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    config = config_of(tmp_path / "run", resume_mode="none", ckpt_path=str(tmp_path / "models"))
    open_run_directory(config)
    delete_old_checkpoints(tmp_path / "models", 0)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["step_1", "step_2"]


async def test_remains_of_an_unfinished_save_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    await write_run(tmp_path / "run", rows=range(5), checkpoints=[2])
    (tmp_path / "run" / "checkpoints" / "step_000004.partial" / "policy").mkdir(parents=True)
    open_run_directory(config_of(tmp_path / "run", resume_mode="latest"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]
    assert "step_000004.partial was left by a run that ended while saving" in caplog.text


async def test_latest_takes_the_newest_checkpoint_if_the_rows_are_lost(tmp_path: Path):
    await write_run(tmp_path / "lost", rows=range(0), checkpoints=[2, 4])
    config = config_of(tmp_path / "run", resume_mode="latest", ckpt_path=str(tmp_path / "lost" / "checkpoints"))
    assert open_run_directory(config).state.step == 4


async def test_resuming_from_another_run_moves_the_existing_run_aside(tmp_path: Path):
    await write_run(tmp_path / "first", rows=range(5), checkpoints=[4])
    await write_run(tmp_path / "second", rows=range(7), checkpoints=[2, 6])
    path = tmp_path / "first" / "checkpoints" / "step_000004"
    start = open_run_directory(config_of(tmp_path / "second", resume_mode="from_path", resume_path=str(path)))
    assert start.checkpoint == path
    assert sorted(file.name for file in (tmp_path / "second").iterdir()) == [MARK, "config.yaml"]
    assert saved(tmp_path / "second.1" / "checkpoints") == ["step_000002", "step_000006"]
    assert saved(tmp_path / "first" / "checkpoints") == ["step_000004"]


async def test_a_replaced_branch_can_be_resumed(tmp_path: Path):
    run_dir = tmp_path / "run"
    await write_run(run_dir, rows=range(7), checkpoints=[2, 6])
    set_aside_later_steps(config_of(run_dir), 2)
    path = run_dir / "replaced_1" / "checkpoints" / "step_000006"
    start = open_run_directory(config_of(run_dir, resume_mode="from_path", resume_path=str(path)))
    assert start.checkpoint == tmp_path / "run.1" / "replaced_1" / "checkpoints" / "step_000006"
    assert start.checkpoint.is_dir()
    assert steps_in(tmp_path / "run.1" / "metrics.jsonl") == [0, 1, 2]


async def test_replaced_checkpoints_in_another_directory_are_moved_aside_too(tmp_path: Path):
    await write_run(tmp_path / "run", rows=range(3), checkpoints=[])
    await write_run(tmp_path / "disk", rows=range(0), checkpoints=[2])
    checkpoints = tmp_path / "disk" / "checkpoints"
    assert (
        open_run_directory(config_of(tmp_path / "run", resume_mode="none", ckpt_path=str(checkpoints))).state.step == 0
    )
    assert saved(checkpoints) == []
    assert saved(checkpoints / "replaced_1") == ["step_000002"]
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()


async def test_starting_over_without_a_checkpoint_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    await write_run(tmp_path / "run", rows=range(3), checkpoints=[])
    with caplog.at_level(logging.WARNING):
        open_run_directory(config_of(tmp_path / "run", resume_mode="latest"))
    assert f"starts from the beginning; the earlier run was moved to {tmp_path / 'run.1'}" in caplog.text
    caplog.clear()
    open_run_directory(config_of(tmp_path / "run", resume_mode="latest"))
    assert not caplog.text


async def test_the_first_configuration_stays_and_others_are_numbered(tmp_path: Path):
    run_dir = tmp_path / "run"
    first = config_of(run_dir, seed=1)
    open_run_directory(first)
    await write_run(run_dir, rows=range(3), checkpoints=[2])
    path = str(run_dir / "checkpoints" / "step_000002")
    resumed = [
        config_of(run_dir, seed=1),
        config_of(run_dir, seed=1, resume_mode="from_path", resume_path=path),
        config_of(run_dir, seed=1, max_training_steps=9),
        config_of(run_dir, seed=1, max_training_steps=9),
    ]
    for config in resumed:
        open_run_directory(config)
    assert load(str(run_dir / "config.yaml")).config == first
    assert sorted(file.name for file in run_dir.glob("config.*")) == [
        "config.resumed-1.yaml",
        "config.resumed-2.yaml",
        "config.yaml",
    ]
    assert newest_config(run_dir).name == "config.resumed-2.yaml"
    assert load(str(newest_config(run_dir))).config == resumed[-1]
    # The overrides that an interrupted run prints if it was resumed from a path.
    overrides = ["trainer.resume_mode=latest", "trainer.resume_path=null"]
    again = load(str(run_dir / "config.resumed-1.yaml"), overrides).config
    assert again == attrs.evolve(first, trainer=attrs.evolve(first.trainer, resume_mode="latest"))


async def test_a_damaged_checkpoint_is_refused_before_anything_moves(tmp_path: Path):
    await write_run(tmp_path / "run", rows=range(5), checkpoints=[2])
    await write_run(tmp_path / "other", rows=range(5), checkpoints=[4])
    path = tmp_path / "other" / "checkpoints" / "step_000004"
    (path / "complete.json").write_text('{"weights')
    with pytest.raises(CheckpointError, match=r"complete\.json cannot be read"):
        open_run_directory(config_of(tmp_path / "run", resume_mode="from_path", resume_path=str(path)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "run"]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.run_dir: .*file/run cannot be created"):
        open_run_directory(config_of(tmp_path / "file" / "run"))
