"""Commands that other packages add to `rl`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.core.conftest import Run
from tests.core.fake_plugins import install

COMMANDS = """
import click
from rl_core.errors import DataError


@click.command()
@click.argument("folder")
@click.option("--count", default=1)
@click.pass_context
def count(context, folder, count):
    \"\"\"Counts what is there.\"\"\"
    click.echo(f"{context.command_path}: {count} in {folder}")
    if count < 1:
        raise DataError(f"{folder}: nothing")
    return {"any": "value"} if count == 2 else 3 if count == 3 else None


@click.group()
def many():
    \"\"\"Several.\"\"\"


many.add_command(count)
"""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rl: Run) -> None:
    """Packages whose command works, cannot be imported, is not a click command, has a built-in name, or has the same
    name as another package's command."""
    more = {
        "counting": (COMMANDS, {"commands__count": "counting:count", "commands__many": "counting:many"}),
        "half": ("import no_such_module", {"commands__half": "half:command"}),
        "noclick": ("def run(): pass", {"commands__noclick": "noclick:run"}),
        "proud": (COMMANDS, {"commands__train": "proud:count"}),
        "twin_a": (COMMANDS, {"commands__twin": "twin_a:count"}),
        "twin_b": (COMMANDS, {"commands__twin": "twin_b:count"}),
    }
    site = tmp_path / "commands"
    site.mkdir()
    for module, (source, entry_points) in more.items():
        install(site, monkeypatch, module, source, **entry_points)


@pytest.mark.usefixtures("packaged")
def test_commands_of_packages_are_listed_with_their_package_and_none_is_imported(rl: Run):
    code, out, _ = rl("--help")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "count (of counting 1.0)" in lines
    assert "half (of half 1.0)" in lines
    assert "twin (of twin-a 1.0 and twin-b 1.0)" in lines
    assert "'train' of proud 1.0 is refused: `rl train` is built in." in " ".join(lines)
    assert {"counting", "half", "noclick", "proud", "twin_a", "twin_b"} & set(sys.modules) == set()


@pytest.mark.usefixtures("packaged")
def test_a_command_of_a_package_runs_like_a_built_in_one(rl: Run):
    assert rl("count", "here", "--count", "4")[:2] == (0, "rl count: 4 in here\n")
    assert rl("many", "count", "there")[:2] == (0, "rl many count: 1 in there\n")
    assert rl("count", "here", "--count", "2")[0] == 0
    assert rl("count", "here", "--count", "3")[0] == 3
    code, _, err = rl("count", "here", "--count", "0")
    assert (code, err) == (2, "error: here: nothing\n")
    assert "Missing argument 'FOLDER'" in rl("count")[2]
    assert "Counts what is there." in rl("count", "--help")[1]


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "half",
            "error: rl half: the command of half 1.0 (half:command) could not be imported: ModuleNotFoundError: No",
        ),
        (
            "noclick",
            "error: rl noclick: the command of noclick 1.0 (noclick:run) is of type function; expected a click command",
        ),
        ("twin", "error: rl twin: provided by twin-a 1.0 and twin-b 1.0; expected exactly one package"),
    ],
)
def test_a_command_that_cannot_run_is_one_error_when_it_is_called(rl: Run, name: str, message: str):
    code, out, err = rl(name, "--anything")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("packaged")
def test_a_built_in_command_keeps_its_name(rl: Run):
    assert "Missing argument 'RECIPE'" in rl("train")[2]


@pytest.mark.usefixtures("packaged")
def test_the_list_of_plug_ins_says_which_commands_cannot_run(rl: Run):
    _, out, _ = rl("plugins")
    shown = {line.split()[0]: line for line in out.partition("commands (rl_core.commands)")[2].splitlines()[1:]}
    assert shown["count"].split() == ["count", "counting", "1.0", "counting:count", "Counts", "what", "is", "there."]
    assert "BROKEN: rl half: the command of half 1.0 (half:command) could not be imported" in shown["half"]
    assert "BROKEN: rl noclick: the command of noclick 1.0" in shown["noclick"]
    assert "'train' of proud 1.0 is refused: `rl train` is built in" in shown["train"]
