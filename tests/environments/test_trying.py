"""`rl try`: a user plays an environment by hand."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from rl_core.errors import ConfigError, DataError, DeadlineError, PluginError, RLError
from rl_core.interfaces import Action, Environment, StepResult
from rl_environments import by_hand
from rl_environments.trying import try_environment
from rl_examples.arithmetic import write_rows
from rl_examples.guess import numbers, write_model

ROW = json.dumps({"prompt": "?", "number": 3})
HERE = Path(__file__).parents[2]
RL = str(Path(sys.executable).with_name("rl"))


class Odd(Environment):
    """Raises, hangs, blocks, or returns a wrong result, as the row's `raises` or `answers` says."""

    def __init__(self, row: Any, options: Any) -> None:
        self._row = row
        if row.get("raises") == "init":
            raise ValueError("no such game")

    async def reset(self) -> Any:
        return [{"role": "user", "content": "two\nlines"}]

    async def step(self, action: Action) -> Any:
        if self._row.get("raises") == "step":
            raise SystemExit("gone")
        if self._row.get("raises") == "silent":
            raise KeyError
        if self._row.get("raises") == "hang":
            import asyncio

            await asyncio.sleep(600)
        if self._row.get("raises") == "block":
            time.sleep(60)
        if self._row.get("raises") == "wrong":
            return 1.0
        if "answers" in self._row:
            return StepResult(**{"reward": 0.0, "done": False, **self._row["answers"]})
        return StepResult(reward=float(len(action.text)), done=True)

    async def close(self) -> None:
        print("closed")


class NotAsync(Odd):
    def step(self, action: Action) -> Any:
        return StepResult(reward=0.0, done=True)


class TwoTurns(Environment):
    """Answers the first response with a hint and ends at the second, whatever the responses are."""

    def __init__(self, row: Any, options: Any) -> None:
        self._number, self._is_first = row["number"], True

    async def reset(self) -> Any:
        return [{"role": "user", "content": "?"}]

    async def step(self, action: Action) -> StepResult:
        if self._is_first:
            self._is_first = False
            return StepResult(reward=0.5, done=False, observation=[{"role": "user", "content": "<"}])
        return StepResult(reward=float(self._number), done=True)


HERE_MODULE = "tests.environments.test_trying"
ODD = f"{HERE_MODULE}:Odd"
TWO_TURNS = f"{HERE_MODULE}:TwoTurns"


def printed_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, said: str = ""
) -> str:
    """What `rl try` prints in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert try_environment.main(list(arguments), standalone_mode=False) == 0
    return capsys.readouterr().out


def rl(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [RL, "try", *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=240, cwd=HERE, check=False)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"reward": None}, "the environment's reward is None, expected a finite number"),
        ({"reward": float("nan")}, "the environment's reward is nan, expected a finite number"),
        ({"metrics": {"accuracy": "high"}}, "the environment's metric 'accuracy' is 'high', expected a finite number"),
        ({}, "an observation must be text or a list of messages with 'role' and 'content', got None"),
        ({}, "got None; return an observation with done=False, or end the episode with done=True"),
        ({"observation": [{"role": "assistant", "content": "x"}]}, "a message of the role 'assistant'"),
        ({"done": "no"}, "the environment's done is 'no', expected True or False"),
        ({"done": None}, "the environment's done is None, expected True or False"),
    ],
)
def test_answers_that_would_fail_in_a_run_fail_here(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], message: str
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    with pytest.raises(DataError, match=re.escape(message)):
        try_environment.main([ODD, "--row", json.dumps({"prompt": "?", "answers": answers})], standalone_mode=False)


def test_a_method_that_is_not_async_is_refused_as_in_a_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    with pytest.raises(DataError, match="`step` returned StepResult, expected an awaitable; define it with `async def"):
        try_environment.main([f"{HERE_MODULE}:NotAsync", "--row", ROW], standalone_mode=False)


def test_a_game_is_played_to_its_end():
    played = rl("guess", "--row", ROW, said="5\n3\n")
    assert played.returncode == 0, played.stderr
    assert "prompt" not in played.stderr
    assert "user         ?" in played.stdout
    assert "user         <" in played.stdout
    assert "accuracy 1, guesses 2" in played.stdout
    assert "you          5\n" in played.stdout
    assert played.stdout.endswith("done after 2 turns: reward 1\n")


def test_tools_are_listed_and_a_response_may_have_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = json.dumps({"prompt": [{"role": "user", "content": "2*3?"}], "answer": 6})
    call = '<tool_call>\\\n{"name": "calculate", "arguments": {"expression": "2*3"}}\\\n</tool_call>\n'
    printed = printed_by(monkeypatch, capsys, "calculator", "--row", row, said=f"{call}It is 6\n")
    assert "tool         calculate(expression): The value of an arithmetic expression." in printed
    assert "tool         6\n" in printed
    assert printed.endswith("done after 2 turns: reward 1\n")


def test_observations_of_a_text_episode_are_labelled_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2*3"}}</tool_call>'
    row = '{"prompt": "2*3?", "answer": 6}'
    printed = printed_by(monkeypatch, capsys, "calculator", "--row", row, said=f"{call}\nIt is 6\n")
    assert printed.startswith(f"prompt       2*3?\nyou          {call}\nenvironment  \n             6\n")


def test_the_page_shows_what_a_played_tool_call_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = json.dumps({"prompt": [{"role": "user", "content": "2*3?"}], "answer": 6})
    page = (HERE / "docs/environments.md").read_text()
    shown = page.partition(f"$ rl try calculator --row '{row}'\n")[2].partition("```")[0]
    responses = "".join(re.findall(r"^you +(.*\n)", shown, re.MULTILINE))
    assert printed_by(monkeypatch, capsys, "calculator", "--row", row, said=responses) == shown


def test_the_end_of_the_input_ends_the_game_and_closes_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n{ROW}\n")
    row = ("--data", str(tmp_path / "rows.jsonl"), "--number", "2")
    printed = printed_by(monkeypatch, capsys, "guess", *row, said="5\n")
    assert "ended by you after 1 turn: reward 0 so far" in printed
    assert "closed" in printed_by(monkeypatch, capsys, ODD, "--row", ROW)


def test_ctrl_c_ends_the_game_without_a_traceback():
    command = [RL, "try", ODD, "--row", ROW]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE,
        # A shell's background job ignores SIGINT, and so do its children; this test may be part of such a job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while "lines" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)  # so that `rl try` is likely to wait for input; an earlier signal would end it in the same way
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "closed" in out
    assert "Traceback" not in err
    assert "interrupted" in err


@pytest.fixture(scope="module")
def of_a_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of `rl try` that let an untrained model of the recipe `guess` play. The data has four rows."""
    directory = tmp_path_factory.mktemp("guess")
    write_rows(directory / "rows.parquet", numbers()[4:8])
    write_model(directory / "model", seed=0)
    data = [f"data.{which}_data=[{directory / 'rows.parquet'}]" for which in ("train", "val")]
    return ["--with", "guess", *data, f"trainer.policy.model.path={directory / 'model'}"]


def test_a_model_plays_the_first_three_rows_and_its_episodes_are_printed(
    of_a_tiny_model: list[str], capsys: pytest.CaptureFixture[str]
):
    assert try_environment.main([TWO_TURNS, *of_a_tiny_model], standalone_mode=False) == 0
    printed = capsys.readouterr().out
    for row, number in enumerate((4, 5, 6)):
        assert f"prompt {row}, sample 0: reward {number + 0.5:g}, 2 turns\n  prompt        ?=\n  policy" in printed
    assert printed.count("  environment   <\n") == 3
    assert "prompt 3" not in printed


def test_a_models_single_turns_are_printed_with_their_rewards(
    of_a_tiny_model: list[str], capsys: pytest.CaptureFixture[str]
):
    assert try_environment.main([ODD, *of_a_tiny_model], standalone_mode=False) == 0
    printed = capsys.readouterr().out
    played = re.findall(r"prompt (\d), sample 0: reward (\d+)\n(.*)\n", printed)
    assert [int(row) for row, _, _ in played] == [0, 1, 2]
    assert all(len(response) == int(reward) for _, reward, response in played)


def test_a_mistake_gives_one_message_and_an_exit_code():
    played = rl("gues", "--row", ROW)
    assert played.returncode == 2
    assert "Did you mean 'guess'" in played.stderr
    assert "Traceback" not in played.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import json\n\nROWS = json.loads('')\n", r"JSONDecodeError: Expecting value.* \(unsolved\.py:3\)"),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(unsolved\.py:1\)"),
        ("class Riddle\n", r"SyntaxError: expected ':' \(unsolved\.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
):
    (tmp_path / "unsolved.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=f"^'unsolved:Riddle': importing unsolved failed: {reason}$"):
        try_environment.main(["unsolved:Riddle", "--row", ROW], standalone_mode=False)


@pytest.mark.parametrize(
    ("given", "meant"), [("riddles", "NAME"), ("riddles.py", "NAME"), ("riddles.Riddle", "Riddle")]
)
def test_an_error_about_a_users_file_names_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, meant: str
):
    (tmp_path / "riddles.py").write_text("class Riddle: ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match=r"\. To use an object in your riddles\.py, write riddles:" + f"{meant}$"):
        try_environment.main([given, "--row", ROW], standalone_mode=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_such:Riddle", r"No module named 'no_such'; expected an installed module, or no_such\.py in the current "),
        ("riddles.py:Riddle", r"write the module's name without \.py: riddles$"),
        ("riddles:", r"write the object's name after the colon, as in riddles:NAME$"),
        ("riddles:Ridle", r"riddles has no 'Ridle'\. Did you mean 'Riddle'\?$"),
        ("riddles:Env", r"riddles has no 'Env'\. It was imported from .*/riddles\.py$"),
    ],
)
def test_a_wrong_import_path_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str):
    (tmp_path / "riddles.py").write_text("class Riddle: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "riddles", raising=False)
    with pytest.raises(PluginError, match=message):
        try_environment.main([given, "--row", ROW], standalone_mode=False)
    monkeypatch.delitem(sys.modules, "riddles", raising=False)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_reward_functions_are_named_as_in_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    keys = [f"environment.reward_functions={HERE_MODULE}:length", "environment.reward_weights=[2]"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    try_environment.main(["reward_functions", "--row", ROW, *keys], standalone_mode=False)
    assert "done after 1 turn: reward 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            f"options.reward_functions={HERE_MODULE}:length",
            r"environment\.reward_functions: got 'tests.*'; expected a list",
        ),
        (
            f"reward_functions={HERE_MODULE}:length environment.options.reward_weights=2",
            r"weights: got 2; expected a list",
        ),
        ("reward_functions=", r"environment\.reward_functions: got None; expected a list"),
        ("reward_functions=[3]", r"environment\.reward_functions: got \[3\]; expected a list, such as \[my_module"),
        (f"reward_functions={HERE_MODULE}:length environment.reward_weights=[2,1]", "got 2 weights for 1 functions"),
    ],
)
def test_wrong_keys_of_reward_functions_are_named(given: str, message: str):
    with pytest.raises(ConfigError, match=message):
        try_environment.main(["reward_functions", "--row", ROW, *f"environment.{given}".split()], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["guess"], ConfigError, "name the row to play"),
        (["guess", "--row", ROW, "--data", __file__], ConfigError, "got both --row and --data"),
        (["trainer.seed=1", "--row", ROW], click.UsageError, "got 'trainer.seed=1' where an environment is expected"),
        (
            ["guess", "--row", ROW, "environment.options.guess=1"],
            ConfigError,
            "not an option of the environment 'guess'",
        ),
        (
            ["reward_functions", "--row", ROW, "environment.reward_function=a:b"],
            ConfigError,
            "Did you mean 'environment.reward_functions'?",
        ),
        (["guess", "--row", "{"], DataError, "is not JSON"),
        (["guess", "--row", "[1]"], DataError, "expected a JSON object"),
        (["guess", "--row", '{"prompt": "?", "number": 12}'], DataError, "a number from 0 to 9; got number=12"),
        (["guess", "--row", '{"number": 3}'], DataError, "--row: expected a row with the column 'prompt', got number"),
        (["guess", "--row", ROW, "--timeout-s", "inf"], click.BadParameter, "got inf; expected a number of seconds"),
        (["guess", "--row", ROW, "--timeout-s", "nan"], click.BadParameter, "got nan; expected a number of seconds"),
        (["guess", "--with", "guess", "--timeout-s", "3"], click.UsageError, "use environment.timeout_s=SECONDS"),
        (["guess", "--with", "guess", "--number", "3"], click.UsageError, "leave out --number"),
        (["guess", "--row", ROW, "environment.options.="], ConfigError, "only environment.options.NAME=VALUE"),
        (["guess", "--row", ROW, "trainer.seed=1"], ConfigError, "only environment.options.NAME=VALUE"),
        (["guess", "--row", ROW, "environment.options.x=["], ConfigError, "not valid YAML"),
        (
            ["calculator", "--row", '{"prompt": "?", "answer": 1}', "environment.options.x=1"],
            RLError,
            "not an option of the environment",
        ),
        (["guess", "--with", "guess", "--row", ROW], click.UsageError, "--with plays the recipe's rows"),
        (
            [ODD, "--row", '{"prompt": "?", "raises": "init"}'],
            RLError,
            "Odd raised ValueError: no such game (test_trying.py:",
        ),
        (
            [ODD, "--row", '{"prompt": "?", "raises": "step"}'],
            RLError,
            "step raised SystemExit: gone (test_trying.py:",
        ),
        ([ODD, "--row", '{"prompt": "?", "raises": "silent"}'], RLError, "step raised KeyError (test_trying.py:"),
        ([ODD, "--row", '{"prompt": "?", "raises": "wrong"}'], DataError, "step returned float; expected StepResult"),
        (
            [ODD, "--row", '{"prompt": "?", "raises": "hang"}', "--timeout-s", "0.5"],
            DeadlineError,
            "step did not answer within 0.5 s",
        ),
        (
            [ODD, "--row", '{"prompt": "?", "raises": "block"}', "--timeout-s", "0.1"],
            DeadlineError,
            "within 0.1 s: it blocks",
        ),
    ],
)
def test_the_message_names_what_cannot_be_played(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: type[Exception], message: str
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    if "block" not in str(arguments):
        # A call that awaits must end at its own deadline, and a pause of the machine must not count as a blocked call.
        monkeypatch.setattr(by_hand, "_BLOCKED_S", 200.0)
    with pytest.raises(kind) as raised:
        try_environment.main(arguments, standalone_mode=False)
    assert message in str(getattr(raised.value, "message", raised.value))


def test_a_call_that_blocks_is_interrupted_although_the_process_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    """A script's background job ignores SIGINT."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    monkeypatch.setattr(by_hand, "_BLOCKED_S", 0.1)
    arguments = [ODD, "--row", '{"prompt": "?", "raises": "block"}', "--timeout-s", "0.1"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(DeadlineError, match=r"within 0\.1 s: it blocks"):
            try_environment.main(arguments, standalone_mode=False)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_longest_deadline_is_accepted(monkeypatch: pytest.MonkeyPatch):
    """No thread can wait longer than this deadline. If a thread raises an error, pytest fails the test."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    arguments = [ODD, "--row", ROW, "--timeout-s", str(int(threading.TIMEOUT_MAX))]
    assert try_environment.main(arguments, standalone_mode=False) == 0


def test_an_interrupt_after_the_call_has_returned_is_not_taken_for_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    class Late:
        """A timer that fires just before it is cancelled."""

        def __init__(self, _: float, interrupt: Callable[[], None]) -> None:
            self._interrupt = interrupt

        def start(self) -> None: ...

        def cancel(self) -> None:
            self._interrupt()

        def join(self) -> None: ...

    monkeypatch.setattr(threading, "Timer", Late)
    with by_hand._interrupted("step", 1.0):
        pass


def test_options_are_read_as_in_a_run():
    given = ["environment.options.code.max_tests=2", "environment.options.share=1e-1", "environment.options.x=yes"]
    assert by_hand.options_of(given) == {"code": {"max_tests": 2}, "share": 0.1, "x": "yes"}
    assert by_hand.options_of(["environment.options={a: 1}", "environment.options.b=2"]) == {"a": 1, "b": 2}
    assert by_hand.options_of(["environment.options="]) == by_hand.options_of([]) == {}
    with pytest.raises(ConfigError, match=r"environment\.options: got 3; expected a mapping"):
        by_hand.options_of(["environment.options=3"])


def test_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(DataError, match="the input is not utf-8 text: "):
        try_environment.main(["guess", "--row", ROW], standalone_mode=False)


class Checked(TwoTurns):
    """Checks its options and rows before an episode."""

    @classmethod
    def require_options(cls, options: Any) -> None:
        if options.keys() - {"column"}:
            raise ConfigError("expected only column", key="environment.options")

    @classmethod
    def require_episode(cls, row: Any, options: Any) -> None:
        if options.get("column", "number") not in row:
            raise DataError(f"the row has no {options['column']}")


class NeedsAnInstance(TwoTurns):
    def require_row(self, row: Any) -> None: ...


class TakesMore(TwoTurns):
    @classmethod
    def require_row(cls, row: Any, options: Any) -> None: ...


class Awaits(TwoTurns):
    @staticmethod
    async def require_episode(row: Any, options: Any) -> None: ...


class Raising(TwoTurns):
    """Its checks raise errors that are not `RLError`s."""

    @classmethod
    def require_options(cls, options: Any) -> None:
        int(options.get("level", 1))

    @classmethod
    def require_row(cls, row: Any) -> None:
        row["answer"]


@pytest.mark.parametrize(
    ("name", "option", "kind", "message"),
    [
        ("Checked", "colunm=x", ConfigError, "expected only column"),
        ("Checked", "column=x", DataError, "the row has no x"),
        ("NeedsAnInstance", "x=1", PluginError, r"require_row.* cannot be called as require_row.row.*class method"),
        (
            "TakesMore",
            "x=1",
            PluginError,
            r"missing a required argument: 'options'; define it as `def require_row\(row\)`",
        ),
        ("Awaits", "x=1", PluginError, r"without `await`; define it as `def require_episode\(row, options\)`"),
        (
            "Raising",
            "x=1",
            DataError,
            r"the row: require_row of the environment '.*:Raising' raised KeyError: 'answer' \(test_trying\.py:\d+\); "
            r"to refuse a row, raise rl_core\.errors\.DataError",
        ),
        (
            "Raising",
            "level=high",
            ConfigError,
            r"require_options of the environment '.*:Raising' raised ValueError: .*; to refuse the options, raise",
        ),
    ],
)
def test_the_checks_of_an_environment_run_before_its_episode(name: str, option: str, kind: type[RLError], message: str):
    arguments = [f"{HERE_MODULE}:{name}", "--row", ROW, f"environment.options.{option}"]
    with pytest.raises(kind, match=message):
        try_environment.main(arguments, standalone_mode=False)
