"""The files, the trial of the reward and the dry run of docs/first_run.md, in the order of the page."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rl_core.cli import main
from tests.real_model.real_text import real_model

PAGE = (Path(__file__).parents[2] / "docs" / "first_run.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def succeeds(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


@pytest.mark.slow
def test_the_page_works_up_to_its_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (rows,), (reward,), (run,) = blocks("json"), blocks("python"), blocks("yaml")
    for name, text in {"rows.jsonl": rows, "my_rewards.py": reward, "run.yaml": run}.items():
        Path(name).write_text(text)
    (play,), train = blocks("sh")[:1], blocks("sh")[1].splitlines()
    assert [line.split()[:3] for line in train] == [["rl", "train", "run.yaml"]] * 2

    for response, expected in (("42", "1"), ("41", "0")):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{response}\n"))
        succeeds(shlex.split(play)[1:])
        assert re.search(rf"reward +{expected}\b", capsys.readouterr().out)

    # The page's model is not on this machine; another chat model takes its place.
    succeeds([*shlex.split(train[0])[1:], f"trainer.policy.model.path={real_model()}"])
    shown = capsys.readouterr().out
    assert "2 prompts × 8 samples" in shown
    assert "20 epochs" in shown
    assert not Path(yaml.safe_load(run)["trainer"]["run_dir"]).exists()
